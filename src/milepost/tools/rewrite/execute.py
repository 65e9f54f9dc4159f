"""Carrying out a rewrite: groups in parallel, bytes at their final offset, digests on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash

from milepost.engine.output import BufferedOutput
from milepost.engine.read import dtype_name
from milepost.engine.source import Scratch, TensorSource, memory_of
from milepost.format.digests import Extent, cut_extents
from milepost.plan.parts import PartPlan
from milepost.storage import fileops
from milepost.tools.rewrite.groups import Computed, Copied, Group, Streamed, TensorSpec
from milepost.tools.rewrite.heap import Heap
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.plan import OutputPlan
from milepost.tools.rewrite.streams import Stream

COPY_PIECE_NBYTES = 1024 * 1024
SCRATCH_NBYTES = 4 * 1024 * 1024
RUN_NBYTES = 64 * 1024 * 1024

_heap = Heap()

Work: TypeAlias = Callable[[Scratch], None]


class Progress:
    """Bytes written so far, told to whoever wants to know."""

    def __init__(self, options: RewriteOptions, total: int) -> None:
        self._tell = options.on_progress
        self._done, self._total = 0, total
        self._guard = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._tell is None:
            return
        with self._guard:
            self._done += nbytes
            self._tell(self._done, self._total)


class PartFile:
    """A part while it is written: reserved whole, synced when the last task is done with it."""

    direct = -1

    def __init__(self, path: Path, part: PartPlan, options: RewriteOptions, told: Progress) -> None:
        self.part = part
        self.is_durable = options.is_durable
        self.extents: list[Extent] = []
        self._told = told
        self._guard = threading.Lock()
        self._left = 0
        self.buffered = fileops.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if not fileops.reserve_file(self.buffered, part.nbytes):
            fileops.truncate_file(self.buffered, part.nbytes)

    def wrote(self, nbytes: int) -> None:
        self._told.add(nbytes)

    def expect(self) -> None:
        """One more task will write into it."""
        self._left += 1

    def add(self, extent: Extent) -> None:
        with self._guard:
            self.extents.append(extent)

    def done(self) -> None:
        """One task has written all that it writes into it."""
        with self._guard:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self.is_durable:
            fileops.sync_data(self.buffered)
        if is_last:
            self.close()

    def close(self) -> None:
        if self.buffered >= 0:
            fileops.close_file(self.buffered)
            self.buffered = -1


class RunWriter:
    """Bytes `[start, ...)` of a part in order; extents are closed where `borders` cut them."""

    def __init__(self, file: PartFile, start: int, borders: Sequence[int]) -> None:
        self._file = file
        self._out = BufferedOutput(file)
        self._out.begin(start, borders[-1])
        self._extents = cut_extents([start, *borders])
        self._extents.reverse()
        self._position = start
        self._hasher = xxhash.xxh3_128()

    def put(self, view: memoryview) -> None:
        while view.nbytes:
            start, end = self._extents[-1]
            piece = view[: end - self._position]
            self._out.put(piece, self._hasher)
            self._position += piece.nbytes
            view = view[piece.nbytes :]
            if self._position == end:
                digest = self._hasher.digest()
                self._file.add(Extent(digest=digest, start=start, nbytes=end - start))
                self._hasher.reset()
                self._extents.pop()

    def finish(self) -> None:
        assert not self._extents, "an output was not written to its end"
        self._out.finish()


class Budget:
    """Memory that tasks take and give back; what is larger than all of it runs alone."""

    def __init__(self, nbytes: int, failed: threading.Event) -> None:
        self._free = self._total = nbytes
        self._failed = failed
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """Wait for `nbytes`; what was taken."""
        wanted = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted or self._failed.is_set())
            self._free -= wanted
        return wanted

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


def execute(
    groups: Sequence[Group], plan: OutputPlan, directory: Path, options: RewriteOptions
) -> dict[str, list[Extent]]:
    """Write all parts into `directory`; the extents of each, with digests, by name.

    The first error of any group is raised; what was written is for the caller to remove.
    """
    told = Progress(options, sum(part.nbytes for part in plan.parts))
    files: list[PartFile] = []
    try:
        for part in plan.parts:
            files.append(PartFile(directory / part.name, part, options, told))
        _run(_tasks(groups, plan, files), plan.memory_nbytes, options)
        return {file.part.name: file.extents for file in files}
    finally:
        for file in files:
            file.close()


class _Task:
    """Work that takes `memory_nbytes`, and the files that it writes into."""

    def __init__(self, work: Work, files: Sequence[PartFile], memory_nbytes: int = 0) -> None:
        self.work, self.files, self.memory_nbytes = work, files, memory_nbytes
        for file in files:
            file.expect()


def _tasks(groups: Sequence[Group], plan: OutputPlan, files: Sequence[PartFile]) -> list[_Task]:
    copied = {g.output.name: g for g in groups if isinstance(g, Copied) and g.output.nbytes}
    tasks: dict[str, list[_Task]] = {}
    headers = []
    for file in files:
        headers.append(_Task(partial(_write_header, file), [file]))
        for first, run in _runs(file, copied):
            tasks.setdefault(first, []).append(run)
    ordered = list(headers)
    for group in sorted(groups, key=partial(_order_of, plan)):
        for spec in group.outputs:
            ordered += tasks.get(spec.name, [])
        if isinstance(group, Computed):
            targets = {files[plan.places[spec.name][0]] for spec in group.outputs}
            work = partial(_compute, group, plan, files)
            ordered.append(_Task(work, list(targets), group.memory_nbytes))
        elif isinstance(group, Streamed) and group.output.nbytes:
            number, start = plan.places[group.output.name]
            work = partial(_stream, group, files[number], start)
            ordered.append(_Task(work, [files[number]], group.memory_nbytes))
    return ordered


def _order_of(plan: OutputPlan, group: Group) -> tuple[int, int]:
    """Part by part, and of each what is streamed, the longest first, so that threads end together.

    It takes as much memory whatever its length. Of what is held whole the largest would come at
    once, so that stays in its order.
    """
    part = min((plan.places[spec.name][0] for spec in group.outputs), default=0)
    return part, -group.output.nbytes if isinstance(group, Streamed) else 0


def _write_header(file: PartFile, scratch: Scratch) -> None:
    writer = RunWriter(file, 0, [len(file.part.header)])
    writer.put(memoryview(file.part.header))
    writer.finish()


def _runs(file: PartFile, copied: dict[str, Copied]) -> Iterator[tuple[str, _Task]]:
    """Tasks that copy neighbours in one go, and cut tensors that are longer; by first tensor."""
    run: list[tuple[Copied, int, int]] = []
    length = 0

    def made() -> tuple[str, _Task]:
        group, first, _ = run[0]
        start = file.part.offset(group.output.name) + first
        memory = sum({id(g): g.memory_nbytes for g, _, _ in run}.values())
        work = partial(_copy, file, start, tuple(run))
        return group.output.name, _Task(work, [file], memory)

    for entry in sorted(file.part.tensors.values(), key=lambda entry: entry.start):
        group = copied.get(entry.name)
        if group is None:
            if run:
                yield made()
            run, length = [], 0
            continue
        for first, last in cut_extents([0, entry.nbytes]):
            if run and length + last - first > RUN_NBYTES:
                yield made()
                run, length = [], 0
            run.append((group, first, last))
            length += last - first
    if run:
        yield made()


def _copy(
    file: PartFile, start: int, run: Sequence[tuple[Copied, int, int]], scratch: Scratch
) -> None:
    borders, end = [], start
    for _, first, last in run:
        end += last - first
        borders.append(end)
    writer = RunWriter(file, start, borders)
    memory = memory_of(scratch.tensor())[:COPY_PIECE_NBYTES]
    for group, first, last in run:
        for stream, nbytes in _streams(group, first, last):
            for begin in range(0, nbytes, memory.nbytes):
                view = memory[: min(memory.nbytes, nbytes - begin)]
                stream.read_into(view)
                writer.put(view)
    writer.finish()


def _streams(group: Copied, first: int, last: int) -> Iterator[tuple[Stream, int]]:
    """The input bytes of the output's bytes `[first, last)`, range by range."""
    position = 0
    for part in group.ranges:
        begin, end = max(first - position, 0), min(last - position, part.nbytes)
        if begin < end:
            yield part.tensor.stream(part.start + begin, part.start + end), end - begin
        position += part.nbytes


def _compute(
    group: Computed, plan: OutputPlan, files: Sequence[PartFile], scratch: Scratch
) -> None:
    writers = {}
    for spec in group.outputs:
        number, start = plan.places[spec.name]
        if spec.nbytes:
            writers[spec.name] = RunWriter(files[number], start, [start + spec.nbytes])
    if not group.banded:
        tensors = {key: tensor.read() for key, tensor in group.inputs.items()}
        _put(group, tensors, writers, scratch, rows=None)
    else:
        _compute_bands(group, writers, scratch)
    for writer in writers.values():
        writer.finish()


def _compute_bands(group: Computed, writers: dict[str, RunWriter], scratch: Scratch) -> None:
    whole = {k: tensor.read() for k, tensor in group.inputs.items() if k not in group.banded}
    streams = {key: group.inputs[key].stream() for key in group.banded}
    bands = {}
    for key in group.banded:
        stored = group.inputs[key].stored
        shape = (group.rows_per_band, *stored.torch_shape()[1:])
        bands[key] = torch.empty(shape, dtype=stored.torch_dtype())  # used again for each band
    for first, last in group.bands():
        tensors = dict(whole)
        for key, stream in streams.items():
            tensors[key] = bands[key][: last - first]
            stream.read_into(memory_of(tensors[key]))
        _put(group, tensors, writers, scratch, rows=last - first)


def _put(
    group: Computed,
    tensors: dict[str, torch.Tensor],
    writers: dict[str, RunWriter],
    scratch: Scratch,
    *,
    rows: int | None,
) -> None:
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    nbytes += group.scratch_nbytes if rows is None else 0
    made = dict(group.make(tensors))
    tensors.clear()
    for spec in group.outputs:
        tensor = made.pop(spec.name)
        shape = spec.torch_shape
        if rows is not None:
            shape = (group.made_of(spec, rows), *shape[1:])
        _check(spec, tensor, shape)
        if spec.name in writers:
            source = TensorSource(tensor, spec.name)
            for view in source.pieces(0, source.nbytes, scratch):
                writers[spec.name].put(view)
            nbytes += source.nbytes
    assert not made, f"{', '.join(made)}: made, but not declared"
    _heap.used(nbytes)


def _stream(group: Streamed, file: PartFile, start: int, scratch: Scratch) -> None:
    torch.set_num_threads(1)  # of this thread; pieces are too short to be divided
    writer = RunWriter(file, start, [start + group.output.nbytes])
    for piece in group.make():
        _check(group.output, piece, (len(piece),))
        writer.put(memory_of(piece))
    writer.finish()


def _check(spec: TensorSpec, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    found = (dtype_name(tensor), tuple(tensor.shape))
    assert found == (spec.dtype, shape), f"{spec.name}: made as {found}, not {(spec.dtype, shape)}"


def _run(tasks: Sequence[_Task], memory_nbytes: int, options: RewriteOptions) -> None:
    remaining = iter(tasks)
    guard = threading.Lock()
    failed = threading.Event()
    budget = Budget(memory_nbytes, failed)
    count = max(1, min(options.threads, len(tasks)))
    inner = max(1, torch.get_num_threads() // count)

    def work() -> None:
        scratch = Scratch(SCRATCH_NBYTES)
        torch.set_num_threads(inner)
        with torch.no_grad():
            while not failed.is_set():
                with guard:
                    task = next(remaining, None)
                if task is None:
                    return
                _do(task, budget, failed, scratch)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="milepost-rewrite") as pool:
            for future in [pool.submit(work) for _ in range(count)]:
                future.result()
    finally:
        torch.set_num_threads(before)


def _do(task: _Task, budget: Budget, failed: threading.Event, scratch: Scratch) -> None:
    taken = budget.take(task.memory_nbytes)
    try:
        if not failed.is_set():
            task.work(scratch)
            for file in task.files:
                file.done()
    except BaseException:
        failed.set()
        raise
    finally:
        budget.give(taken)
