"""Plain durable writes of a state: one pass, no header, no digests. The rate to be measured by.

They write the tensors as one stream of bytes into one file, in runs of 64 MiB that threads take in
turn: through the page cache (`buffered`), the same with `sync_file_range` behind it
(`writeback`), or past the page cache from an aligned bounce buffer (`direct`). All end with
`fdatasync` of the file and `fsync` of its directory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch

from milepost.engine.source import memory_of

RUN_NBYTES = 64 * 2**20
PIECE_NBYTES = 2**20
WRITEBACK_NBYTES = 8 * 2**20
BOUNCE_NBYTES = 8 * 2**20
PAGE_NBYTES = 4096
SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Stream:
    """Tensors as one run of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.views = [memory_of(tensor.detach()) for tensor in tensors]
        self.ends = list(accumulate(view.nbytes for view in self.views))
        self.nbytes = self.ends[-1]

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        number = bisect_right(self.ends, start)
        while start < end:
            view = self.views[number]
            first = start - (self.ends[number] - view.nbytes)
            piece = view[first : first + end - start]
            yield piece
            start += piece.nbytes
            number += 1


Writer = Callable[[int, Stream, int, int], None]


def write_buffered(descriptor: int, stream: Stream, start: int, end: int) -> None:
    for view in stream.pieces(start, end):
        start = _write_pieces(descriptor, view, start)


def write_with_writeback(descriptor: int, stream: Stream, start: int, end: int) -> None:
    flushed = start
    for view in stream.pieces(start, end):
        for begin in range(0, view.nbytes, WRITEBACK_NBYTES):
            start = _write_pieces(descriptor, view[begin : begin + WRITEBACK_NBYTES], start)
            if start - flushed >= WRITEBACK_NBYTES:
                _libc.sync_file_range(descriptor, flushed, start - flushed, SYNC_FILE_RANGE_WRITE)
                flushed = start
    _libc.sync_file_range(descriptor, flushed, end - flushed, SYNC_FILE_RANGE_WRITE)


def _write_pieces(descriptor: int, view: memoryview, offset: int) -> int:
    for begin in range(0, view.nbytes, PIECE_NBYTES):
        piece = view[begin : begin + PIECE_NBYTES]
        while piece.nbytes:
            count = os.pwrite(descriptor, piece, offset)
            piece, offset = piece[count:], offset + count
    return offset


def write_direct(descriptor: int, stream: Stream, start: int, end: int) -> None:
    bounce = mmap.mmap(-1, BOUNCE_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
    filled = 0
    for view in stream.pieces(start, end):
        source, done = ctypes.addressof(ctypes.c_char.from_buffer(view)), 0
        while done < view.nbytes:
            count = min(BOUNCE_NBYTES - filled, view.nbytes - done)
            ctypes.memmove(address + filled, source + done, count)
            filled, done = filled + count, done + count
            if filled == BOUNCE_NBYTES:
                start += os.pwrite(descriptor, memoryview(bounce), start)
                filled = 0
    whole = -(-filled // PAGE_NBYTES) * PAGE_NBYTES  # the end of the file is cut afterwards
    if whole:
        os.pwrite(descriptor, memoryview(bounce)[:whole], start)


METHODS: dict[str, tuple[Writer, int]] = {
    "buffered": (write_buffered, 0),
    "writeback": (write_with_writeback, 0),
    "direct": (write_direct, os.O_DIRECT),
}


def write_plain(tensors: Sequence[torch.Tensor], path: Path, *, method: str, threads: int) -> None:
    """Write the tensors into a new file; durable when this returns."""
    writer, flags = METHODS[method]
    stream = Stream(tensors)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags)
    try:
        os.posix_fallocate(descriptor, 0, stream.nbytes)
        starts = range(0, stream.nbytes, RUN_NBYTES)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(
                lambda start: writer(
                    descriptor, stream, start, min(start + RUN_NBYTES, stream.nbytes)
                ),
                starts,
            ):
                pass
        os.ftruncate(descriptor, stream.nbytes)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
