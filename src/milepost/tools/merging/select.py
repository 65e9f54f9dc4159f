"""Which elements are the largest: exact thresholds from two histograms, in bounded memory.

The bits of non-negative fp32 numbers are ordered as the numbers are, so the upper 16 bits of all
elements are counted first, and then the lower 15 of those that share the upper bits of the one
looked for. Nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from milepost.tools.merging.chunks import parts_of

Sizes = Callable[[slice], Tensor]
_LOW_BITS = 15
_BINS = 2**16


class Cut(NamedTuple):
    """The `count` largest elements: those above `size`, and the first `ties` of those equal to it.

    "First" is by flattened position, as a stable sort from the largest down has it.
    """

    size: float
    ties: int


def largest(sizes: Sizes, numel: int, count: int) -> Cut:
    """The cut that keeps `count` of `numel` elements, 0 < count <= numel.

    `sizes(part)` gives non-negative fp32 elements; it is called for all parts, twice.
    """
    upper = _histogram(sizes, numel, lambda bits: bits >> _LOW_BITS, _BINS)
    top, above = _bin_of(upper, count)
    low = _histogram(
        sizes,
        numel,
        lambda bits: (bits & (2**_LOW_BITS - 1))[bits >> _LOW_BITS == top],
        2**_LOW_BITS,
    )
    bottom, more = _bin_of(low, count - above)
    bits = np.array([top << _LOW_BITS | bottom], dtype=np.int32)
    return Cut(float(bits.view(np.float32)[0]), count - above - more)


class Kept:
    """Masks of a cut, part after part from the first."""

    def __init__(self, cut: Cut) -> None:
        self._size, self._ties = cut.size, cut.ties

    def mask(self, sizes: Tensor) -> Tensor:
        """Which elements of the next part are among the largest."""
        found = sizes > self._size
        if self._ties:
            equal = (sizes == self._size).nonzero().flatten()[: self._ties]
            found[equal] = True
            self._ties -= len(equal)
        return found


def _histogram(
    sizes: Sizes, numel: int, bin_of: Callable[[np.ndarray], np.ndarray], bins: int
) -> np.ndarray:
    found = np.zeros(bins, dtype=np.int64)
    for part in parts_of(numel):
        bits = sizes(part).contiguous().view(torch.int32).numpy()
        found += np.bincount(bin_of(bits), minlength=bins)
    return found


def _bin_of(histogram: np.ndarray, count: int) -> tuple[int, int]:
    """The bin of the `count`-th largest element, and how many lie in higher ones."""
    from_above = np.cumsum(histogram[::-1])
    place = int(np.searchsorted(from_above, count))
    number = len(histogram) - 1 - place
    return number, int(from_above[place] - histogram[number])
