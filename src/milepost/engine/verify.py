"""Recomputing digests of files, in parallel, without torch; a wrong byte names its tensor."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import xxhash

from milepost.format.digests import Extent
from milepost.format.header import Header

PIECE_NBYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BadExtent:
    """An extent whose bytes are not those that were written; `error` when it cannot be read."""

    path: Path
    start: int
    end: int
    error: str | None = None


def find_bad_extents(
    files: Mapping[Path, Sequence[Extent]],
    *,
    threads: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> list[BadExtent]:
    """Every extent that does not match its digest, in order of file and offset."""
    jobs = [(path, extent, on_bytes) for path, extents in files.items() for extent in extents]
    if threads <= 1:
        return [bad for bad in starmap(_check, jobs) if bad is not None]
    with ThreadPoolExecutor(threads, thread_name_prefix="milepost-verify") as pool:
        results = pool.map(lambda job: _check(*job), jobs)
        return [bad for bad in results if bad is not None]


def _check(path: Path, extent: Extent, on_bytes: Callable[[int], None] | None) -> BadExtent | None:
    hasher = xxhash.xxh3_128()
    try:
        for piece in _pieces(path, extent.start, extent.end):
            hasher.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    except OSError as error:
        return BadExtent(path=path, start=extent.start, end=extent.end, error=error.strerror)
    if hasher.digest() == extent.digest:
        return None
    return BadExtent(path=path, start=extent.start, end=extent.end)


def _pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while start < end:
            piece = os.pread(descriptor, min(PIECE_NBYTES, end - start), start)
            if not piece:
                return  # the digest of what is there will not fit
            yield piece
            start += len(piece)
    finally:
        os.close(descriptor)


def tensor_at(header: Header, start: int, end: int) -> str | None:
    """The tensor that the file bytes `[start, end)` belong to; None for the header's own bytes."""
    if end <= header.data_start:
        return None
    names = [name for name, entry in header.tensors.items() if entry.nbytes]
    starts = [header.data_start + header.tensors[name].start for name in names]
    number = bisect_right(starts, max(start, header.data_start)) - 1
    return names[number] if number >= 0 else None
