"""What an index set holds of a range of bytes of a file, as boxes of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from milepost.geometry.blocks import Shape, Span, blocks_of_range
from milepost.geometry.placement import IndexSet, intersect_spans
from milepost.plan.shares import TensorPlace


class Placed(NamedTuple):
    """A box of bytes: `offset` and `shape` are those of a contiguous range that holds it, `into`
    its place in there, and `source` its place in the local tensor (last dims counted in bytes)."""

    offset: int
    shape: Shape
    into: tuple[Span, ...]
    source: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return prod(end - start for start, end in self.into)


def placed_boxes(place: TensorPlace, held: IndexSet, start: int, end: int) -> Iterator[Placed]:
    """What an index set holds of bytes `[start, end)` of the file, as boxes; `offset` is from
    `start` on."""
    spans = _in_bytes(place, held)
    low, high = start - place.start, end - place.start
    offset = 0
    for box in blocks_of_range(place.byte_shape, low, high, high - low):
        shape = tuple(last - first for first, last in box)
        parts = [intersect_spans((wanted,), own) for wanted, own in zip(box, spans, strict=True)]
        for combination in product(*parts):
            yield Placed(
                offset,
                shape,
                tuple((into, into + length) for into, _, length in combination),
                tuple((source, source + length) for _, source, length in combination),
            )
        offset += prod(shape)


def _in_bytes(place: TensorPlace, held: IndexSet) -> IndexSet:
    if not held:
        return (((0, place.itemsize),),)
    last = tuple((start * place.itemsize, end * place.itemsize) for start, end in held[-1])
    return (*held[:-1], last)
