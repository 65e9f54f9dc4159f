"""Bytes of a file in order, compared with the digests that are recorded for it on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from milepost.engine.read import read_fully
from milepost.engine.source import memory_of
from milepost.engine.verify import find_bad_extents
from milepost.errors import DigestMismatchError, StorageError

if TYPE_CHECKING:
    import torch

    from milepost.format.digests import Extent

ROWS_NBYTES = 2**20
"""Bytes of rows that are made at a time, where one row is not more."""
_HASH_PIECE_NBYTES = 256 * 1024


class SourceFiles:
    """Descriptors of files that are read, opened when first asked for, and the extents of them that
    were proven as a whole; from any thread."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._guard = threading.Lock()
        self._proven: dict[tuple[Path, int], Future[bool]] = {}

    def descriptor(self, path: Path) -> int:
        with self._guard:
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise StorageError(
                        f"{path}: {error.strerror}", path=path, number=error.errno
                    ) from error
            return self._descriptors[path]

    def prove(self, path: Path, extent: Extent, what: str) -> None:
        """Compare all bytes of an extent with its digest, once for all who read a part of it."""
        own: Future[bool] = Future()
        with self._guard:
            proven = self._proven.setdefault((path, extent.start), own)
        if proven is own:
            try:
                own.set_result(not find_bad_extents({path: [extent]}))
            except BaseException as error:
                own.set_exception(error)
                raise
        if not proven.result():
            raise not_as_saved(path, extent, what)

    def close(self) -> None:
        with self._guard:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


class Stream(Protocol):
    """Bytes that come one after the other."""

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the bytes that come next."""
        ...


class MemoryStream:
    """The bytes of a tensor that was read, from `start` on."""

    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        self._tensor = tensor.contiguous()
        self._position = start

    def read_into(self, view: memoryview) -> None:
        view[:] = memory_of(self._tensor)[self._position : self._position + view.nbytes]
        self._position += view.nbytes


class RowsStream:
    """The bytes `[start, end)` of `count` rows that are made when they are asked for.

    `make(first, last)` is called in order, for about `ROWS_NBYTES`, a multiple of `step` rows that
    begins at one.
    """

    def __init__(
        self,
        make: Callable[[int, int], torch.Tensor],
        *,
        start: int,
        end: int,
        count: int,
        row_nbytes: int,
        step: int = 1,
    ) -> None:
        self._make, self._size = make, row_nbytes
        self._next = start // (row_nbytes * step) * step
        self._last = min(-(-end // (row_nbytes * step)) * step, count)
        self._rows = rows_at_a_time(row_nbytes, step)
        self._skipped = start - self._next * row_nbytes
        self._made: torch.Tensor | None = None
        self._held = memoryview(b"")

    def read_into(self, view: memoryview) -> None:
        while view.nbytes:
            if not self._held.nbytes:
                self._fill()
            piece = self._held[: view.nbytes]
            view[: piece.nbytes] = piece
            view, self._held = view[piece.nbytes :], self._held[piece.nbytes :]

    def _fill(self) -> None:
        self._made = None
        first, last = self._next, min(self._next + self._rows, self._last)
        self._made = self._make(first, last).contiguous()
        self._held = memory_of(self._made)[self._skipped :]
        self._next, self._skipped = last, 0


def rows_at_a_time(row_nbytes: int, step: int = 1) -> int:
    """How many rows a `RowsStream` makes in one go."""
    return step * max(1, ROWS_NBYTES // (row_nbytes * step))


class FileStream:
    """The bytes `[start, end)` of a file, read piece by piece in order.

    `extents` are those recorded for these bytes, ascending. Each that lies inside is compared once
    its last byte was read, one that reaches out before the first byte is: `DigestMismatchError`
    names `what` they are bytes of.
    """

    def __init__(
        self,
        files: SourceFiles,
        path: Path,
        start: int,
        end: int,
        *,
        what: str,
        extents: Sequence[Extent] = (),
    ) -> None:
        self._path, self._what, self._position = path, what, start
        self._files, self._descriptor = files, files.descriptor(path)
        inside = [e.start >= start and e.end <= end for e in extents]
        self._extents = [e for e, whole in zip(extents, inside, strict=True) if whole]
        self._cut = [e for e, whole in zip(extents, inside, strict=True) if not whole]
        self._extents.reverse()  # the next one is last
        self._hasher = xxhash.xxh3_128()

    def read_into(self, view: memoryview) -> None:
        while self._cut:
            self._files.prove(self._path, self._cut.pop(), self._what)
        read_fully(self._descriptor, view, self._position, self._path)
        self._compare(view)
        self._position += view.nbytes

    def _compare(self, view: memoryview) -> None:
        position, end = self._position, self._position + view.nbytes
        while self._extents and position < end:
            extent = self._extents[-1]
            first = max(position, extent.start)
            last = min(end, extent.end)
            for begin in range(first, last, _HASH_PIECE_NBYTES):
                stop = min(begin + _HASH_PIECE_NBYTES, last)
                self._hasher.update(view[begin - self._position : stop - self._position])
            if last < extent.end:
                return
            if self._hasher.digest() != extent.digest:
                raise not_as_saved(self._path, extent, self._what)
            self._hasher.reset()
            self._extents.pop()
            position = last


def not_as_saved(path: Path, extent: Extent, what: str) -> DigestMismatchError:
    """The error for bytes that are others than those that were saved."""
    return DigestMismatchError(
        f"{path}: {what}: bytes {extent.start} to {extent.end} are not those that were saved; "
        "nothing was written; use another checkpoint",
        path=path,
    )
