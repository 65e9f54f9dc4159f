"""Which part of a global tensor a rank holds: placements on a mesh as exact index sets.

A shard is an index set, not a rectangle: per dim a list of spans in local order. A packed weight
under tensor parallelism, or a strided shard of FSDP2 over TP, holds several disjoint spans of one
dim. The arithmetic is that of `torch.chunk`, walked over the placements from left to right, and is
exact for every placement that splits: uneven, empty, nested, strided and packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from milepost.geometry.blocks import Shape, Span

Spans: TypeAlias = tuple[Span, ...]
"""Disjoint half-open intervals of one dim, in the order in which the local tensor holds them."""

IndexSet: TypeAlias = tuple[Spans, ...]
"""Spans for each dim; the shard is their product."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank of the mesh axis."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is cut over the mesh axis by the rule of `torch.chunk`.

    With `split_factor` above 1 the dim is first cut into that many virtual chunks and each is cut
    over the axis: torch's `_StridedShard`. With `padded_length` above its length the dim is cut as
    if it had that many elements; those past its end are held by nobody.
    """

    dim: int
    split_factor: int = 1
    padded_length: int = 0


@dataclass(frozen=True, slots=True)
class PackedShard:
    """Dim `dim` is blocks of the lengths `sizes`, one after the other, each cut by itself.

    For a fused projection whose blocks differ in length, such as query, key and value with fewer
    key and value heads: a rank holds its chunk of each block, by the rule of `torch.chunk`, in the
    order of the blocks. `sizes` are those of the global tensor and add up to its dim.

    `replicas` gives for each block the number of neighbouring ranks of the mesh axis that hold the
    same chunk: with 2 key heads on 8 ranks it is 4, where a block of as many heads as ranks has 1.
    It divides the length of the axis. Such a chunk is saved once, by the first of its ranks, and
    each of them loads it.
    """

    dim: int
    sizes: tuple[int, ...]
    replicas: tuple[int, ...] = ()


AnyShard: TypeAlias = Shard | PackedShard
Placement: TypeAlias = Replicate | AnyShard


def chunk(length: int, count: int, index: int) -> Span:
    """Chunk `index` of `count` of `[0, length)`, as `torch.chunk` cuts; empty past the end.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // count)
    return min(length, size * index), min(length, size * (index + 1))


def whole(shape: Shape) -> IndexSet:
    """The index set of a rank that holds everything."""
    return tuple(((0, length),) if length else () for length in shape)


def index_set(
    shape: Shape,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> IndexSet:
    """What the rank at `coordinate` of the mesh holds of a tensor of global `shape`.

    >>> index_set((8, 2), (2,), (1,), (Shard(0, split_factor=2),))
    (((2, 4), (6, 8)), ((0, 2),))
    >>> index_set((65, 2), (2,), (1,), (Shard(0, padded_length=128),))
    (((64, 65),), ((0, 2),))
    >>> index_set((12, 2), (2,), (1,), (PackedShard(0, sizes=(8, 2, 2)),))
    (((4, 8), (9, 10), (11, 12)), ((0, 2),))
    """
    spans = list(whole(shape))
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, AnyShard):
            dim = placement.dim
            spans[dim] = _cut(spans[dim], placement, count, index)
    return tuple(spans)


@lru_cache(maxsize=16384)  # ranks that differ on other axes alone are cut alike
def _cut(spans: Spans, placement: AnyShard, count: int, index: int) -> Spans:
    found: list[Span] = []
    for start, end in _positions_held(placement, span_length(spans), count, index):
        for span in between(spans, start, end):
            _append(found, span)
    return tuple(found)


def _positions_held(placement: AnyShard, length: int, count: int, index: int) -> Iterator[Span]:
    if isinstance(placement, PackedShard):
        yield from (span for span, _ in _block_chunks(placement, count, index))
        return
    length = max(length, placement.padded_length)
    for number in range(placement.split_factor):
        first, last = chunk(length, placement.split_factor, number)
        start, end = chunk(last - first, count, index)
        yield first + start, first + end


def _block_chunks(packed: PackedShard, count: int, index: int) -> Iterator[tuple[Span, bool]]:
    """The chunk of each block at `index` of `count` ranks, and whether it is its first holder."""
    start = 0
    for size, shared in zip(packed.sizes, packed.replicas or (1,) * len(packed.sizes), strict=True):
        first, last = chunk(size, count // shared, index // shared)
        yield (start + first, start + last), index % shared == 0
        start += size


def owned_set(
    shape: Shape,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> IndexSet:
    """The part of `index_set` that no rank before it on an axis holds too.

    Over all coordinates of the axes that cut, these are every element once.

    >>> heads = PackedShard(0, sizes=(8, 2), replicas=(1, 2))
    >>> owned_set((10, 2), (2,), (1,), (heads,))
    (((4, 8),), ((0, 2),))
    """
    spans = list(index_set(shape, mesh_shape, coordinate, placements))
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, PackedShard) and placement.replicas:
            chunks = _block_chunks(placement, count, index)
            own = [span for span, is_first in chunks if is_first]
            spans[placement.dim] = _common(spans[placement.dim], own)
    return tuple(spans)


def _common(spans: Spans, own: Sequence[Span]) -> Spans:
    found: list[Span] = []
    for start, end in spans:
        for low, high in own:
            if max(start, low) < min(end, high):
                _append(found, (max(start, low), min(end, high)))
    return tuple(found)


def hide(held: IndexSet, owned: IndexSet, shape: Shape) -> IndexSet:
    """`held` with all that is not `owned` past the end of its dim, where no range meets it.

    It keeps its room there, so that what is owned has its own place in the local tensor.

    >>> hide((((4, 8), (8, 10)),), (((8, 10),),), (10,))
    (((14, 18), (8, 10)),)
    """
    return tuple(
        spans if spans == own else _hidden(spans, own, length)
        for spans, own, length in zip(held, owned, shape, strict=True)
    )


def _hidden(spans: Spans, own: Spans, length: int) -> Spans:
    found: list[Span] = []
    for start, end in spans:
        for low, high in _common(((start, end),), own):
            if start < low:
                found.append((length + start, length + low))
            found.append((low, high))
            start = high
        if start < end:
            found.append((length + start, length + end))
    return tuple(found)


def between(spans: Spans, start: int, end: int) -> list[Span]:
    """The part of `spans` whose local positions are `[start, end)`."""
    found: list[Span] = []
    position = 0
    for first, last in spans:
        low, high = max(start - position, 0), min(end - position, last - first)
        if low < high:
            _append(found, (first + low, first + high))
        position += last - first
    return found


def _append(spans: list[Span], span: Span) -> None:
    if spans and spans[-1][1] == span[0]:
        spans[-1] = (spans[-1][0], span[1])
    else:
        spans.append(span)


def span_length(spans: Spans) -> int:
    """Elements that the spans of one dim cover."""
    return sum(end - start for start, end in spans)


def local_shape(held: IndexSet) -> Shape:
    """Shape of the local tensor that holds an index set."""
    return tuple(span_length(spans) for spans in held)


def numel(held: IndexSet) -> int:
    """Elements of an index set."""
    return prod(local_shape(held))


def intersect_spans(first: Spans, second: Spans) -> list[tuple[int, int, int]]:
    """Common parts of two span lists as (position in first, position in second, length).

    Positions are local: elements before it in that list. The result is in the order of `first`.

    >>> intersect_spans(((0, 4), (8, 12)), ((2, 10),))
    [(2, 0, 2), (4, 6, 2)]
    """
    found = []
    ordered = sorted(zip(_positions(second), second, strict=True), key=lambda item: item[1])
    for position, (start, end) in zip(_positions(first), first, strict=True):
        for other, (low, high) in ordered:
            if high <= start:
                continue
            if low >= end:
                break
            a, b = max(start, low), min(end, high)
            found.append((position + a - start, other + a - low, b - a))
    return found


def _positions(spans: Spans) -> list[int]:
    positions, total = [], 0
    for start, end in spans:
        positions.append(total)
        total += end - start
    return positions


def coordinate_of(position: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Coordinate of the `position`-th rank of a mesh, in row-major order."""
    coordinate = []
    for length in reversed(mesh_shape):
        position, index = divmod(position, length)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def boxes_of(held: IndexSet) -> Iterator[tuple[tuple[Span, ...], tuple[Span, ...]]]:
    """The index set as boxes, each with its place in the local tensor."""
    dims = []
    for spans in held:
        position, placed = 0, []
        for start, end in spans:
            placed.append(((start, end), (position, position + end - start)))
            position += end - start
        dims.append(placed)
    for combination in product(*dims):
        yield tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination)
