"""Reading each byte once among ranks: one reads it and sends it to the others that want it.

Replicas and peers with columns of the same rows form groups (`milepost.plan.read_groups`). It runs
on a gloo group of Milepost's own, in one order on all ranks and in bounded steps; the next block is
read while this one travels. A rank that cannot read goes on answering, so that nobody hangs, and
raises at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from milepost.engine.open_files import MAX_OPEN_FILES, OpenFiles
from milepost.engine.read import (
    ReadOptions,
    StoredTensor,
    read_fully,
    report_bytes,
)
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.engine.rendezvous import Conversation
from milepost.engine.source import memory_of
from milepost.geometry.blocks import Span
from milepost.geometry.placement import IndexSet, between, boxes_of, local_shape, whole
from milepost.plan.read_groups import ReadGroup, Want, read_groups
from milepost.state.tensors import flat_bytes


def fill_shards_shared(
    reads: Sequence[ShardRead], options: ReadOptions, *, talk: Conversation, group: Any
) -> None:
    """Fill all targets as `fill_shards` does, each byte read by one rank; collective.

    `group` is a gloo group of all ranks. What is small, or wanted by one rank only, is read by
    whoever wants it. An error leaves targets half filled, on other ranks too.
    """
    keyed = _keyed(reads)
    groups = _agree(talk, [_want(key, read) for key, read in keyed.items()])
    shared = {each.key for each in groups}
    fill_shards([read for key, read in keyed.items() if key not in shared], options)
    jobs = [_Job(each, keyed[each.key]) for each in groups]
    with torch.no_grad():
        _Sharing(jobs, options, group=group, rank=talk.rank).run()


def _keyed(reads: Sequence[ShardRead]) -> dict[str, ShardRead]:
    """Reads by what they read, the same text on all ranks; a second one of the same is numbered."""
    keyed: dict[str, ShardRead] = {}
    for read in reads:
        path = read.stored.path
        stem = key = f"{path.parent.name}/{path.name}@{read.stored.start}"
        count = 1
        while key in keyed:
            count += 1
            key = f"{stem}~{count}"
        keyed[key] = read
    return keyed


def _want(key: str, read: ShardRead) -> Want:
    return Want(key, read.stored.torch_shape(), read.stored.torch_dtype().itemsize, read.held)


def _agree(talk: Conversation, own: Sequence[Want]) -> list[ReadGroup]:
    """The groups that this rank is in, in the order of all groups."""
    raw = talk.gather("wants", msgspec.msgpack.encode(own))
    if talk.is_coordinator:
        wants = [msgspec.msgpack.decode(part, type=list[Want]) for part in raw]
        shared: list[list[ReadGroup]] = [[] for _ in wants]
        for each in read_groups(wants):
            for rank in each.ranks:
                shared[rank].append(each)
        for rank, groups in enumerate(shared):
            talk.post(f"read-groups/{rank}", msgspec.msgpack.encode(groups))
    told = talk.fetch(f"read-groups/{talk.rank}", 0)
    return msgspec.msgpack.decode(told, type=list[ReadGroup])


class _Job(NamedTuple):
    """A group and what this rank wants of it."""

    group: ReadGroup
    read: ShardRead


class _Sharing:
    """All jobs of one rank, in order."""

    def __init__(
        self, jobs: Sequence[_Job], options: ReadOptions, *, group: Any, rank: int
    ) -> None:
        self._jobs, self._options = jobs, options
        self._group, self._rank = group, rank
        self._failure: BaseException | None = None

    def run(self) -> None:
        with (
            _Files() as files,
            ThreadPoolExecutor(1, thread_name_prefix="milepost-read-ahead") as thread,
        ):
            ahead: Future[Tensor] | None = None
            steps = list(self._steps())
            for number, (job, spans) in enumerate(steps):
                block = ahead or thread.submit(self._read, files, job, spans)
                ahead = None
                if number + 1 < len(steps):
                    ahead = thread.submit(self._read, files, *steps[number + 1])
                self._step(job, spans, block.result())
        if self._failure is not None:
            raise self._failure

    def _steps(self) -> Iterator[tuple[_Job, tuple[Span, ...]]]:
        for job in self._jobs:
            for spans in job.group.steps():
                yield job, spans

    def _read(self, files: _Files, job: _Job, spans: tuple[Span, ...]) -> Tensor:
        """This rank's block of a step, whole rows; anything once something went wrong."""
        first, last = spans[job.group.ranks.index(self._rank)]
        row_nbytes = job.group.row_nbytes
        block = torch.empty((last - first) * row_nbytes, dtype=torch.uint8)
        try:
            if self._failure is None and last > first:
                files.read(job.read.stored, between(job.group.rows, first, last), block)
                report_bytes(self._options, block.numel())
        except Exception as error:  # noqa: BLE001 - the rank boundary: answered, then raised
            self._failure = error
        return block

    def _step(self, job: _Job, spans: tuple[Span, ...], raw: Tensor) -> None:
        """Send what the others want of this rank's block, and take what it wants of theirs."""
        dtype = job.read.stored.torch_dtype()
        own = job.group.ranks.index(self._rank)
        block = raw.view(dtype).view(-1, *job.group.shape[1:])
        works: list[tuple[Any, Tensor]] = []
        packed: dict[IndexSet, Tensor] = {}
        received: list[tuple[Span, Tensor]] = []
        for position, rank in enumerate(job.group.ranks):
            first, last = spans[position]
            if position == own or first == last:
                continue
            part = self._landing(job, first, last)
            received.append(((first, last), part))
            into = flat_bytes(part)
            works.append((dist.irecv(into, group=self._group, group_src=rank), into))
        for position, rank in enumerate(job.group.ranks):
            if position == own or not len(block):
                continue
            columns = job.group.columns[position]
            if columns not in packed:
                packed[columns] = _columns(block, columns)
            message = flat_bytes(packed[columns])
            works.append((dist.isend(message, group=self._group, group_dst=rank), message))
        if len(block):
            first, last = spans[own]
            job.read.target[first:last].copy_(_columns(block, job.group.columns[own]))
        for work, _ in works:
            work.wait()
        for (first, last), part in received:
            target = job.read.target[first:last]
            if part.data_ptr() != target.data_ptr():
                target.copy_(part)

    def _landing(self, job: _Job, first: int, last: int) -> Tensor:
        """Where rows from another rank arrive: in the target itself where it takes bytes."""
        target = job.read.target[first:last]
        dtype = job.read.stored.torch_dtype()
        if target.device.type == "cpu" and target.dtype is dtype and target.is_contiguous():
            return target
        return torch.empty(target.shape, dtype=dtype)


def _columns(block: Tensor, columns: IndexSet) -> Tensor:
    """The columns of whole rows, contiguous; the rows themselves where that is all of them."""
    if columns == whole(tuple(block.shape[1:])):
        return block
    out = torch.empty((len(block), *local_shape(columns)), dtype=block.dtype)
    for box, place in boxes_of(columns):
        source = block[(slice(None), *(slice(*span) for span in box))]
        out[(slice(None), *(slice(*span) for span in place))].copy_(source)
    return out


class _Files:
    """Files that are opened when they are first read, so that a bad one is an error of a read."""

    def __init__(self) -> None:
        self._open: dict[Path, OpenFiles] = {}

    def read(self, stored: StoredTensor, rows: Sequence[Span], block: Tensor) -> None:
        """Fill `block` with the whole rows `rows` of a stored tensor, one span after the other."""
        if stored.path not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).__exit__()
            self._open[stored.path] = OpenFiles([stored.path])
        descriptor = self._open[stored.path].descriptor(stored.path)
        memory = memory_of(block)
        row_nbytes = block.numel() // sum(end - start for start, end in rows)
        done = 0
        for start, end in rows:
            piece = memory[done : done + (end - start) * row_nbytes]
            read_fully(descriptor, piece, stored.start + start * row_nbytes, stored.path)
            done += piece.nbytes

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for files in self._open.values():
            files.__exit__()
