"""Writing what other ranks hold: from the exchange, or copied into place by everybody.

With the exchange, the writer of a chunk gets its bytes, hashes them while they are hot and writes
them at their place. Without one (`mapped`), every rank copies what it holds into the mapped file,
and the writer reads the chunk back for its digest when all have copied: for one host only, and
never for a file that is also written past the page cache.

A store into a map has no way to fail but SIGBUS, which ends the process. So maps are only of files
whose blocks were reserved when they were created: a full disk or a quota is found there. They lie
in a staging directory under the lease of the run, where nobody cuts them short. A device that fails
while a page is faulted in still ends the process; the save is then torn and does not count.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from milepost.engine.exchange import BufferPool, ExchangeStep, copy_boxes, run_exchange
from milepost.engine.open_files import MAX_OPEN_FILES
from milepost.engine.output import HASH_PIECE_NBYTES
from milepost.engine.source import memory_of
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import InvalidInputError
from milepost.format.digests import EXTENT_NBYTES, Extent
from milepost.plan.shares import CHUNK_NBYTES
from milepost.storage import fileops

_BUFFERS = 2


def exchange_and_write(
    steps: Sequence[ExchangeStep], options: WriteOptions, *, group: Any
) -> dict[Path, list[Extent]]:
    """Exchange what travels and write this rank's chunks; collective.

    The extents written, by file. The first error of writing is raised after all steps are done.
    """
    return _exchanged(steps, _Writer(options), group)


def exchange_and_digest(
    steps: Sequence[ExchangeStep], options: WriteOptions, *, group: Any
) -> dict[Path, list[Extent]]:
    """The extents that `exchange_and_write` would return, and nothing written; collective."""
    return _exchanged(steps, _Digester(options), group)


def _exchanged(
    steps: Sequence[ExchangeStep], writer: _Writer, group: Any
) -> dict[Path, list[Extent]]:
    try:
        failure = run_exchange(steps, writer.put, writer.pool, group=group)
        if failure is not None:
            raise failure
        writer.finish()
    finally:
        writer.close()
    return writer.extents


def copy_mapped(steps: Sequence[ExchangeStep], options: WriteOptions) -> None:
    """Copy all that this rank holds of the steps to its place in the files, through maps of them.

    The files have their whole size, with blocks behind it. Durable when this returns, as asked.
    `InvalidInputError`, and nothing is copied, where the file system cannot reserve blocks.
    """
    files = _Files(options.durability)
    try:
        if steps:
            _require_reserved(files.open(steps[0].path), steps[0].path)
        for step in steps:
            for parts in (step.own, *step.sends.values()):
                for part in parts:
                    copy_boxes(part, _mapped(files.open(step.path), part.start, part.end))
        files.sync()
    finally:
        files.close()


def digest_mapped(steps: Sequence[ExchangeStep], options: WriteOptions) -> dict[Path, list[Extent]]:
    """Read back this rank's chunks, which all ranks have copied; their extents, by file."""
    files, extents = _Files(Durability.PAGE_CACHE), _Extents()
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    try:
        for step in steps:
            for start, end, tensor in step.chunks:
                data = buffer[: end - start]
                if os.preadv(files.open(step.path), [data], start) != end - start:
                    raise OSError(5, "the file ends before a chunk that was copied", step.path)
                extents.add(step.path, tensor, start, data)
                if options.on_bytes is not None:
                    options.on_bytes(end - start)
    finally:
        files.close()
    return extents.finished()


def _require_reserved(descriptor: int, path: Path) -> None:
    """Refuse a file on a file system that cannot reserve: it was made with holes.

    Where the first byte can be reserved, and changes nothing, the whole file has been.
    """
    if not fileops.reserve_file(descriptor, 1):
        raise InvalidInputError(
            f"{path}: inner_dim=InnerDim.MAPPED needs a file system that reserves space, and this "
            "one cannot: when it is full, a write into a mapped file would end the process "
            "(SIGBUS); use InnerDim.EXCHANGE"
        )


def _mapped(descriptor: int, start: int, end: int) -> Tensor:
    """Bytes `[start, end)` of a file as a tensor; the map goes when the tensor does."""
    first = start - start % mmap.ALLOCATIONGRANULARITY
    window = fileops.map_file(descriptor, first, end - first)
    return torch.frombuffer(window, dtype=torch.uint8)[start - first :]


class _Files:
    """Descriptors of the files that are written, opened when first needed. When there
    are many, the first is made durable and closed; `sync` makes the rest durable."""

    def __init__(self, durability: Durability) -> None:
        self._durability = durability
        self._descriptors: dict[Path, int] = {}

    def open(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                first = next(iter(self._descriptors))
                self._sync(self._descriptors[first])
                fileops.close_file(self._descriptors.pop(first))
            self._descriptors[path] = fileops.open_file(path, os.O_RDWR)
        return self._descriptors[path]

    def sync(self) -> None:
        for descriptor in self._descriptors.values():
            self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        if self._durability is Durability.DURABLE:
            fileops.sync_data(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            fileops.close_file(descriptor)
        self._descriptors.clear()


class _Extents:
    """Digests of chunks, joined while chunks of one tensor follow each other."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, int, int], tuple[xxhash.xxh3_128, int]] = {}
        self._done: dict[Path, list[Extent]] = {}

    def add(self, path: Path, tensor: int, start: int, data: memoryview) -> None:
        end = start + data.nbytes
        hasher, first = self._open.pop((path, tensor, start), (None, start))
        if hasher is not None and end - first > EXTENT_NBYTES:
            self._close(path, hasher, first, start)
            hasher, first = None, start
        hasher = hasher or xxhash.xxh3_128()
        for begin in range(0, data.nbytes, HASH_PIECE_NBYTES):
            hasher.update(data[begin : begin + HASH_PIECE_NBYTES])
        self._open[path, tensor, end] = hasher, first

    def _close(self, path: Path, hasher: xxhash.xxh3_128, start: int, end: int) -> None:
        extent = Extent(digest=hasher.digest(), start=start, nbytes=end - start)
        self._done.setdefault(path, []).append(extent)

    def finished(self) -> dict[Path, list[Extent]]:
        for (path, _, end), (hasher, start) in self._open.items():
            self._close(path, hasher, start, end)
        self._open.clear()
        return self._done


class _Writer:
    """Writes behind the exchange: one thread writes while the next chunks are on their way."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._files, self._digests = _Files(options.durability), _Extents()
        self.pool = BufferPool(_BUFFERS)
        self.extents: dict[Path, list[Extent]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="milepost-exchange")
        self._pending: deque[Future[None]] = deque()

    def put(self, step: ExchangeStep, buffer: Tensor) -> None:
        """Write a step's chunks and give the buffer back; raises what an earlier write met."""
        self._pending.append(self._thread.submit(self._put, step, buffer))
        while self._pending[0].done() or len(self._pending) > _BUFFERS:
            self._pending.popleft().result()
            if not self._pending:
                return

    def _put(self, step: ExchangeStep, buffer: Tensor) -> None:
        try:
            memory = memory_of(buffer)
            done = 0
            for start, end, tensor in step.chunks:
                self._write(step.path, tensor, memory[done : done + end - start], start)
                done += end - start
        finally:
            self.pool.give_back(buffer)

    def _write(self, path: Path, tensor: int, data: memoryview, offset: int) -> None:
        self._digests.add(path, tensor, offset, data)
        descriptor = self._files.open(path)
        fileops.write_at(descriptor, data, offset)
        if self._options.durability is Durability.DURABLE:
            fileops.start_writeback(descriptor, offset, data.nbytes)
        if self._options.on_bytes is not None:
            self._options.on_bytes(data.nbytes)

    def finish(self) -> None:
        """Wait for all chunks, and make the files durable."""
        while self._pending:
            self._pending.popleft().result()
        self._files.sync()
        self.extents = self._digests.finished()

    def close(self) -> None:
        self._thread.shutdown()
        self._files.close()


class _Digester(_Writer):
    """Hashes what the exchange brings, and lets it go."""

    def _write(self, path: Path, tensor: int, data: memoryview, offset: int) -> None:
        self._digests.add(path, tensor, offset, data)
