"""Reading the part of a stored tensor that a rank holds, straight into its local tensor.

Whole rows are read as they lie. Where inner dims are cut, runs of columns are copied out of a small
window of the mapped file, which is many times faster than a call for each of them. A run between
two pages touches both, so runs of a few pages and less are read by themselves, one call each, as
long as a call is worth it and their rows are not in the page cache already; the shortest come out
of windows again, whose pages are then read for little. Ranks that would read the same pages so can
share them (`milepost.engine.read_shared`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from milepost.engine.open_files import OpenFiles, in_groups_of_files
from milepost.engine.proof import Proof
from milepost.engine.read import (
    READ_PIECE_NBYTES,
    ReadOptions,
    StoredTensor,
    Task,
    fill_tasks,
    read_fully,
    report_bytes,
    require_bytes,
    run_tasks,
)
from milepost.engine.source import Scratch, memory_of
from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet, boxes_of, local_shape, whole

SHORTEST_RUN_NBYTES = 1024  # below it, a window
SHORTEST_WINDOWED_NBYTES = 2 * mmap.PAGESIZE  # from it on, a window: at most half more is touched
WINDOW_NBYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRead:
    """Fill `target`, of local shape, with the index set `held` of a stored tensor."""

    stored: StoredTensor
    held: IndexSet
    target: torch.Tensor


class _Part(NamedTuple):
    """A box of a stored tensor, its place in the local one, and whether its rows are whole."""

    box: tuple[Span, ...]
    place: tuple[slice, ...]
    has_whole_rows: bool


class _Cut(NamedTuple):
    """An index set of a stored tensor, as boxes; a rank that holds it all has it in one."""

    local_shape: Shape
    is_whole: bool
    parts: tuple[_Part, ...]


@lru_cache(maxsize=4096)  # layers repeat their shapes
def _cut(shape: Shape, held: IndexSet) -> _Cut:
    rows = tuple((0, length) for length in shape[1:])
    parts = tuple(
        _Part(box, tuple(slice(*span) for span in place), box[1:] == rows)
        for box, place in boxes_of(held)
    )
    return _Cut(local_shape(held), held == whole(shape), parts)


def fill_shards(
    reads: Sequence[ShardRead], options: ReadOptions, proof: Proof | None = None
) -> None:
    """Fill all targets in parallel, each needed byte read once. An error leaves some unfilled.

    With a `proof`, extents that are read whole are compared with their digests on the way;
    `DamagedError` when one differs.
    """
    for some in in_groups_of_files(reads, lambda read: read.stored.path):
        paths = sorted({read.stored.path for read in some})
        with OpenFiles(paths) as files, torch.no_grad():
            run_tasks([task for read in some for task in _tasks(files, read, proof)], options)


def _tasks(files: OpenFiles, read: ShardRead, proof: Proof | None) -> Iterator[Task]:
    target, cut = read.target, _cut(read.stored.torch_shape(), read.held)
    assert tuple(target.shape) == cut.local_shape, f"{read.stored.name}: unchecked shape"
    if target.numel() == 0:
        return
    if cut.is_whole:
        yield from fill_tasks(files, read.stored, target, proof)
        return
    for part in cut.parts:
        local = target if len(cut.parts) == 1 else target[part.place]
        yield from _part_tasks(files, read.stored, part, local, proof)


def _part_tasks(
    files: OpenFiles,
    stored: StoredTensor,
    wanted: _Part,
    target: torch.Tensor,
    proof: Proof | None,
) -> Iterator[Task]:
    """Tasks for one box, cut along dim 0 so that each moves a bounded number of bytes."""
    shape = stored.torch_shape()
    row_nbytes = prod(shape[1:]) * stored.torch_dtype().itemsize
    (first, last), *inner = wanted.box
    if wanted.has_whole_rows:
        part = StoredTensor(
            name=stored.name,
            path=stored.path,
            start=stored.start + first * row_nbytes,
            dtype=stored.dtype,
            shape=(last - first, *stored.shape[1:]),
        )
        yield from fill_tasks(files, part, target, proof)
        return
    if proof is not None:
        proof.count(unproven=target.numel() * stored.torch_dtype().itemsize)
    rows = max(1, min(READ_PIECE_NBYTES, WINDOW_NBYTES) // row_nbytes)
    for row in range(first, last, rows):
        end = min(row + rows, last)
        part_of = target[row - first : end - first]
        yield _columns_task(files, stored, (row, end), tuple(inner), part_of)


def _columns_task(
    files: OpenFiles,
    stored: StoredTensor,
    rows: Span,
    inner: tuple[Span, ...],
    target: torch.Tensor,
) -> Task:
    """Fill `target` with the columns `inner` of some rows."""
    columns = _Columns(files.descriptor(stored.path), stored, rows, inner, target)
    return columns.by_window if columns.is_aligned else columns.by_runs


class _Columns:
    """The columns `inner` of some rows of a stored tensor, and the two ways to fill `target`."""

    def __init__(
        self,
        descriptor: int,
        stored: StoredTensor,
        rows: Span,
        inner: tuple[Span, ...],
        target: torch.Tensor,
    ) -> None:
        self._descriptor, self._stored, self._target = descriptor, stored, target
        self._rows, self._inner = rows, inner
        self._shape, self._dtype = stored.torch_shape(), stored.torch_dtype()
        self._run_nbytes = _run_length(self._shape[1:], inner) * self._dtype.itemsize
        self.is_aligned = stored.start % self._dtype.itemsize == 0

    @property
    def _nbytes(self) -> int:
        return self._target.numel() * self._dtype.itemsize

    def _starts(self) -> Iterator[int]:
        return _run_starts(self._shape, self._rows, self._inner, self._dtype.itemsize)

    def by_runs(self, options: ReadOptions, scratch: Scratch) -> None:
        """A call for each run."""
        target, dtype, stored = self._target, self._dtype, self._stored
        staged = scratch.tensor()[: self._nbytes]
        straight = target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        memory = memory_of(target) if straight else memory_of(staged)
        done = 0
        for start in self._starts():
            piece = memory[done : done + self._run_nbytes]
            read_fully(self._descriptor, piece, stored.start + start, stored.path)
            done += self._run_nbytes
        if not straight:
            target.copy_(staged.view(dtype).view(target.shape))
        report_bytes(options, done)

    def by_window(self, options: ReadOptions, scratch: Scratch) -> None:
        """One copy out of a map of the rows, unless that would read pages for little."""
        row_nbytes = prod(self._shape[1:]) * self._dtype.itemsize
        begin = self._stored.start + self._rows[0] * row_nbytes
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        nbytes = (self._rows[1] - self._rows[0]) * row_nbytes
        require_bytes(self._descriptor, self._stored.path, begin + nbytes)
        window = mmap.mmap(
            self._descriptor, begin - aligned + nbytes, access=mmap.ACCESS_COPY, offset=aligned
        )
        by_itself = SHORTEST_RUN_NBYTES <= self._run_nbytes < SHORTEST_WINDOWED_NBYTES
        is_cached = by_itself and in_page_cache(window)
        if by_itself and not is_cached:
            self.by_runs(options, scratch)
            return
        raw = torch.frombuffer(window, dtype=torch.uint8, offset=begin - aligned, count=nbytes)
        block = raw.view(self._dtype).view(self._rows[1] - self._rows[0], *self._shape[1:])
        self._target.copy_(block[(slice(None), *(slice(*span) for span in self._inner))])
        if is_cached:
            report_bytes(options, self._nbytes)
        elif options.on_bytes is not None:
            touched = _touched_nbytes(self._stored.start, self._starts(), self._run_nbytes)
            options.on_bytes(touched)


_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def in_page_cache(window: mmap.mmap) -> bool:
    """Whether all pages of a writable map are in memory, so that looking at them reads no file.

    Where the kernel does not tell (files of other users that this process cannot write), it says
    that they are.
    """
    pages = -(-len(window) // mmap.PAGESIZE)
    found = ctypes.create_string_buffer(pages)
    start = ctypes.c_char.from_buffer(window)
    try:
        failed = _libc.mincore(ctypes.addressof(start), len(window), found)
    finally:
        del start
    return not failed and not any(byte & 1 == 0 for byte in set(found.raw))


def _touched_nbytes(base: int, starts: Iterator[int], nbytes: int) -> int:
    """Bytes of all pages on which the runs of `nbytes` at `base + starts`, ascending, lie."""
    last = -1
    pages = 0
    for start in starts:
        first = max(last + 1, (base + start) // mmap.PAGESIZE)
        last = (base + start + nbytes - 1) // mmap.PAGESIZE
        pages += last + 1 - first
    return pages * mmap.PAGESIZE


def _run_length(shape: Sequence[int], inner: Sequence[Span]) -> int:
    """Elements of one contiguous run of the columns `inner`."""
    length = 1
    for dim in range(len(shape) - 1, -1, -1):
        start, end = inner[dim]
        length *= end - start
        if (start, end) != (0, shape[dim]):
            break
    return length


def _run_starts(
    shape: Sequence[int], rows: Span, inner: Sequence[Span], itemsize: int
) -> Iterator[int]:
    """First byte, relative to the tensor, of every run of the box `rows` x `inner`, in order."""
    depth = len(inner)
    while depth > 0 and inner[depth - 1] == (0, shape[depth]):
        depth -= 1
    strides = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = depth  # dim of `shape` whose start begins a run; the dims before it are walked
    bases = [range(*rows), *(range(*span) for span in inner[: last - 1])]
    offset = inner[last - 1][0] * strides[last]
    for index in product(*bases):
        yield sum(i * stride for i, stride in zip(index, strides, strict=False)) + offset
