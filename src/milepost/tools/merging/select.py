"""Which elements are the largest: exact thresholds in bounded memory, without sorting.

The bits of non-negative fp32 numbers, read as integers, are ordered as the numbers are. A sample
tells between which two of its values the one looked for lies, all but surely. One pass over all
elements counts what lies above and below and keeps the few in between, among which the number is
found. If it lies outside after all, the next pass looks there, in a wider range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
"""Non-negative fp32 numbers as integers."""

Sizes = Callable[[int], Iterator[Sequence[Bits]]]
"""`sizes(every)` goes over all elements, or every so manyth, and gives them in chunks: a row for
each of the numbers looked for."""

MAGNITUDE = 2**31 - 1
_SAMPLE_NUMEL = 2**15
_WIDER = 8


class Cut(NamedTuple):
    """So many largest elements: those above `size`, and the first `ties` of those equal to it.

    "First" is by flattened position, as a stable sort from the largest down has it. `size` is the
    bits of a number.
    """

    size: int
    ties: int


_NOTHING = Cut(MAGNITUDE, 0)


def largest(sizes: Sizes, numel: int, counts: Sequence[int]) -> list[Cut]:
    """The cuts that keep the `counts` largest of the rows' `numel` elements, each 0 to `numel`."""
    if not numel:
        return [_NOTHING for _ in counts]
    sampled = [list(rows) for rows in zip(*_copies(sizes, numel), strict=True)]
    searches = [
        _Search(np.sort(np.concatenate(sample)), count, numel)
        for sample, count in zip(sampled, counts, strict=True)
    ]
    while missing := [n for n, search in enumerate(searches) if search.cut is None]:
        for rows in sizes(1):
            for n in missing:
                searches[n].see(rows[n])
        for n in missing:
            searches[n].decide()
    return [search.found for search in searches]


def _copies(sizes: Sizes, numel: int) -> Iterator[list[Bits]]:
    every = max(1, numel // _SAMPLE_NUMEL)
    every += 1 - every % 2  # so that it meets all columns of rows whose width is a power of two
    return ([row.copy() for row in rows] for rows in sizes(every))


class Kept:
    """Masks of a cut, chunk after chunk from the first."""

    def __init__(self, cut: Cut) -> None:
        self._size, self._ties = cut.size, cut.ties

    def mask(self, bits: Bits, out: NDArray[np.bool_]) -> None:
        """Which elements of the next chunk are among the largest."""
        np.greater(bits, self._size, out=out)
        if self._ties:
            equal = bits == self._size
            count = int(np.count_nonzero(equal))
            if count > self._ties:
                equal[np.flatnonzero(equal)[self._ties :]] = False
                count = self._ties
            np.logical_or(out, equal, out=out)
            self._ties -= count


class _Search:
    """The search for one cut: between which bits, `low` to `high`, and what was seen so far."""

    def __init__(self, sample: Bits, count: int, numel: int) -> None:
        self.cut = None if count else _NOTHING
        self._sample, self._count = sample, count
        self._place = int(len(sample) * (1 - count / max(1, numel)))
        self._margin = 3 * isqrt(len(sample))  # six standard deviations or more
        self._floor, self._ceiling = 0, MAGNITUDE
        self._aim()

    @property
    def found(self) -> Cut:
        assert self.cut is not None, "the search is not over"
        return self.cut

    def _aim(self) -> None:
        first, last = self._place - self._margin, self._place + self._margin
        low = int(self._sample[first]) if first >= 0 else self._floor
        high = int(self._sample[last]) if last < len(self._sample) else self._ceiling
        self._low = min(max(low, self._floor), self._ceiling)
        self._high = max(min(high, self._ceiling), self._low)
        self._above_high = self._from_high = self._above_low = self._from_low = 0
        self._between: list[Bits] = []

    def see(self, bits: Bits) -> None:
        """Count the elements of a chunk."""
        above_low, from_high = bits > self._low, bits >= self._high
        self._above_low += int(np.count_nonzero(above_low))
        self._from_high += int(np.count_nonzero(from_high))
        self._from_low += int(np.count_nonzero(bits >= self._low))
        self._above_high += int(np.count_nonzero(bits > self._high))
        self._between.append(bits[above_low > from_high])

    def decide(self) -> None:
        """After all chunks: the cut, or where to look next."""
        count = self._count
        if count <= self._above_high:
            self._floor = self._high + 1
        elif count <= self._from_high:
            self.cut = Cut(self._high, count - self._above_high)
        elif count <= self._above_low:
            self.cut = _cut_of(np.concatenate(self._between), count - self._from_high)
        elif count <= self._from_low:
            self.cut = Cut(self._low, count - self._above_low)
        else:
            self._ceiling = self._low - 1
        self._margin *= _WIDER
        self._aim()


def _cut_of(bits: Bits, count: int) -> Cut:
    ordered = np.sort(bits)  # `partition` takes many times longer where many are equal
    size = int(ordered[len(ordered) - count])
    above = len(ordered) - int(np.searchsorted(ordered, size, side="right"))
    return Cut(size, count - above)
