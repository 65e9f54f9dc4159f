"""Proving bytes while they are read: extents that are read whole are hashed as they come in."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from milepost.errors import DamagedError
from milepost.format.digests import Extent


class Segment(NamedTuple):
    """Bytes `[start, end)` of a file; `digest` is there when they are a whole extent."""

    start: int
    end: int
    digest: bytes | None


class Proof:
    """The recorded extents of files, ascending; counts what was proven and what was not."""

    def __init__(self, extents: Mapping[Path, Sequence[Extent]]) -> None:
        self._extents = extents
        self._guard = threading.Lock()
        self.proven_nbytes = self.unproven_nbytes = 0

    def segments(self, path: Path, start: int, end: int) -> Iterator[Segment]:
        """`[start, end)` of a file as whole extents and what lies between and around them."""
        extents = self._extents.get(path, ())
        number = bisect_left(extents, start, key=lambda extent: extent.start)
        while number < len(extents) and extents[number].end <= end:
            extent = extents[number]
            if extent.start > start:
                yield Segment(start, extent.start, None)
            if extent.nbytes:
                yield Segment(extent.start, extent.end, extent.digest)
            start = extent.end
            number += 1
        if start < end:
            yield Segment(start, end, None)

    def compare(self, segment: Segment, digest: bytes, *, name: str, path: Path) -> None:
        """`DamagedError` when the bytes of an extent are not those that were saved."""
        if digest != segment.digest:
            raise DamagedError(
                f"{path}: tensor {name}: bytes {segment.start} to {segment.end} are not those that "
                "were saved",
                path=path,
            )
        self.count(proven=segment.end - segment.start)

    def count(self, *, proven: int = 0, unproven: int = 0) -> None:
        """Add up bytes, from any thread."""
        with self._guard:
            self.proven_nbytes += proven
            self.unproven_nbytes += unproven
