"""Writing the file: under a hidden name, tensor by tensor, and its own name when it is whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from milepost.engine.source import memory_of
from milepost.errors import CheckpointError, ExistsError, InvalidInputError
from milepost.storage import fileops
from milepost.storage.atomic import remove_quietly
from milepost.storage.owned_names import owned_name, remove_dead
from milepost.storage.space import storage_error, visible_error
from milepost.tools.gguf.container import Container
from milepost.tools.gguf.convert import BYTES_PER_ELEMENT, converted, unit_of
from milepost.tools.gguf.tensors import GgufTensor, Segment
from milepost.tools.rewrite.heap import Heap
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.source import SourceTensor, same_bytes

_BAND_NUMEL = 2**18
_DEFAULT_MEMORY_NBYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One segment, and where its first byte goes."""

    tensor: GgufTensor
    segment: Segment
    offset: int

    @property
    def band_numel(self) -> int:
        unit = unit_of(self.tensor)
        return max(unit, _BAND_NUMEL // unit * unit)

    @property
    def memory_nbytes(self) -> int:
        """Of a band, and what reading the segment in order holds."""
        band = min(self.band_numel, self.segment.numel)
        held = self.segment.tensor.held_nbytes
        return band * (self.segment.itemsize + BYTES_PER_ELEMENT) + held


def tasks_of(tensors: Sequence[GgufTensor], container: Container) -> list[_Task]:
    """A task for each segment of each tensor."""
    found = []
    for tensor, offset in zip(tensors, container.offsets, strict=True):
        for segment in tensor.segments:
            found.append(_Task(tensor=tensor, segment=segment, offset=offset))
            offset += tensor.kind.nbytes(segment.numel)
    return found


def memory_and_threads(tasks: Sequence[_Task], options: RewriteOptions) -> tuple[int, int]:
    """What the tasks take together at most, and how many of them run at a time."""
    largest = max((task.memory_nbytes for task in tasks), default=1)
    budget = max(largest, options.memory_nbytes or _DEFAULT_MEMORY_NBYTES)
    threads = max(1, min(options.threads, budget // largest))
    return threads * largest, threads


@contextmanager
def new_file(target: Path, *, is_durable: bool) -> Iterator[tuple[Path, int]]:
    """A hidden file beside `target`, open for writing, which has its name when the block is done.

    Any error leaves nothing. `ExistsError` when the name was taken meanwhile.
    """
    fileops.make_directories(target.parent)
    remove_dead(target)
    path = owned_name(target)
    descriptor = fileops.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try:
            yield path, descriptor
            if is_durable:
                fileops.sync_data(descriptor)
        finally:
            fileops.close_file(descriptor)
        fileops.rename_no_replace(path, target)
    except FileExistsError:
        remove_quietly(path)
        raise ExistsError(
            f"{target}: the name was taken meanwhile; nothing was replaced", path=target
        ) from None
    except BaseException:
        remove_quietly(path)
        raise
    if is_durable:
        try:
            fileops.sync_directory(target.parent)
        except OSError as error:
            raise visible_error(error, target) from error


def write_file(
    target: Path,
    container: Container,
    tensors: Sequence[GgufTensor],
    options: RewriteOptions,
    check: Callable[[Path], None],
) -> None:
    """Write the whole file. `check` looks at it before it gets its name, and may raise.

    `StorageError` and `NoSpaceError` of the file system, `DigestMismatchError` for bytes of the
    source that are not those that were saved.
    """
    try:
        with new_file(target, is_durable=options.is_durable) as (path, descriptor):
            if not fileops.reserve_file(descriptor, container.nbytes):
                fileops.truncate_file(descriptor, container.nbytes)
            fileops.write_at(descriptor, container.header, 0)
            for tensor, offset in zip(tensors, container.offsets, strict=True):
                if tensor.values:
                    values = torch.tensor(tensor.values, dtype=torch.float32)
                    fileops.write_at(descriptor, memory_of(values), offset)
            _run(tasks_of(tensors, container), descriptor, container.nbytes, options)
            check(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(error, target, needed_nbytes=container.nbytes) from error


def _run(tasks: list[_Task], descriptor: int, nbytes: int, options: RewriteOptions) -> None:
    progress = _Progress(options, nbytes)
    heap, stop = Heap(), threading.Event()
    _, threads = memory_and_threads(tasks, options)

    def run(task: _Task) -> None:
        try:
            _write(task, descriptor, progress, heap, stop)
        except BaseException:
            stop.set()  # the others end at their next band, and are not asked what became of them
            raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(run, tasks):
                pass
        finally:
            stop.set()


def _write(
    task: _Task, descriptor: int, progress: _Progress, heap: Heap, stop: threading.Event
) -> None:
    tensor, segment, offset = task.tensor, task.segment, task.offset
    stored = segment.tensor.stored.torch_dtype()
    size = segment.itemsize
    where = f"{segment.tensor.source.path}: {segment.tensor.name}"
    stream = segment.tensor.stream(segment.first * size, segment.last * size)
    for first in range(0, segment.numel, task.band_numel):
        if stop.is_set():
            return
        count = min(task.band_numel, segment.numel - first)
        values = torch.empty(count, dtype=stored)
        stream.read_into(memory_of(values))
        made = converted(values, tensor, where)
        fileops.write_at(descriptor, memory_of(made), offset)
        offset += made.nbytes
        heap.used(count * (size + BYTES_PER_ELEMENT))
        progress.add(made.nbytes)


class _Progress:
    """Told from any thread; the header counts as written."""

    def __init__(self, options: RewriteOptions, total: int) -> None:
        self._tell, self._done, self._total = options.on_progress, 0, total
        self._guard = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._tell is None:
            return
        with self._guard:
            self._done += nbytes
            self._tell(self._done, self._total)


def require_equal(head: SourceTensor, embedding: SourceTensor) -> None:
    """`InvalidInputError` for a head that is tied by the configuration and has other values."""
    if not same_bytes(head, embedding):
        raise InvalidInputError(
            f"{head.source.path}: config.json ties {head.name} to {embedding.name}, and both are "
            "there with other values, so one of them would be lost; set tie_word_embeddings to "
            "false if the head was trained by itself, or remove it"
        )
