"""Streaming bytes into files: several threads, one pass, digests on the way, durable at the end.

Every file is cut into extents (`milepost.format.digests`). Threads take runs of extents, hash them
in pieces small enough to stay in the processor's cache, and write them at their final offset.
`WriteMode` chooses between two ways; `benchmarks/write_modes.py` measures them:

- buffered: `pwrite` from the tensor's own memory, with `sync_file_range` to start writeback early;
- direct: `O_DIRECT` from a small aligned bounce buffer, the file's unaligned edges buffered; it
  leaves the page cache alone;
- auto: buffered. With early writeback it was the fastest durable way wherever it was measured, also
  with digests (2 GiB: 0.50 s against 0.87 s direct); `MILEPOST_WRITE_MODE` chooses for a machine.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import xxhash

from milepost._env import env_choice, env_int, env_int_or_none
from milepost.engine.output import HASH_PIECE_NBYTES, BufferedOutput, DirectOutput
from milepost.engine.source import ByteSource, Scratch
from milepost.errors import InvalidInputError
from milepost.format.digests import Extent, cut_extents
from milepost.storage import fileops
from milepost.storage.space import require_space

SCRATCH_NBYTES = 4 * 1024 * 1024
RUN_NBYTES = 64 * 1024 * 1024


class Durability(Enum):
    """What is true when a save returns."""

    DURABLE = "durable"
    """The bytes and names survive a power cut."""
    PAGE_CACHE = "page-cache"
    """They survive the process, not the machine: no fsync of data. For tests and scratch."""


class WriteMode(Enum):
    """How bytes reach the disk; AUTO is the way that was measured to be the fastest."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"


class InnerDim(Enum):
    """How shards that cut a row become whole rows in the file."""

    EXCHANGE = "exchange"
    """Ranks send each other columns, so that each writes whole rows."""
    MAPPED = "mapped"
    """Every rank copies its columns into the mapped file: no messages, on one host only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How bytes are written. `threads` per process; `on_bytes(n)` is called as bytes are written,
    from any thread.

    With several ranks the values of rank 0 count for the last three. Tensors whose pieces have
    fewer bytes than `aggregate_below` are joined by one writer for each 16 MiB of a file; by
    default none on one host, where small writes cost less than messages, and 1 MiB on several.
    No page of `stripe_nbytes`, a power of two up to 1 MiB, is written by two hosts.
    """

    durability: Durability = Durability.DURABLE
    mode: WriteMode = field(
        default_factory=lambda: WriteMode(
            env_choice("MILEPOST_WRITE_MODE", ("auto", "direct", "buffered"))
        )
    )
    threads: int = field(default_factory=lambda: env_int("MILEPOST_IO_THREADS"))
    on_bytes: Callable[[int], None] | None = None
    inner_dim: InnerDim = field(
        default_factory=lambda: InnerDim(env_choice("MILEPOST_INNER_DIM", ("exchange", "mapped")))
    )
    aggregate_below: int | None = field(
        default_factory=lambda: env_int_or_none("MILEPOST_AGGREGATE_BELOW")
    )
    stripe_nbytes: int = field(default_factory=lambda: env_int("MILEPOST_STRIPE_NBYTES"))

    def __post_init__(self) -> None:
        stripe = self.stripe_nbytes
        if not 4096 <= stripe <= 2**20 or stripe & (stripe - 1):
            raise InvalidInputError(
                f"stripe_nbytes={stripe}: expected a power of two from 4096 to 1048576"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of one source at one place of a file."""

    start: int
    source: ByteSource

    @property
    def end(self) -> int:
        return self.start + self.source.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWrite:
    """Pieces of a file, in order of offset; all of it, or what one rank writes of it.

    `file_nbytes` is the size of the whole file where the pieces are only a part.
    """

    path: Path
    pieces: tuple[Piece, ...]
    file_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        if self.file_nbytes is not None:
            return self.file_nbytes
        return self.pieces[-1].end if self.pieces else 0

    def extents(self) -> list[tuple[int, int]]:
        return [extent for p in self.pieces for extent in cut_extents([p.start, p.end])]

    def views(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        """Bytes `[start, end)` of the file, which the pieces cover."""
        number = bisect_right(self.pieces, start, key=lambda piece: piece.start) - 1
        while number < len(self.pieces) and self.pieces[number].start < end:
            piece = self.pieces[number]
            base = piece.start
            yield from piece.source.pieces(
                max(start, base) - base, min(end, piece.end) - base, scratch
            )
            number += 1


def write_files(writes: Sequence[FileWrite], options: WriteOptions) -> list[list[Extent]]:
    """Create the files and fill them; the extents of each, with digests, in file order.

    Space for all of them is reserved before the first byte is written. Directory entries are not
    synced here. `NoSpaceError`, or `OSError` as the file system raises it; what was created stays
    for the caller, who owns the directory, to remove.
    """
    create_files(writes)
    return fill_files(writes, options)


def create_files(writes: Sequence[FileWrite]) -> None:
    """Create the files with their whole size reserved, where the file system can, for several ranks
    to fill.

    What is shown as free is asked first: a reservation that fails has taken all of it meanwhile,
    and other processes would run into a full disk.
    """
    if writes:
        require_space(writes[0].path.parent, sum(write.nbytes for write in writes))
    for write in writes:
        descriptor = fileops.open_file(write.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if not fileops.reserve_file(descriptor, write.nbytes):
                fileops.truncate_file(descriptor, write.nbytes)
        finally:
            fileops.close_file(descriptor)


def fill_files(writes: Sequence[FileWrite], options: WriteOptions) -> list[list[Extent]]:
    """Write these pieces into files that exist, and make them durable; see `write_files`."""
    files = [_FileToFill(write, options) for write in writes]
    try:
        _run_tasks([task for file in files for task in file.tasks()], options)
        return [file.finished_extents() for file in files]
    finally:
        for file in files:
            file.close()


def digest_files(writes: Sequence[FileWrite], options: WriteOptions) -> list[list[Extent]]:
    """The extents that `fill_files` would return, and nothing written."""
    jobs = [(write, span) for write in writes for span in write.extents()]
    found: list[Extent | None] = [None] * len(jobs)

    def digest(worker: _Worker, *, number: int) -> None:
        write, (start, end) = jobs[number]
        hasher = xxhash.xxh3_128()
        for view in write.views(start, end, worker.scratch):
            for begin in range(0, view.nbytes, HASH_PIECE_NBYTES):
                hasher.update(view[begin : begin + HASH_PIECE_NBYTES])
        found[number] = Extent(digest=hasher.digest(), start=start, nbytes=end - start)

    _run_tasks([partial(digest, number=number) for number in range(len(jobs))], options)
    extents: dict[int, list[Extent]] = {id(write): [] for write in writes}
    for (write, _), extent in zip(jobs, found, strict=True):
        assert extent is not None, "an extent was never hashed"
        extents[id(write)].append(extent)
    return [extents[id(write)] for write in writes]


class _FileToFill:
    """One file while it is written: its descriptors, extents and what is still to come.

    It is open from its first run to its last, so that a checkpoint may have more files than a
    process can open.
    """

    def __init__(self, write: FileWrite, options: WriteOptions) -> None:
        self.write = write
        self.options = options
        self.ranges = write.extents()
        self.digests: list[bytes | None] = [None] * len(self.ranges)
        self.buffered = self.direct = -1
        self._runs = list(_runs_of(self.ranges))
        self._left = len(self._runs)
        self._guard = threading.Lock()

    @property
    def is_durable(self) -> bool:
        return self.options.durability is Durability.DURABLE

    def _wants_direct(self) -> bool:
        return self.is_durable and self.options.mode is WriteMode.DIRECT

    def _open(self) -> None:
        with self._guard:
            if self.buffered >= 0:
                return
            self.buffered = fileops.open_file(self.write.path, os.O_RDWR)
            if self._wants_direct():
                self._open_direct()

    def _open_direct(self) -> None:
        try:
            self.direct = fileops.open_file(self.write.path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise

    def tasks(self) -> Iterator[Callable[[_Worker], None]]:
        if not self._runs:
            yield self._sync_empty
        for first, last in self._runs:
            yield partial(self._write_run, first=first, last=last)

    def _sync_empty(self, worker: _Worker) -> None:
        self._open()
        self._finish()

    def _write_run(self, worker: _Worker, *, first: int, last: int) -> None:
        self._open()
        out = worker.direct_output(self) if self.direct >= 0 else BufferedOutput(self)
        out.begin(self.ranges[first][0], self.ranges[last - 1][1])
        for number in range(first, last):
            hasher = xxhash.xxh3_128()
            for view in self.write.views(*self.ranges[number], worker.scratch):
                out.put(view, hasher)
            self.digests[number] = hasher.digest()
        out.finish()
        with self._guard:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._finish()

    def _finish(self) -> None:
        if self.is_durable:
            fileops.sync_data(self.buffered)
        self.close()

    def wrote(self, nbytes: int) -> None:
        if self.options.on_bytes is not None:
            self.options.on_bytes(nbytes)

    def finished_extents(self) -> list[Extent]:
        extents = []
        for (start, end), digest in zip(self.ranges, self.digests, strict=True):
            assert digest is not None, "an extent was never written"
            extents.append(Extent(digest=digest, start=start, nbytes=end - start))
        return extents

    def close(self) -> None:
        for descriptor in (self.direct, self.buffered):
            if descriptor >= 0:
                fileops.close_file(descriptor)
        self.direct = self.buffered = -1


def _runs_of(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Extents that follow each other without a gap, grouped into runs of about `RUN_NBYTES`.

    Runs are intervals of positions in `ranges`.
    """
    first = 0
    for number, (start, _) in enumerate(ranges):
        previous_end = ranges[number - 1][1] if number else start
        is_long = previous_end - ranges[first][0] >= RUN_NBYTES
        if number > first and (is_long or start != previous_end):
            yield first, number
            first = number
    if first < len(ranges):
        yield first, len(ranges)


class _Worker:
    """What one writing thread owns: scratch memory and a bounce buffer, made when first needed."""

    def __init__(self) -> None:
        self.scratch = Scratch(SCRATCH_NBYTES)
        self._output: DirectOutput | None = None

    def direct_output(self, file: _FileToFill) -> DirectOutput:
        if self._output is None:
            self._output = DirectOutput()
        self._output.attach(file)
        return self._output


def _run_tasks(tasks: Sequence[Callable[[_Worker], None]], options: WriteOptions) -> None:
    """Run all tasks on a few threads; the first error stops the rest and is raised."""
    queue: SimpleQueue[Callable[[_Worker], None]] = SimpleQueue()
    for task in tasks:
        queue.put(task)
    failed = threading.Event()

    def work() -> None:
        worker = _Worker()
        while not failed.is_set():
            try:
                task = queue.get_nowait()
            except Empty:
                return
            try:
                task(worker)
            except BaseException:
                failed.set()
                raise

    count = min(options.threads, len(tasks))
    if count <= 1:
        work()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="milepost-write") as pool:
        try:
            for future in [pool.submit(work) for _ in range(count)]:
                future.result()
        finally:  # a KeyboardInterrupt too ends the others
            failed.set()
