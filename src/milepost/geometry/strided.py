"""Strided copies: which elements of one tensor are which elements of another, as pure integers.

Both tensors are taken flat, in row-major order. Views, transposes, slices, concatenations and
(de)interleavings are all a few strided copies; so is the part of a tensor that a rank holds.
Copies are composed, so that a chain of operations becomes one step without any data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple

from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet, Spans, local_shape

MAX_STEPS = 4096


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Element `[i, j, ...]` of `shape` is at `to_offset + i * to_strides[0] + j * to_strides[1]
    + ...` in the one flat tensor and likewise in the other; all in elements, no stride negative.
    """

    shape: Shape
    to_offset: int
    to_strides: tuple[int, ...]
    from_offset: int
    from_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether it is one contiguous run on both sides; only of use on a normalised copy."""
        return self.to_strides in ((), (1,)) and self.from_strides == self.to_strides

    def inverse(self) -> StridedCopy:
        """The same elements, with both sides exchanged."""
        return StridedCopy(
            self.shape, self.from_offset, self.from_strides, self.to_offset, self.to_strides
        )

    def normalised(self) -> StridedCopy:
        """The same elements in as few dims as can be, in the order of the `to` side.

        >>> StridedCopy((2, 1, 3), 0, (3, 3, 1), 6, (3, 3, 1)).normalised()
        StridedCopy(shape=(6,), to_offset=0, to_strides=(1,), from_offset=6, from_strides=(1,))
        """
        if 0 in self.shape:
            return StridedCopy((0,), 0, (1,), 0, (1,))
        dims = [
            dim
            for dim in zip(self.shape, self.to_strides, self.from_strides, strict=True)
            if dim[0] != 1
        ]
        dims.sort(key=lambda dim: -dim[1])
        merged: list[tuple[int, int, int]] = []
        for length, to, source in dims:
            if merged and merged[-1][1] == to * length and merged[-1][2] == source * length:
                merged[-1] = (merged[-1][0] * length, to, source)
            else:
                merged.append((length, to, source))
        shape, to_strides, from_strides = zip(*merged, strict=True) if merged else ((), (), ())
        return StridedCopy(shape, self.to_offset, to_strides, self.from_offset, from_strides)


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def whole_copy(shape: Shape) -> StridedCopy:
    """A tensor as a copy of itself, dim by dim."""
    strides = contiguous_strides(shape)
    return StridedCopy(shape, 0, strides, 0, strides)


def local_copies(shape: Shape, held: IndexSet) -> list[StridedCopy]:
    """What a rank holds of a tensor of global `shape`, as copies from its local tensor.

    `to` is the global tensor; one copy for each box of the index set.
    """
    to_strides = contiguous_strides(shape)
    from_strides = contiguous_strides(local_shape(held))
    found = []
    for chosen in product(*map(_placed_spans, held)):
        starts = [start for (start, _), _ in chosen]
        positions = [position for _, position in chosen]
        copy = StridedCopy(
            tuple(end - start for (start, end), _ in chosen),
            sum(map(mul, starts, to_strides)),
            to_strides,
            sum(map(mul, positions, from_strides)),
            from_strides,
        )
        found.append(copy.normalised())
    return found


def _placed_spans(spans: Spans) -> Iterator[tuple[Span, int]]:
    """The spans of one dim, each with its first position in the local tensor."""
    position = 0
    for span in spans:
        yield span, position
        position += span[1] - span[0]


def compose(later: StridedCopy, earlier: StridedCopy) -> list[StridedCopy]:
    """What `earlier` puts where `later` reads, as copies from the source of `earlier`.

    The tensor between them is `from` of `later` and `to` of `earlier`; elements of it that only
    one of them knows are left out. Where `to` of `earlier` is a box of some grid, the dims of a
    result are those of `later`, in their order, some cut in two. `ValueError` for strides so
    irregular that the result would be single elements.

    >>> flipped = StridedCopy((2, 3), 0, (3, 1), 0, (1, 2))  # a (3, 2) tensor, transposed
    >>> compose(StridedCopy((3,), 0, (1,), 3, (1,)), flipped)  # its second row
    [StridedCopy(shape=(3,), to_offset=0, to_strides=(1,), from_offset=1, from_strides=(2,))]
    """
    if 0 in later.shape or 0 in earlier.shape:
        return []
    digits = _digits(earlier)
    if digits is None:
        turned = compose if _digits(later.inverse()) is not None else _one_by_one
        return [copy.inverse() for copy in turned(earlier.inverse(), later.inverse())]
    if len(digits) == 1 and _is_inside(later, digits[0]):
        return [_stepped(later, earlier.from_offset, digits[0])]
    starts = _starts(later.from_offset, digits)
    dims = _factored(later, digits, starts)
    if dims is None:
        return _one_by_one(later, earlier)
    return list(_intersections(later, earlier, dims, digits, starts))


class _Digit(NamedTuple):
    """One dim of the earlier copy's `to` side as a digit of the position: the copy covers the
    values `[low, high)` of `radix` ones (None for the leading digit), each worth `stride`."""

    stride: int
    radix: int | None
    low: int
    high: int
    from_stride: int


class _Dim(NamedTuple):
    """A dim of the later copy that moves one digit by `step` for each of its elements."""

    length: int
    to_stride: int
    digit: int
    step: int


def _is_inside(later: StridedCopy, run: _Digit) -> bool:
    moves = sum(
        (length - 1) * step for length, step in zip(later.shape, later.from_strides, strict=True)
    )
    return run.low <= later.from_offset and later.from_offset + moves < run.high


def _stepped(later: StridedCopy, from_offset: int, run: _Digit) -> StridedCopy:
    """The common case: all of `later` lies in one evenly spaced run."""
    step = run.from_stride
    return StridedCopy(
        later.shape,
        later.to_offset,
        later.to_strides,
        from_offset + (later.from_offset - run.low) * step,
        tuple(stride * step for stride in later.from_strides),
    )


@lru_cache(maxsize=1024)
def _digits(earlier: StridedCopy) -> tuple[_Digit, ...] | None:
    """The digits of a copy whose `to` side is a box of some grid; None for any other."""
    copy = earlier.normalised()
    rest = copy.to_offset
    before: int | None = None
    digits: list[_Digit] = []
    for length, to, source in zip(copy.shape, copy.to_strides, copy.from_strides, strict=True):
        if to == 0 or (before is not None and before % to):
            return None
        low, rest = divmod(rest, to)
        radix = None if before is None else before // to
        if radix is not None and low + length > radix:
            return None
        digits.append(_Digit(to, radix, low, low + length, source))
        before = to
    if before != 1:
        digits.append(_Digit(1, before, rest, rest + 1, 0))
    return tuple(digits)


def _starts(offset: int, digits: Sequence[_Digit]) -> list[int]:
    starts = []
    for digit in digits:
        start, offset = divmod(offset, digit.stride)
        starts.append(start)
    return starts


def _factored(
    later: StridedCopy, digits: Sequence[_Digit], starts: Sequence[int]
) -> list[_Dim] | None:
    """The dims of `later` on the digits, no digit ever carrying into the next; None if one must."""
    dims: list[_Dim] = []
    for length, to, step in zip(later.shape, later.to_strides, later.from_strides, strict=True):
        parts = _placed(length, to, step, digits, starts)
        if parts is None:
            return None
        dims += parts
    for number, digit in enumerate(digits):
        moves = sum(dim.step * (dim.length - 1) for dim in dims if dim.digit == number)
        if digit.radix is not None and starts[number] + moves >= digit.radix:
            return None
    return dims


def _placed(
    length: int, to: int, step: int, digits: Sequence[_Digit], starts: Sequence[int]
) -> list[_Dim] | None:
    last = len(digits) - 1
    if length == 1 or step == 0:
        return [_Dim(length, to, last, 0)]
    number = next(n for n, digit in enumerate(digits) if digit.stride <= step)
    digit = digits[number]
    if step % digit.stride:
        return None
    step //= digit.stride
    start = starts[number]
    if digit.radix is None or start + step * (length - 1) < digit.radix:
        return [_Dim(length, to, number, step)]
    turn = digit.radix // step  # elements until the digit carries
    if digit.radix % step or start >= step or length % turn:
        return None
    outer = _placed(length // turn, to * turn, digits[number - 1].stride, digits, starts)
    return None if outer is None else [*outer, _Dim(turn, to, number, step)]


def _intersections(
    later: StridedCopy,
    earlier: StridedCopy,
    dims: Sequence[_Dim],
    digits: Sequence[_Digit],
    starts: Sequence[int],
) -> Iterator[StridedCopy]:
    on_digit: list[list[int]] = [[] for _ in digits]
    for position, dim in enumerate(dims):
        on_digit[dim.digit].append(position)
    options: list[list[dict[int, Span]]] = []
    for number, digit in enumerate(digits):
        order = sorted(on_digit[number], key=lambda position: -dims[position].step)
        moves = [(dims[position].length, dims[position].step) for position in order]
        boxes = _within(moves, starts[number], digit.low, digit.high)
        options.append([dict(zip(order, box, strict=True)) for box in boxes])
    base = earlier.from_offset + sum(
        (start - digit.low) * digit.from_stride for start, digit in zip(starts, digits, strict=True)
    )
    from_strides = tuple(dim.step * digits[dim.digit].from_stride for dim in dims)
    to_strides = tuple(dim.to_stride for dim in dims)
    for chosen in product(*options):
        spans = {position: span for option in chosen for position, span in option.items()}
        first = [spans[position][0] for position in range(len(dims))]
        yield StridedCopy(
            tuple(spans[position][1] - first[position] for position in range(len(dims))),
            later.to_offset + sum(map(mul, first, to_strides)),
            to_strides,
            base + sum(map(mul, first, from_strides)),
            from_strides,
        )


def _within(
    moves: Sequence[tuple[int, int]], start: int, low: int, high: int
) -> Iterator[tuple[Span, ...]]:
    """Boxes of the dims `(length, step)`, largest step first, where the sum is in `[low, high)`."""
    reach = start + sum(step * (length - 1) for length, step in moves)
    if low <= start and reach < high:
        yield tuple((0, length) for length, _ in moves)
        return
    if reach < low or start >= high:
        return
    (length, step), *rest = moves
    if step == 0:  # all further steps are 0 too, and `start` alone was outside
        return
    inner = reach - start - step * (length - 1)
    first = max(0, -((start + inner - low) // step))  # the first that reaches `low`
    full_first = max(0, -((start - low) // step))  # the first wholly at or above `low`
    full_last = min(length, (high - 1 - inner - start) // step + 1)
    last = min(length, (high - 1 - start) // step + 1)
    whole = tuple((0, count) for count, _ in rest)
    index = first
    while index < last:
        if full_first <= index < full_last:
            yield ((index, full_last), *whole)
            index = full_last
            continue
        for box in _within(rest, start + index * step, low, high):
            yield ((index, index + 1), *box)
        index += 1


def _one_by_one(later: StridedCopy, earlier: StridedCopy) -> list[StridedCopy]:
    """`compose` for each element of one dim of `later`, where no grid fits both."""
    at = max(
        (n for n, length in enumerate(later.shape) if length > 1),
        key=lambda n: later.from_strides[n],
    )
    if later.shape[at] > MAX_STEPS:
        raise ValueError(f"{later} after {earlier}: too irregular to be described in strides")
    lengths = (*later.shape[:at], 1, *later.shape[at + 1 :])
    found = []
    for index in range(later.shape[at]):
        single = StridedCopy(
            lengths,
            later.to_offset + index * later.to_strides[at],
            later.to_strides,
            later.from_offset + index * later.from_strides[at],
            later.from_strides,
        )
        found += compose(single, earlier)
    return found
