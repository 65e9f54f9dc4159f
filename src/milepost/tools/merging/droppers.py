"""What is kept of one model's differences: the largest, all but the extremes, or some by chance.

What is random is drawn for every tensor and model from a seed of its own, so that a merge can be
repeated and does not depend on the order of tensors, threads or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from milepost.errors import InvalidInputError
from milepost.tools.merging.chunks import Inputs, room
from milepost.tools.merging.select import MAGNITUDE, Bits, Cut, Kept

Packed: TypeAlias = NDArray[np.uint8]
"""A bit an element, 1 for what is kept, from the highest bit of each byte on; the bits of the last
byte that no element has may be anything."""

Mask: TypeAlias = Callable[[NDArray[np.float32]], Packed]
"""Which values of the next chunk are kept; called with all chunks in order, of which only the last
may have a number of elements that 8 does not divide if rows are of one element."""


class Dropper(Protocol):
    """One way to choose."""

    def row_numel(self, shape: torch.Size) -> int:
        """Elements that must be seen together; chunks are multiples of it."""
        ...

    def counts(self, numel: int) -> Sequence[int]:
        """For which numbers of largest elements it needs the cuts."""
        ...

    def masks(self, inputs: Inputs, number: int, cuts: Sequence[Cut]) -> Mask:
        """Begin with the first chunk of the model `number`."""
        ...


def sizes_of(values: NDArray[np.float32], out: Bits | None = None) -> Bits:
    """Absolute values as integers of the same order, in `out` or in memory of this thread."""
    if out is None:
        out = room("sizes", *values.shape, dtype=torch.int32).numpy()
    return np.bitwise_and(values.view(np.int32), np.int32(MAGNITUDE), out=out)


def keep_all(values: NDArray[np.float32]) -> Packed:
    """The mask of what drops nothing."""
    return np.full(-(-len(values) // 8), 255, dtype=np.uint8)


def _flags(use: str, values: NDArray[np.float32]) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = room(use, len(values), dtype=torch.bool).numpy()
    return flags


class _BySize:
    def row_numel(self, shape: torch.Size) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class KeepLargest(_BySize):
    """The `max(1, floor(density n))` largest by magnitude, none at a density of 0 (TIES)."""

    density: float

    def counts(self, numel: int) -> Sequence[int]:
        return [min(numel, max(1, int(self.density * numel))) if self.density > 0 else 0]

    def masks(self, inputs: Inputs, number: int, cuts: Sequence[Cut]) -> Mask:
        kept = Kept(cuts[0])

        def mask(values: NDArray[np.float32]) -> Packed:
            flags = _flags("kept", values)
            kept.mask(sizes_of(values), flags)
            return np.packbits(flags)

        return mask


@dataclass(frozen=True, slots=True)
class KeepMiddle(_BySize):
    """All but the `floor(gamma n)` largest and the smallest, so that `floor(density n)` remain.

    (Breadcrumbs.) Fewer of the largest are dropped when there would not be enough left.
    """

    density: float
    gamma: float

    def counts(self, numel: int) -> Sequence[int]:
        wanted = int(self.density * numel)
        top = numel - wanted - max(0, numel - wanted - int(self.gamma * numel))
        return [top, top + wanted]

    def masks(self, inputs: Inputs, number: int, cuts: Sequence[Cut]) -> Mask:
        inner, outer = (Kept(cut) for cut in cuts)

        def mask(values: NDArray[np.float32]) -> Packed:
            sizes, top, flags = sizes_of(values), _flags("top", values), _flags("kept", values)
            inner.mask(sizes, top)
            outer.mask(sizes, flags)
            return np.packbits(np.greater(flags, top, out=flags))

        return mask


@dataclass(frozen=True, slots=True)
class KeepRandom:
    """Each with probability `density` (DARE)."""

    density: float
    seed: int

    def row_numel(self, shape: torch.Size) -> int:
        return 1

    def counts(self, numel: int) -> Sequence[int]:
        return []

    def masks(self, inputs: Inputs, number: int, cuts: Sequence[Cut]) -> Mask:
        tosses = _Tosses(_Draws(self.seed, inputs.key, number), self.density)
        return lambda values: tosses.take(len(values))


@dataclass(frozen=True, slots=True)
class KeepByRank:
    """Each with a probability from `density - epsilon` for the smallest of its row to
    `density + epsilon` for the largest (DELLA). Equal elements are ranked by column."""

    density: float
    epsilon: float
    seed: int

    def __post_init__(self) -> None:
        density, epsilon = self.density, self.epsilon
        if density + epsilon >= 1 or density - epsilon <= 0:
            raise InvalidInputError(
                f"density {density} with epsilon {epsilon}: expected both density - epsilon and "
                "density + epsilon between 0 and 1"
            )

    def row_numel(self, shape: torch.Size) -> int:
        return max(1, shape[1:].numel() if len(shape) > 1 else shape.numel())

    def counts(self, numel: int) -> Sequence[int]:
        return []

    def masks(self, inputs: Inputs, number: int, cuts: Sequence[Cut]) -> Mask:
        width = self.row_numel(inputs.shape)
        draws = _Draws(self.seed, inputs.key, number)
        ranks = np.arange(width) / max(1, width - 1)
        limits = draws.limits(self.density - self.epsilon + 2 * self.epsilon * ranks)

        def mask(values: NDArray[np.float32]) -> Packed:
            count = len(values)
            order = _order(sizes_of(values), width)
            chosen = draws.take(count).reshape(-1, width) < limits
            flags = _flags("kept", values)
            found = torch.from_numpy(flags)
            found.scatter_(0, torch.from_numpy(order), torch.from_numpy(chosen.reshape(-1)))
            return np.packbits(flags)

        return mask


def _order(sizes: Bits, width: int) -> NDArray[np.int64]:
    """The places of all elements, those of each row by size from the smallest up.

    Size and place are sorted as one number, which is several times faster than sorting places by
    size.
    """
    keys = room("keys", len(sizes), dtype=torch.int64).numpy()
    np.left_shift(sizes, 32, out=keys, dtype=np.int64)
    rows = keys.reshape(-1, width)
    rows |= np.arange(width)
    rows.sort(axis=1)
    rows &= 2**32 - 1
    rows += np.arange(0, len(sizes), width)[:, None]
    return keys


class _Draws:
    """Random numbers of 16 bits in a row, whatever the lengths in which they are taken."""

    def __init__(self, seed: int, key: str, number: int) -> None:
        mixed = xxhash.xxh64_intdigest(f"{seed}/{number}/{key}".encode())
        self._source = np.random.Generator(np.random.SFC64(mixed))
        self._shift = int(self.words(1)[0]) / 2**64
        self._left = np.empty(0, dtype=np.uint16)

    def limits(self, chances: NDArray[np.float64]) -> NDArray[np.uint16]:
        """A draw is below the limit with this chance: the limit's 16 bits are rounded by chance."""
        limits = np.floor(chances * 2**16 + self._shift)
        return np.minimum(limits, 2**16 - 1).astype(np.uint16)

    def take(self, count: int) -> NDArray[np.uint16]:
        """The next `count` numbers."""
        words = -(-max(0, count - len(self._left)) // 4)
        drawn = self.words(words).view(np.uint16)
        if len(self._left):
            drawn = np.concatenate([self._left, drawn])
        self._left = drawn[count:]
        return drawn[:count]

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` times 64 bits, where no numbers are left of those taken.

        `random_raw` would take the lock of the interpreter anew for every word.
        """
        return self._source.integers(0, 2**64, count, dtype=np.uint64)


_TOSSED_WORDS = 2**12  # a chunk's worth: threads wait for each other between operations


class _Tosses:
    """Tosses of a coin in a row, whatever the multiples of 8 in which they are taken.

    As many random bits make one as the chance of heads has binary digits, 16 at most: from the
    last digit on, `or` with a random bit where the digit is 1 and `and` where it is 0 halves the
    chance so far and puts the digit in front. 64 tosses are made at a time by whole words.
    """

    def __init__(self, draws: _Draws, chance: float) -> None:
        (limit,) = draws.limits(np.array([chance]))
        digits = f"{limit:016b}".rstrip("0")
        self._draws = draws
        self._joins = [np.bitwise_or if d == "1" else np.bitwise_and for d in reversed(digits)]
        self._left = np.empty(0, dtype=np.uint8)

    def take(self, count: int) -> Packed:
        """The next `count` tosses, 1 for heads."""
        nbytes, taken = -(-count // 8), []
        while nbytes:
            if not len(self._left):
                self._left = self._toss().view(np.uint8)
            taken.append(self._left[:nbytes])
            nbytes -= len(taken[-1])
            self._left = self._left[len(taken[-1]) :]
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _toss(self) -> NDArray[np.uint64]:
        heads = np.zeros(_TOSSED_WORDS, dtype=np.uint64)
        drawn = self._draws.words(len(self._joins) * _TOSSED_WORDS)
        for join, words in zip(self._joins, drawn.reshape(-1, _TOSSED_WORDS), strict=True):
            join(heads, words, out=heads)
        return heads
