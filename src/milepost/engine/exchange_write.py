"""Writing the rows that the exchange delivers: hashed while hot, at their place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from milepost.engine.exchange import ExchangeJob, run_exchange
from milepost.engine.output import HASH_PIECE_NBYTES
from milepost.engine.source import memory_of
from milepost.engine.write import Durability, WriteOptions
from milepost.format.digests import EXTENT_NBYTES, Extent
from milepost.geometry.blocks import Span
from milepost.geometry.placement import Spans, between
from milepost.plan.shares import TensorPlace, file_runs
from milepost.storage import fileops

_ROWS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeWrite:
    """A tensor whose rows are exchanged: the job, its file, and which global rows the shard has."""

    job: ExchangeJob
    path: Path
    place: TensorPlace
    rows: Spans


def exchange_and_write(
    writes: Sequence[ExchangeWrite], options: WriteOptions, *, group: Any, rank: int
) -> dict[Path, list[Extent]]:
    """Exchange rows and write this rank's; collective among the peers of each tensor.

    The extents written, by file. The first error of writing is raised after all exchanges are done.
    """
    writer = _Writer({write.job.name: write for write in writes}, options)
    try:
        failure = run_exchange([write.job for write in writes], writer.put, group=group, rank=rank)
        if failure is not None:
            raise failure
        writer.sync()
    finally:
        writer.close()
    return writer.extents


class _Writer:
    """Writes behind the exchange: one thread writes while the next rows are on their way."""

    def __init__(self, writes: Mapping[str, ExchangeWrite], options: WriteOptions) -> None:
        self._writes, self._options = writes, options
        self._descriptors: dict[Path, int] = {}
        self.extents: dict[Path, list[Extent]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="milepost-exchange")
        self._pending: deque[Future[None]] = deque()

    def put(self, job: ExchangeJob, span: Span, rows: torch.Tensor) -> None:
        """Take rows that nobody else will touch; raises what an earlier write met."""
        while len(self._pending) >= _ROWS_IN_FLIGHT:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._put, job, span, rows))

    def _put(self, job: ExchangeJob, span: Span, rows: torch.Tensor) -> None:
        write = self._writes[job.name]
        memory = memory_of(rows)
        done = 0
        for start, end in file_runs(write.place, tuple(between(write.rows, *span))):
            for first in range(start, end, EXTENT_NBYTES):
                last = min(first + EXTENT_NBYTES, end)
                self._write(write.path, memory[done : done + last - first], first)
                done += last - first

    def _write(self, path: Path, data: memoryview, offset: int) -> None:
        hasher = xxhash.xxh3_128()
        for begin in range(0, data.nbytes, HASH_PIECE_NBYTES):
            hasher.update(data[begin : begin + HASH_PIECE_NBYTES])
        descriptor = self._open(path)
        fileops.write_at(descriptor, data, offset)
        if self._options.durability is Durability.DURABLE:
            fileops.start_writeback(descriptor, offset, data.nbytes)
        extent = Extent(digest=hasher.digest(), start=offset, nbytes=data.nbytes)
        self.extents.setdefault(path, []).append(extent)
        if self._options.on_bytes is not None:
            self._options.on_bytes(data.nbytes)

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = fileops.open_file(path, os.O_RDWR)
        return self._descriptors[path]

    def sync(self) -> None:
        """Wait for all writes and make them durable."""
        while self._pending:
            self._pending.popleft().result()
        if self._options.durability is Durability.DURABLE:
            for descriptor in self._descriptors.values():
                fileops.sync_data(descriptor)

    def close(self) -> None:
        self._thread.shutdown()
        for descriptor in self._descriptors.values():
            fileops.close_file(descriptor)
        self._descriptors.clear()
