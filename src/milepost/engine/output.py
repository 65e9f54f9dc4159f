"""The two ways in which a run of bytes reaches its place in a file: buffered, or past the cache."""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import xxhash

from milepost.storage import fileops

HASH_PIECE_NBYTES = 256 * 1024
WRITE_PIECE_NBYTES = 1024 * 1024
WRITEBACK_NBYTES = 8 * 1024 * 1024
BOUNCE_NBYTES = 4 * 1024 * 1024
PAGE_NBYTES = 4096


class OpenFile(Protocol):
    """What an output needs of the file it writes into."""

    buffered: int
    """Descriptor through the page cache."""
    direct: int
    """Descriptor past it, or -1."""

    @property
    def is_durable(self) -> bool:
        """Whether writeback may begin early, because a sync will follow."""
        ...

    def wrote(self, nbytes: int) -> None:
        """Told after each write."""
        ...


class BufferedOutput:
    """Writes views where they lie, hashing each piece just before it is written."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._offset = self._flushed = 0

    def begin(self, start: int, end: int) -> None:
        self._offset = self._flushed = start

    def put(self, view: memoryview, hasher: xxhash.xxh3_128) -> None:
        for begin in range(0, view.nbytes, WRITE_PIECE_NBYTES):
            piece = view[begin : begin + WRITE_PIECE_NBYTES]
            for inner in range(0, piece.nbytes, HASH_PIECE_NBYTES):
                hasher.update(piece[inner : inner + HASH_PIECE_NBYTES])
            fileops.write_at(self._file.buffered, piece, self._offset)
            self._offset += piece.nbytes
            self._file.wrote(piece.nbytes)
            if self._offset - self._flushed >= WRITEBACK_NBYTES:
                self._start_writeback()

    def finish(self) -> None:
        self._start_writeback()

    def _start_writeback(self) -> None:
        if self._file.is_durable:
            fileops.start_writeback(
                self._file.buffered, self._flushed, self._offset - self._flushed
            )
        self._flushed = self._offset


class DirectOutput:
    """Gathers views in an aligned buffer and writes whole pages past the page cache.

    The buffer holds file bytes `[base, base + filled)` with `base` on a page border. The bytes
    before the first and after the last page border of the run share their page with a neighbour
    run, so they go through the page cache.
    """

    def __init__(self) -> None:
        bounce = mmap.mmap(-1, BOUNCE_NBYTES)  # begins on a page border
        self._bounce = bounce
        self._view = memoryview(bounce)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        self._file: OpenFile | None = None
        self._base = self._filled = self._skip = 0

    def attach(self, file: OpenFile) -> None:
        self._file = file

    def begin(self, start: int, end: int) -> None:
        self._base = start - start % PAGE_NBYTES
        self._skip = self._filled = start - self._base

    def put(self, view: memoryview, hasher: xxhash.xxh3_128) -> None:
        source = ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else 0
        done = 0
        while done < view.nbytes:
            count = min(HASH_PIECE_NBYTES, view.nbytes - done, BOUNCE_NBYTES - self._filled)
            target = self._view[self._filled : self._filled + count]
            if source:  # memmove without the interpreter lock
                ctypes.memmove(self._address + self._filled, source + done, count)
            else:
                target[:] = view[done : done + count]
            hasher.update(target)
            done += count
            self._filled += count
            if self._filled == BOUNCE_NBYTES:
                self._flush(BOUNCE_NBYTES)

    def finish(self) -> None:
        whole = self._filled - self._filled % PAGE_NBYTES
        rest = self._filled - whole
        if whole:
            self._flush(whole)
        if rest > self._skip:
            self._write_buffered(self._skip, rest)

    def _flush(self, nbytes: int) -> None:
        """Write `nbytes`, whole pages, from the front of the buffer; move the rest to the front."""
        assert self._file is not None
        first = 0
        if self._skip:
            self._write_buffered(self._skip, PAGE_NBYTES)
            first, self._skip = PAGE_NBYTES, 0
        if nbytes > first:
            fileops.write_at(self._file.direct, self._view[first:nbytes], self._base + first)
            self._file.wrote(nbytes - first)
        rest = self._filled - nbytes
        if rest:
            ctypes.memmove(self._address, self._address + nbytes, rest)
        self._base += nbytes
        self._filled = rest

    def _write_buffered(self, first: int, last: int) -> None:
        assert self._file is not None
        fileops.write_at(self._file.buffered, self._view[first:last], self._base + first)
        self._file.wrote(last - first)
