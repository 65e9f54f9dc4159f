"""The writer: bytes of tensors of any strides, in both modes, with digests, in bounded memory."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.engine import output
from milepost.engine import write as writer
from milepost.engine.source import BytesSource, TensorSource
from milepost.engine.write import Durability, FileWrite, Piece, WriteMode, WriteOptions, write_files
from milepost.errors import NoSpaceError
from milepost.format.digests import EXTENT_NBYTES, Extent
from milepost.format.dtypes import DTYPES
from milepost.storage import fileops
from milepost.storage.space import free_nbytes

MODES = [
    WriteOptions(mode=WriteMode.BUFFERED, threads=1),
    WriteOptions(mode=WriteMode.DIRECT, threads=1),
    WriteOptions(mode=WriteMode.DIRECT, threads=3),
    WriteOptions(mode=WriteMode.AUTO, threads=3),
    WriteOptions(mode=WriteMode.AUTO, threads=3, durability=Durability.PAGE_CACHE),
]
IDS = ["buffered", "direct", "direct-threads", "auto-threads", "page-cache"]
every_mode = pytest.mark.parametrize("options", MODES, ids=IDS)
TORCH_DTYPES = [
    getattr(torch, row.torch_name)
    for row in DTYPES.values()
    if row.torch_name is not None and hasattr(torch, row.torch_name)
]


def plan(path: Path, parts: Sequence[bytes | Tensor]) -> FileWrite:
    """A file that holds `parts` one after the other."""
    pieces, start = [], 0
    for part in parts:
        source = BytesSource(part) if isinstance(part, bytes) else TensorSource(part)
        pieces.append(Piece(start=start, source=source))
        start += source.nbytes
    return FileWrite(path=path, pieces=tuple(pieces))


def raw(part: bytes | Tensor) -> bytes:
    """The bytes that torch itself gives for the values of a tensor in row-major order."""
    if isinstance(part, bytes):
        return part
    plain = part.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def write_one(
    path: Path, parts: Sequence[bytes | Tensor], options: WriteOptions
) -> tuple[bytes, list[Extent]]:
    (extents,) = write_files([plan(path, parts)], options)
    return path.read_bytes(), extents


def assert_digests(data: bytes, extents: Sequence[Extent]) -> None:
    """Extents tile the file and carry the digests of what the file holds."""
    at = 0
    for extent in extents:
        assert extent.start == at
        assert extent.digest == xxhash.xxh3_128(data[extent.start : extent.end]).digest()
        at = extent.end
    assert at == len(data)


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of any dtype with random bytes, every pattern allowed."""
    count = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels-last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "every-other": lambda: torch.randn(11)[::2],
    "every-other-row": lambda: torch.randn(6, 7)[::2],
    "expanded": lambda: torch.randn(5).expand(4, 5),
    "expanded-scalar": lambda: torch.tensor(1.5).expand(3, 2),
    "zero-dim": lambda: torch.tensor(2.25),
    "zero-dim-of-a-view": lambda: torch.randn(4, 4).t()[1, 2],
    "empty": lambda: torch.empty(0, 4),
    "empty-transposed": lambda: torch.empty(3, 0).t(),
    "conjugate": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "conjugate-transposed": lambda: torch.randn(4, 3, dtype=torch.complex64).conj().t(),
    "imaginary-of-a-conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "slice-of-a-buffer": lambda: torch.randn(300)[100:200],
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 4)).t(),
    "sliding-windows": lambda: torch.randn(20).unfold(0, 5, 2),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
}


@pytest.mark.case("V02")
@every_mode
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_written_as_its_contiguous_copy_and_keeps_its_strides(
    name: str, options: WriteOptions, tmp_path: Path
) -> None:
    tensor = VIEWS[name]()
    strides, address = tensor.stride(), tensor.data_ptr() if tensor.numel() else 0
    data, extents = write_one(tmp_path / "part", [b"header", tensor, b"tail"], options)
    assert data == b"header" + raw(tensor) + b"tail"
    assert_digests(data, extents)
    assert tensor.stride() == strides
    assert not tensor.numel() or tensor.data_ptr() == address


@pytest.mark.case("V05")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_type_that_the_container_knows_is_written_bit_by_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    parts = [some(dtype, 3, 4), some(dtype, 6, 4).t(), some(dtype, 9)[::2], some(dtype, 0, 4)]
    expected = b"".join(raw(part.view(torch.uint8)) if dtype.itemsize == 1 else raw(part)
                        for part in parts)  # fmt: skip
    data, extents = write_one(tmp_path / "part", parts, WriteOptions(threads=1))
    assert data == expected
    assert_digests(data, extents)


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A view made by a few random steps from a random tensor."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    tensor = some(dtype, *shape)
    for _ in range(draw(st.integers(0, 3))):
        if not tensor.dim():
            tensor = tensor.expand(draw(st.integers(0, 3)))
        elif draw(st.booleans()):
            first, second = draw(st.integers(0, tensor.dim() - 1)), draw(st.integers(0, 1))
            tensor = tensor.transpose(first, min(second, tensor.dim() - 1))
        else:
            dim = draw(st.integers(0, tensor.dim() - 1))
            start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
            index: list[slice] = [slice(None)] * tensor.dim()
            index[dim] = slice(start, None, step)
            tensor = tensor[tuple(index)]
    return tensor


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(parts=st.lists(strided() | st.binary(max_size=9000), max_size=5), which=st.data())
def test_any_mix_of_bytes_and_views_is_written_in_order(
    parts: list[bytes | Tensor], which: st.DataObject, tmp_path: Path
) -> None:
    options = which.draw(st.sampled_from(MODES))
    path = tmp_path / "part"
    path.unlink(missing_ok=True)
    data, extents = write_one(path, parts, options)
    assert data == b"".join(map(raw, parts))
    assert_digests(data, extents)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 70_000) | st.sampled_from([4096, 8192, 65536]), max_size=6),
    which=st.data(),
)
def test_runs_that_share_pages_never_clobber_each_other(
    lengths: list[int], which: st.DataObject, tmp_path: Path
) -> None:
    """Small runs and a small bounce buffer bring every border of the direct mode about."""
    options = which.draw(st.sampled_from(MODES))
    parts = [some(torch.uint8, length) for length in lengths]
    path = tmp_path / "part"
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "RUN_NBYTES", which.draw(st.sampled_from([1, 5000, 8192])))
        patch.setattr(output, "BOUNCE_NBYTES", which.draw(st.sampled_from([4096, 12288])))
        patch.setattr(writer, "SCRATCH_NBYTES", 1000)
        data, extents = write_one(path, parts, options)
    assert data == b"".join(map(raw, parts))
    assert_digests(data, extents)


@every_mode
def test_extents_end_at_tensors_and_at_64_mib_and_several_files_are_written_at_once(
    options: WriteOptions, tmp_path: Path
) -> None:
    big = torch.arange(EXTENT_NBYTES // 4 + 1000, dtype=torch.int32)
    small = [some(torch.float32, 10, 10).t() for _ in range(40)]
    writes = [plan(tmp_path / "big", [b"x" * 100, big]), plan(tmp_path / "small", small)]
    first, second = write_files(writes, options)
    assert [(e.start, e.end) for e in first] == [
        (0, 100), (100, 100 + EXTENT_NBYTES), (100 + EXTENT_NBYTES, 100 + EXTENT_NBYTES + 4000)
    ]  # fmt: skip
    assert len(second) == 40
    data = (tmp_path / "big").read_bytes()
    assert data == b"x" * 100 + raw(big)
    assert_digests(data, first)
    assert_digests((tmp_path / "small").read_bytes(), second)


@every_mode
def test_a_file_without_a_byte_is_made_too(options: WriteOptions, tmp_path: Path) -> None:
    for parts in ([], [torch.empty(0)], [b""]):
        path = tmp_path / f"part{len(list(tmp_path.iterdir()))}"
        assert write_one(path, parts, options) == (b"", [])


@every_mode
def test_progress_adds_up_to_the_bytes_of_all_files(options: WriteOptions, tmp_path: Path) -> None:
    seen: list[int] = []
    counted = WriteOptions(
        mode=options.mode,
        threads=options.threads,
        durability=options.durability,
        on_bytes=seen.append,
    )
    write_files(
        [plan(tmp_path / str(i), [b"h" * 77, torch.randn(5000)]) for i in range(3)], counted
    )
    assert sum(seen) == 3 * (77 + 20_000)


def operations(write: FileWrite, options: WriteOptions) -> list[str]:
    seen: list[str] = []

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        seen.append(operation)
        return function(*arguments)

    with fileops.hooked(hook):
        write_files([write], options)
    return seen


def test_space_is_reserved_before_the_first_byte_and_synced_after_the_last(tmp_path: Path) -> None:
    seen = operations(plan(tmp_path / "a", [torch.randn(100)]), WriteOptions(threads=1))
    assert seen[:2] == ["open", "reserve"]
    assert seen[-1] == "fsync"
    assert "write" in seen[2:-1]


def test_the_page_cache_mode_syncs_nothing(tmp_path: Path) -> None:
    options = WriteOptions(threads=1, durability=Durability.PAGE_CACHE)
    assert "fsync" not in operations(plan(tmp_path / "a", [torch.randn(100)]), options)


def test_what_cannot_fit_is_refused_before_a_block_is_taken(tmp_path: Path) -> None:
    """Nothing is written: a reservation would fill the disk of everybody before it fails."""
    too_big = torch.empty(1, dtype=torch.uint8).expand(2 * free_nbytes(tmp_path))
    write = plan(tmp_path / "a", [b"h", too_big])
    with fileops.hooked(never("reserve")), pytest.raises(NoSpaceError, match="needs") as caught:
        write_files([write], WriteOptions(threads=1))
    assert caught.value.needed_nbytes == 1 + too_big.numel()


def never(name: str) -> fileops.Hook:
    """A hook that lets the operation `name` fail the test instead of happening."""

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        assert operation != name, f"{operation} of {target}"
        return function(*arguments)

    return hook


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(tmp_path: Path) -> None:
    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        return False if operation == "reserve" else function(*arguments)

    tensor = torch.randn(5000)
    for options in MODES:
        with fileops.hooked(hook):
            data, _ = write_one(tmp_path / "a", [b"header", tensor], options)
        assert data == b"header" + raw(tensor)
        (tmp_path / "a").unlink()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_of_a_thread_stops_the_others_and_is_raised(
    threads: int, tmp_path: Path
) -> None:
    written = 0

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        nonlocal written
        if operation == "write":
            written += 1
            raise OSError(errno.EIO, "no luck", target)
        return function(*arguments)

    writes = [plan(tmp_path / str(i), [torch.randn(10)]) for i in range(50)]
    before = set(os.listdir("/proc/self/fd"))
    with fileops.hooked(hook), pytest.raises(OSError, match="no luck"):
        write_files(writes, WriteOptions(threads=threads))
    assert written <= threads
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors were left open"


@pytest.mark.usefixtures("_interruptible")
def test_a_keyboard_interrupt_stops_the_threads_that_write(tmp_path: Path) -> None:
    written = 0

    def wrote(nbytes: int) -> None:
        nonlocal written
        written += 1
        if written == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    writes = [plan(tmp_path / str(i), [torch.randn(10)]) for i in range(1000)]
    with pytest.raises(KeyboardInterrupt):
        write_files(writes, WriteOptions(threads=3, on_bytes=wrote))
    assert 5 <= written < 500


def test_a_short_write_and_a_signal_are_continued(tmp_path: Path) -> None:
    calls = 0

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        nonlocal calls
        if operation != "write":
            return function(*arguments)
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError(errno.EINTR, "a signal")
        descriptor, view, offset = arguments
        return function(descriptor, view[: 1 + len(view) // 3], offset)

    tensor = torch.randn(1000)
    with fileops.hooked(hook):
        data, extents = write_one(tmp_path / "a", [tensor], WriteOptions(threads=1))
    assert data == raw(tensor)
    assert_digests(data, extents)


def test_direct_mode_falls_back_where_the_file_system_refuses_it(tmp_path: Path) -> None:
    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "open" and arguments[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here", target)
        return function(*arguments)

    tensor = torch.randn(5000)
    with fileops.hooked(hook):
        data, _ = write_one(tmp_path / "a", [tensor], MODES[1])
    assert data == raw(tensor)


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_files([plan(tmp_path / "a", [torch.randn(3)])], WriteOptions())
    assert (tmp_path / "a").read_bytes() == b"precious"


def test_the_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_one(tmp_path / "a", [b"x"], WriteOptions())
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
