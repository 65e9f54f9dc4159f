"""Reading the part of a stored tensor that a rank holds, straight into its local tensor.

Whole rows are read as they lie. Where inner dims are cut, runs of columns are copied out of a small
window of the mapped file, which is many times faster than a call for each of them. A run between
two pages touches both, so runs of a few pages and less are read by themselves, one call each, as
long as a call is worth it; the shortest come out of windows again, whose pages are then read for
little. Ranks that would read the same pages so can share them (`milepost.engine.read_shared`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from milepost.engine.read import (
    READ_PIECE_NBYTES,
    OpenFiles,
    ReadOptions,
    StoredTensor,
    Task,
    fill_tasks,
    read_fully,
    report_bytes,
    run_tasks,
)
from milepost.engine.source import Scratch, memory_of
from milepost.geometry.blocks import Span
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

    def is_whole(self) -> bool:
        return self.held == whole(self.stored.torch_shape())


def fill_shards(reads: Sequence[ShardRead], options: ReadOptions) -> None:
    """Fill all targets in parallel, each needed byte read once. An error leaves some unfilled."""
    with (
        OpenFiles(sorted({read.stored.path for read in reads})) as files,
        torch.no_grad(),
    ):
        run_tasks([task for read in reads for task in _tasks(files, read)], options)


def _tasks(files: OpenFiles, read: ShardRead) -> Iterator[Task]:
    target = read.target.detach()
    assert tuple(target.shape) == local_shape(read.held), f"{read.stored.name}: unchecked shape"
    if target.numel() == 0:
        return
    if read.is_whole():
        yield from fill_tasks(files, read.stored, target)
        return
    for box, local in boxes_of(read.held):
        yield from _box_tasks(files, read.stored, box, target[tuple(slice(*s) for s in local)])


def _box_tasks(
    files: OpenFiles, stored: StoredTensor, box: tuple[Span, ...], target: torch.Tensor
) -> Iterator[Task]:
    """Tasks for one box, cut along dim 0 so that each moves a bounded number of bytes."""
    shape = stored.torch_shape()
    row_nbytes = prod(shape[1:]) * stored.torch_dtype().itemsize
    (first, last), inner = box[0], box[1:]
    columns_whole = inner == tuple((0, length) for length in shape[1:])
    if columns_whole:
        part = StoredTensor(
            name=stored.name,
            path=stored.path,
            start=stored.start + first * row_nbytes,
            dtype=stored.dtype,
            shape=(last - first, *stored.shape[1:]),
        )
        yield from fill_tasks(files, part, target)
        return
    rows = max(1, min(READ_PIECE_NBYTES, WINDOW_NBYTES) // row_nbytes)
    for row in range(first, last, rows):
        end = min(row + rows, last)
        yield _columns_task(files, stored, (row, end), inner, target[row - first : end - first])


def _columns_task(
    files: OpenFiles,
    stored: StoredTensor,
    rows: Span,
    inner: tuple[Span, ...],
    target: torch.Tensor,
) -> Task:
    """Fill `target` with the columns `inner` of some rows."""
    shape = stored.torch_shape()
    dtype = stored.torch_dtype()
    run_nbytes = _run_length(shape[1:], inner) * dtype.itemsize
    descriptor = files.descriptor(stored.path)
    row_nbytes = prod(shape[1:]) * dtype.itemsize

    def by_runs(options: ReadOptions, scratch: Scratch) -> None:
        staged = scratch.tensor()[: target.numel() * dtype.itemsize]
        straight = target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        memory = memory_of(target) if straight else memory_of(staged)
        done = 0
        for start in _run_starts(shape, rows, inner, dtype.itemsize):
            piece = memory[done : done + run_nbytes]
            read_fully(descriptor, piece, stored.start + start, stored.path)
            done += run_nbytes
        if not straight:
            target.copy_(staged.view(dtype).view(target.shape))
        report_bytes(options, done)

    def by_window(options: ReadOptions, scratch: Scratch) -> None:
        begin = stored.start + rows[0] * row_nbytes
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        nbytes = (rows[1] - rows[0]) * row_nbytes
        window = mmap.mmap(
            descriptor, begin - aligned + nbytes, access=mmap.ACCESS_COPY, offset=aligned
        )
        raw = torch.frombuffer(window, dtype=torch.uint8, offset=begin - aligned, count=nbytes)
        block = raw.view(dtype).view(rows[1] - rows[0], *shape[1:])
        target.copy_(block[(slice(None), *(slice(*span) for span in inner))])
        if options.on_bytes is not None:
            starts = _run_starts(shape, rows, inner, dtype.itemsize)
            options.on_bytes(_touched_nbytes(stored.start, starts, run_nbytes))

    is_aligned = stored.start % dtype.itemsize == 0
    by_itself = SHORTEST_RUN_NBYTES <= run_nbytes < SHORTEST_WINDOWED_NBYTES
    return by_window if is_aligned and not by_itself else by_runs


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
