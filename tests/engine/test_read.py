"""The reader: whole tensors, slices, reads into live tensors of any kind, maps, damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.engine import read as reader
from milepost.engine.read import (
    ReadOptions,
    StoredTensor,
    dtype_name,
    fill_tensors,
    header_shape,
    map_tensor,
    read_tensor,
)
from milepost.errors import DamagedError, FormatError, InvalidInputError, StorageError
from milepost.format.dtypes import DTYPES
from milepost.geometry.blocks import normalise_spans
from milepost.storage import atomic

TORCH_DTYPES = [
    getattr(torch, row.torch_name)
    for row in DTYPES.values()
    if row.torch_name is not None and hasattr(torch, row.torch_name)
]


def raw(tensor: Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def store(path: Path, tensor: Tensor, *, start: int = 64, name: str = "w") -> StoredTensor:
    """`tensor` in a file of its own, `start` bytes in."""
    path.write_bytes(b"\xaa" * start + raw(tensor) + b"\xbb" * 10)
    dtype = dtype_name(tensor)
    assert dtype is not None
    return StoredTensor(name=name, path=path, start=start, dtype=dtype, shape=header_shape(tensor))


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.case("V05")
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 4), (1,)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_type_reads_back_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    if dtype_name(torch.empty(1, dtype=dtype)) == "F4" and not shape:
        pytest.skip("a 0-dim tensor of packed elements cannot be stored")
    tensor = some(dtype, *shape)
    for start in (64, 61):  # old files have headers that leave the data unaligned
        stored = store(tmp_path / "part", tensor, start=start)
        for read in (read_tensor(stored), map_tensor(stored)):
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert raw(read) == raw(tensor)


@st.composite
def sliced(draw: st.DrawFn) -> tuple[Tensor, list[slice]]:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    bound = st.none() | st.integers(-9, 9)
    dims = draw(st.integers(0, len(shape)))
    return tensor, [slice(draw(bound), draw(bound)) for _ in range(dims)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=sliced(), gap=st.sampled_from([0, 8, 40, 10**6]), piece=st.sampled_from([1, 64, 10**6]))
def test_a_slice_is_what_indexing_gives(
    case: tuple[Tensor, list[slice]], gap: int, piece: int, tmp_path: Path
) -> None:
    """For any merging of neighbouring rows, down to none."""
    tensor, index = case
    stored = store(tmp_path / "part", tensor)
    spans = normalise_spans(tuple(tensor.shape), index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MERGE_GAP_NBYTES", gap)
        patch.setattr(reader, "READ_PIECE_NBYTES", piece)
        got = read_tensor(stored, spans)
    expected = tensor[tuple(index)] if index else tensor
    assert got.shape == expected.shape
    assert torch.equal(got, expected)


def test_a_slice_of_rows_reads_no_other_rows(tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.randn(1000, 1000))
    before = read_by_this_process()
    read_tensor(stored, ((10, 12), (0, 1000)))
    assert read_by_this_process() - before < 20_000


def read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": torch.empty_like,
    "transposed": lambda t: torch.empty(tuple(reversed(t.shape)), dtype=t.dtype).permute(
        *reversed(range(t.dim()))
    ),
    "strided": lambda t: torch.empty((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)[..., ::2],
    "wider": lambda t: torch.empty(t.shape, dtype=torch.float64),
    "narrower": lambda t: torch.empty(t.shape, dtype=torch.bfloat16),
    "narrower and transposed": lambda t: torch.empty(
        tuple(reversed(t.shape)), dtype=torch.float16
    ).permute(*reversed(range(t.dim()))),
    "a parameter": lambda t: torch.nn.Parameter(torch.empty_like(t)),
}


@pytest.mark.case("V02")
@pytest.mark.parametrize("shape", [(6, 5), (1, 999), (7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_a_live_tensor_is_filled_in_place_whatever_its_strides_and_type(
    name: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_PIECE_NBYTES", 24)
    tensor = torch.randn(shape)
    target = TARGETS[name](tensor)
    before = target.data_ptr(), target.stride()
    seen: list[int] = []
    stored = store(tmp_path / "part", tensor)
    fill_tensors([(stored, target)], ReadOptions(threads=3, on_bytes=seen.append))
    assert torch.equal(target.detach(), tensor.to(target.dtype))
    assert (target.data_ptr(), target.stride()) == before
    assert sum(seen) == stored.nbytes
    assert max(seen) <= 24


def test_a_conjugate_view_is_filled_with_values_not_with_its_bytes(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    target = torch.zeros(4, dtype=torch.complex64).conj()
    fill_tensors([(store(tmp_path / "part", tensor), target)], ReadOptions())
    assert torch.equal(target, tensor)


def test_a_scalar_and_an_empty_tensor_are_filled_too(tmp_path: Path) -> None:
    scalar, empty = torch.tensor(1.25), torch.empty(0, 3)
    pairs = [
        (store(tmp_path / "a", scalar), torch.zeros((), dtype=torch.float64)),
        (store(tmp_path / "b", scalar), torch.zeros(())),
        (store(tmp_path / "c", empty), torch.empty(0, 3, dtype=torch.float64)),
        (store(tmp_path / "d", empty), torch.empty(3, 0).t()),
    ]
    fill_tensors(pairs, ReadOptions())
    assert pairs[0][1].item() == pairs[1][1].item() == 1.25


def test_many_tensors_are_filled_by_several_threads(tmp_path: Path) -> None:
    tensors = [torch.randn(50, 20) for _ in range(60)]
    pairs = [
        (
            store(tmp_path / f"{i}", tensor),
            torch.empty(20, 50).t() if i % 2 else torch.empty(50, 20),
        )
        for i, tensor in enumerate(tensors)
    ]
    fill_tensors(pairs, ReadOptions(threads=4))
    for tensor, (_, target) in zip(tensors, pairs, strict=True):
        assert torch.equal(tensor, target)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("error", [DamagedError, KeyboardInterrupt])
def test_an_error_of_a_thread_stops_the_others(error: type[BaseException], tmp_path: Path) -> None:
    count = 0

    def read(nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == 5 and error is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
        elif count == 5:
            raise DamagedError("no luck")
        time.sleep(0.01)

    stored = store(tmp_path / "part", torch.randn(10))
    with pytest.raises(error):
        fill_tensors([(stored, torch.empty(10))] * 1000, ReadOptions(threads=3, on_bytes=read))
    assert 5 <= count < 500


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_ends_early_is_damaged_and_says_where(threads: int, tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.randn(100))
    os.truncate(stored.path, 64 + 390)
    message = r"part: ends at byte 454, 10 bytes before the tensor that its header promises"
    for target in (torch.empty(100), torch.empty(100, dtype=torch.float64)):
        with pytest.raises(DamagedError, match=message):
            fill_tensors([(stored, target)] * 4, ReadOptions(threads=threads))
    with pytest.raises(DamagedError, match=message):
        read_tensor(stored, ((0, 100),))
    with pytest.raises(DamagedError, match=message):
        map_tensor(stored)
    os.truncate(stored.path, 0)
    with pytest.raises(DamagedError, match=r"ends at byte 0"):
        map_tensor(stored)


def test_a_file_that_is_gone_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.randn(3))
    stored.path.unlink()
    before = set(os.listdir("/proc/self/fd"))
    for read in (read_tensor, map_tensor):
        with pytest.raises(StorageError, match=r"part: No such file") as caught:
            read(stored)
        assert caught.value.errno == 2
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors were left open"


def test_a_type_that_torch_lacks_is_refused_by_name(tmp_path: Path) -> None:
    stored = StoredTensor(name="w", path=tmp_path / "x", start=0, dtype="F6_E2M3", shape=(4,))
    with pytest.raises(FormatError, match=r"tensor 'w' has dtype F6_E2M3"):
        read_tensor(stored)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no F4")
def test_packed_elements_whose_last_dim_is_odd_are_refused_by_name(tmp_path: Path) -> None:
    stored = StoredTensor(name="w", path=tmp_path / "x", start=0, dtype="F4", shape=(2, 3))
    with pytest.raises(FormatError, match=r"tensor 'w' of F4 has shape \(2, 3\)"):
        read_tensor(stored)
    with pytest.raises(InvalidInputError, match=r"0-dim"):
        header_shape(torch.empty((), dtype=torch.float4_e2m1fn_x2))


def test_writing_into_a_map_changes_this_process_only(tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.zeros(5))
    mapped = map_tensor(stored)
    mapped[2] = 7.0
    assert mapped.tolist() == [0, 0, 7, 0, 0]
    assert read_tensor(stored).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.case("V03")
def test_saving_over_a_mapped_file_leaves_map_and_file_whole(tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.tensor([5.0, 6.0, 7.0]))
    inode = stored.path.stat().st_ino
    mapped = map_tensor(stored)
    atomic.replace_file(stored.path, b"\xaa" * 64 + raw(mapped + 1))
    assert mapped.tolist() == [5, 6, 7]
    assert read_tensor(stored).tolist() == [6, 7, 8]
    assert stored.path.stat().st_ino != inode


KILLED = """
import os, signal, sys
from pathlib import Path
from milepost.storage import atomic, fileops

def hook(operation, target, function, arguments):
    if operation == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)

with fileops.hooked(hook):
    atomic.replace_file(Path(sys.argv[1]), b"something else")
"""


@pytest.mark.case("V03")
@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_process_killed_while_saving_over_a_file_leaves_the_old_one(
    operation: str, tmp_path: Path
) -> None:
    stored = store(tmp_path / "part", torch.tensor([5.0, 6.0, 7.0]))
    mapped = map_tensor(stored)
    done = subprocess.run([sys.executable, "-c", KILLED, str(stored.path), operation], check=False)
    assert done.returncode == -9
    assert mapped.tolist() == read_tensor(stored).tolist() == [5, 6, 7]


def test_a_map_is_freed_with_its_last_tensor(tmp_path: Path) -> None:
    stored = store(tmp_path / "part", torch.zeros(5))
    mapped = map_tensor(stored)
    view = mapped[1:3]
    del mapped
    assert view.tolist() == [0, 0]
    assert str(stored.path) in Path("/proc/self/maps").read_text()
    del view
    assert str(stored.path) not in Path("/proc/self/maps").read_text()


GROWTH = """
import sys, torch
from pathlib import Path
from milepost.engine.read import *

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

path = Path(sys.argv[1])
with path.open("wb") as file:
    file.truncate(256 * 2**20)
shape = tuple(map(int, sys.argv[2].split(",")))
stored = StoredTensor(name="w", path=path, start=0, dtype="F32", shape=shape)
target = torch.ones(tuple(reversed(shape)), dtype=torch.bfloat16).t()
small = StoredTensor(name="s", path=path, start=0, dtype="F32", shape=(2, 3))
fill_tensors([(small, torch.empty(3, 2).t())] * 8, ReadOptions(threads=4))
before = peak()
fill_tensors([(stored, target)], ReadOptions(threads=4))
print(peak() - before)
"""


@pytest.mark.parametrize("shape", ["8192,8192", "1,67108864"])
def test_filling_another_type_and_layout_takes_bounded_memory(shape: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "part"), shape],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) * 1024 <= 64 * 2**20


@pytest.mark.slow
@pytest.mark.case("V06")
def test_a_tensor_beyond_two_gibibytes_is_read_to_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with path.open("wb") as file:
        file.write(bytes([1, 2, 3, 4]))
        file.seek(2**31 + 1)
        file.write(bytes([5, 6, 7, 8]))
    stored = StoredTensor(name="w", path=path, start=0, dtype="U8", shape=(2**31 + 5,))
    for read in (read_tensor, map_tensor):
        tensor = read(stored)
        assert tensor[:4].tolist() == [1, 2, 3, 4]
        assert tensor[-4:].tolist() == [5, 6, 7, 8]
    (end,) = (read_tensor(stored, ((2**31 + 1, 2**31 + 5),)),)
    assert end.tolist() == [5, 6, 7, 8]
