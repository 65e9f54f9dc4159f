"""Reading bytes of files straight into tensors: parallel `pread`, slices, read-only maps."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path

import torch
import xxhash

from milepost._env import env_int
from milepost.engine.open_files import OpenFiles, in_groups_of_files
from milepost.engine.proof import Proof, Segment
from milepost.engine.source import Scratch, memory_of
from milepost.errors import DamagedError, FormatError, InvalidInputError, StorageError
from milepost.format.dtypes import DTYPES, by_torch_name
from milepost.geometry.blocks import Span, blocks_of_range, byte_runs

READ_PIECE_NBYTES = 8 * 1024 * 1024
MERGE_GAP_NBYTES = 16 * 1024
HASH_PIECE_NBYTES = 2 * 1024 * 1024  # in the cache that cores share; shorter ones cost locking


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: file, absolute first byte, safetensors dtype and shape of its header."""

    name: str
    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].nbits // 8

    def torch_dtype(self) -> torch.dtype:
        """`FormatError` where this torch has no such type."""
        name = DTYPES[self.dtype].torch_name
        dtype = None if name is None else getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise FormatError(
                f"{self.path}: tensor {self.name!r} has dtype {self.dtype}, which torch "
                f"{torch.__version__} cannot hold; read its bytes with another tool, or upgrade "
                "torch"
            )
        return dtype

    def torch_shape(self) -> tuple[int, ...]:
        """The shape as torch counts it (two F4 are one element)."""
        pack = DTYPES[self.dtype].elements_per_torch
        if pack == 1:
            return self.shape
        if not self.shape or self.shape[-1] % pack:
            raise FormatError(
                f"{self.path}: tensor {self.name!r} of {self.dtype} has shape {self.shape}; torch "
                f"packs {pack} elements in a byte along the last dim, which it must divide"
            )
        return (*self.shape[:-1], self.shape[-1] // pack)


def dtype_name(tensor: torch.Tensor) -> str | None:
    """The safetensors name of a tensor's dtype; None when the container cannot hold it."""
    row = by_torch_name(str(tensor.dtype).removeprefix("torch."))
    return None if row is None else row.name


def header_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that a safetensors header states for a tensor (see `StoredTensor.torch_shape`)."""
    row = by_torch_name(str(tensor.dtype).removeprefix("torch."))
    if row is None or row.elements_per_torch == 1:
        return tuple(tensor.shape)
    if tensor.dim() == 0:
        raise InvalidInputError(f"a 0-dim tensor of {tensor.dtype} cannot be stored unpacked")
    return (*tensor.shape[:-1], tensor.shape[-1] * row.elements_per_torch)


class ReadMode(Enum):
    """Who reads bytes that several ranks need."""

    DIRECT = "direct"
    """Every rank reads what it needs, and nothing passes between ranks."""
    SHARED = "shared"
    """One rank reads them and sends them to the others: for file systems that many nodes read at
    once. Small tensors are still read by each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """`threads` per process; `on_bytes(n)` is called, from any thread, as this process has read
    `n` bytes of files, with all of each page that it touched through a map. `mode` is of use to
    loads by several ranks."""

    threads: int = field(default_factory=lambda: env_int("MILEPOST_IO_THREADS"))
    on_bytes: Callable[[int], None] | None = None
    mode: ReadMode = ReadMode.DIRECT


def read_tensor(stored: StoredTensor, spans: Sequence[Span] | None = None) -> torch.Tensor:
    """The tensor, or the box `spans` of it (in torch's elements), as a new CPU tensor."""
    shape = stored.torch_shape()
    if spans is None:
        out = torch.empty(shape, dtype=stored.torch_dtype())
        fill_tensors([(stored, out)], ReadOptions())
        return out
    out = torch.empty([end - start for start, end in spans], dtype=stored.torch_dtype())
    with OpenFiles([stored.path]) as files:
        _read_box(files.descriptor(stored.path), stored, spans, memory_of(out))
    return out


def fill_tensors(pairs: Sequence[tuple[StoredTensor, torch.Tensor]], options: ReadOptions) -> None:
    """Fill each target with its stored tensor, in parallel, each stored byte read once.

    A contiguous CPU target of the stored dtype is read into as it lies; another target is filled
    with `copy_` from a bounded piece, which casts when dtypes differ. Shapes must agree. An error
    leaves targets half filled.
    """
    for some in in_groups_of_files(pairs, lambda pair: pair[0].path):
        with OpenFiles(sorted({stored.path for stored, _ in some})) as files, torch.no_grad():
            tasks = [task for stored, target in some for task in fill_tasks(files, stored, target)]
            run_tasks(tasks, options)


Task = Callable[[ReadOptions, Scratch], None]


def fill_tasks(
    files: OpenFiles, stored: StoredTensor, target: torch.Tensor, proof: Proof | None = None
) -> Iterator[Task]:
    """Tasks that fill `target` whole; with a `proof`, extents are compared with their digests."""
    assert tuple(target.shape) == stored.torch_shape(), f"{stored.name}: shapes were not checked"
    descriptor = files.descriptor(stored.path)
    data = target.detach()
    if proof is not None:
        end = stored.start + stored.nbytes
        for segment in proof.segments(stored.path, stored.start, end):
            yield _proven_task(descriptor, stored, data, segment, proof)
        return
    if _can_take_bytes(data, stored.torch_dtype()):
        view = memory_of(data)
        for begin in range(0, view.nbytes, READ_PIECE_NBYTES):
            piece = view[begin : begin + READ_PIECE_NBYTES]
            yield _direct_task(descriptor, stored, piece, begin)
        return
    itemsize = stored.nbytes // max(1, data.numel())
    start = 0
    limit = max(1, READ_PIECE_NBYTES // max(1, itemsize))
    for box in blocks_of_range(tuple(data.shape), 0, data.numel(), limit):
        block = data[tuple(slice(*span) for span in box)]
        yield _staged_task(descriptor, stored, block, start)
        start += block.numel() * itemsize


def _can_take_bytes(data: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of `data` is what the file holds, so bytes can go straight into it."""
    is_plain = data.device.type == "cpu" and not data.is_conj() and not data.is_neg()
    return is_plain and data.dtype == dtype and data.is_contiguous()


def _direct_task(descriptor: int, stored: StoredTensor, piece: memoryview, begin: int) -> Task:
    def run(options: ReadOptions, scratch: Scratch) -> None:
        read_fully(descriptor, piece, stored.start + begin, stored.path)
        report_bytes(options, piece.nbytes)

    return run


def _proven_task(
    descriptor: int, stored: StoredTensor, data: torch.Tensor, segment: Segment, proof: Proof
) -> Task:
    """Fill the elements of a segment piece by piece, each hashed while it is hot in cache."""
    itemsize = stored.nbytes // max(1, data.numel())
    first, last = ((end - stored.start) // itemsize for end in (segment.start, segment.end))
    straight = _can_take_bytes(data, stored.torch_dtype())

    def run(options: ReadOptions, scratch: Scratch) -> None:
        hasher = xxhash.xxh3_128()
        pieces = (
            _memory_pieces(data, first * itemsize, last * itemsize)
            if straight
            else _staged_pieces(data, stored.torch_dtype(), (first, last), scratch)
        )
        at = segment.start
        for memory, land in pieces:
            read_fully(descriptor, memory, at, stored.path)
            if segment.digest is not None:
                hasher.update(memory)
            land()
            at += memory.nbytes
        report_bytes(options, at - segment.start)
        if segment.digest is None:
            proof.count(unproven=at - segment.start)
        else:
            proof.compare(segment, hasher.digest(), name=stored.name, path=stored.path)

    return run


_Pieces = Iterator[tuple[memoryview, Callable[[], object]]]


def _memory_pieces(data: torch.Tensor, start: int, end: int) -> _Pieces:
    """The target's own memory; nothing is left to do with what was read into it."""
    view = memory_of(data)
    for begin in range(start, end, HASH_PIECE_NBYTES):
        yield view[begin : min(begin + HASH_PIECE_NBYTES, end)], _nothing


def _staged_pieces(
    data: torch.Tensor, dtype: torch.dtype, elements: tuple[int, int], scratch: Scratch
) -> _Pieces:
    """Scratch memory, and what moves it into the target."""
    limit = max(1, HASH_PIECE_NBYTES // dtype.itemsize)
    for box in blocks_of_range(tuple(data.shape), *elements, limit):
        block = data[tuple(slice(*span) for span in box)]
        stage = scratch.tensor()[: block.numel() * dtype.itemsize]

        def land(block: torch.Tensor = block, stage: torch.Tensor = stage) -> object:
            return block.copy_(stage.view(dtype).view(block.shape))

        yield memory_of(stage), land


def _nothing() -> None:
    return None


def _staged_task(descriptor: int, stored: StoredTensor, block: torch.Tensor, begin: int) -> Task:
    """Fill `block` of the target from the bytes of its elements, which lie one after the other."""

    def run(options: ReadOptions, scratch: Scratch) -> None:
        dtype = stored.torch_dtype()
        stage = scratch.tensor()[: block.numel() * dtype.itemsize]
        read_fully(descriptor, memory_of(stage), stored.start + begin, stored.path)
        block.copy_(stage.view(dtype).view(block.shape))
        report_bytes(options, stage.numel())

    return run


def report_bytes(options: ReadOptions, nbytes: int) -> None:
    if options.on_bytes is not None:
        options.on_bytes(nbytes)


def run_tasks(tasks: Sequence[Task], options: ReadOptions) -> None:
    """Run all tasks on a few threads; the first error stops the rest and is raised."""
    if options.threads <= 1 or len(tasks) <= 1:
        scratch = Scratch(READ_PIECE_NBYTES)
        for task in tasks:
            task(options, scratch)
        return
    remaining = iter(tasks)
    guard, failed = threading.Lock(), threading.Event()

    def work() -> None:
        scratch = Scratch(READ_PIECE_NBYTES)
        with torch.no_grad():
            while not failed.is_set():
                with guard:
                    task = next(remaining, None)
                if task is None:
                    return
                try:
                    task(options, scratch)
                except BaseException:
                    failed.set()
                    raise

    with ThreadPoolExecutor(options.threads, thread_name_prefix="milepost-read") as pool:
        try:
            for future in [pool.submit(work) for _ in range(min(options.threads, len(tasks)))]:
                future.result()
        finally:  # a KeyboardInterrupt too ends the others
            failed.set()


def _read_box(
    descriptor: int, stored: StoredTensor, spans: Sequence[Span], out: memoryview
) -> None:
    """Read the runs of a box; runs with small gaps between them are fetched in one call."""
    itemsize = stored.nbytes // max(1, prod(stored.torch_shape()))
    group: list[tuple[int, int]] = []
    written = 0

    def flush() -> None:
        nonlocal written
        if not group:
            return
        first, last = group[0][0], group[-1][0] + group[-1][1]
        if len(group) == 1:
            target = out[written : written + group[0][1]]
            read_fully(descriptor, target, stored.start + first, stored.path)
            written += group[0][1]
        else:
            whole = memoryview(bytearray(last - first))
            read_fully(descriptor, whole, stored.start + first, stored.path)
            for start, nbytes in group:
                out[written : written + nbytes] = whole[start - first : start - first + nbytes]
                written += nbytes
        group.clear()

    for start, nbytes in byte_runs(stored.torch_shape(), spans, itemsize):
        if group:
            end = group[-1][0] + group[-1][1]
            if start - end > MERGE_GAP_NBYTES or start + nbytes - group[0][0] > READ_PIECE_NBYTES:
                flush()
        group.append((start, nbytes))
    flush()


def read_fully(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    while target.nbytes:
        try:
            count = os.preadv(descriptor, [target], offset)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror} at byte {offset}", path=path, number=error.errno
            ) from error
        if count == 0:
            raise _ends_early(path, offset, target.nbytes)
        target = target[count:]
        offset += count


def _ends_early(path: Path, at: int, lacking: int) -> DamagedError:
    return DamagedError(
        f"{path}: ends at byte {at}, {lacking} bytes before the tensor that its header promises",
        path=path,
    )


def require_bytes(descriptor: int, path: Path, end: int) -> None:
    """`DamagedError` for a file that ends before byte `end`: ask before it is mapped.

    A file that another program cuts short while it is mapped ends the process (SIGBUS).
    """
    nbytes = os.fstat(descriptor).st_size
    if nbytes < end:
        raise _ends_early(path, nbytes, end - nbytes)


def map_tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor as a private map of its file: pages are read when touched.

    Writing to the tensor changes this process's copy only. Saving over the file later is safe:
    Milepost replaces files, it never changes one in place, so the map keeps what it maps.
    """
    dtype, shape = stored.torch_dtype(), stored.torch_shape()
    if stored.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with OpenFiles([stored.path]) as files:
        descriptor = files.descriptor(stored.path)
        require_bytes(descriptor, stored.path, stored.start + stored.nbytes)
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=stored.start, count=stored.nbytes)
    if raw.data_ptr() % dtype.itemsize:
        return read_tensor(stored)  # an old file with an unaligned header cannot be viewed
    return raw.view(dtype).view(shape)
