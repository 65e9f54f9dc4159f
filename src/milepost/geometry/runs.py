"""Arrays that have one entry for every run of consecutive elements of a tensor.

Block-quantised state keeps a scale for every block of, say, 256 elements in row-major order. Where
a shard is cut so that its own blocks are blocks of the whole tensor, its scales are a shard of one
global array, whose shape depends on nothing but the tensor's shape and the length of a run.
"""

from __future__ import annotations

from math import prod

from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet, Spans, numel, span_length


def runs_shape(shape: Shape, run: int) -> Shape:
    """Shape of the array with an entry for every run of `run` elements of a tensor of `shape`.

    It has the dims of the tensor where runs end with its rows, else one dim.

    >>> runs_shape((4, 512), 256), runs_shape((4, 64), 128)
    ((4, 2), (2,))
    """
    if shape and shape[-1] % run == 0:
        return (*shape[:-1], shape[-1] // run)
    return (-(-prod(shape) // run),)


def runs_held(shape: Shape, run: int, held: IndexSet) -> IndexSet | None:
    """The entries of the array for the runs of a shard, in the shard's order.

    None when the shard's runs, counted from its own first element, are not runs of the whole.

    >>> runs_held((4, 512), 256, (((0, 4),), ((256, 512),)))
    (((0, 4),), ((1, 2),))
    >>> runs_held((4, 64), 128, (((2, 4),), ((0, 64),)))
    (((1, 2),),)
    >>> runs_held((4, 64), 128, (((1, 3),), ((0, 64),)))
    """
    if numel(held) == 0:
        return tuple(() for _ in runs_shape(shape, run))
    if shape[-1] % run == 0:
        spans = held[-1]
        if any(start % run or end % run for start, end in spans):
            return None
        return (*held[:-1], tuple((start // run, end // run) for start, end in spans))
    found = _flat_range(shape, held)
    if found is None or found[0] % run or (found[1] % run and found[1] != prod(shape)):
        return None
    return (((found[0] // run, -(-found[1] // run)),),)


def _flat_range(shape: Shape, held: IndexSet) -> Span | None:
    """The row-major range of elements that the index set is; None when it is not one range."""
    depth = len(shape)
    while depth > 1 and _is_whole(held[depth - 1], shape[depth - 1]):
        depth -= 1
    outer, cut = held[: depth - 1], held[depth - 1]
    if len(cut) != 1 or any(span_length(spans) != 1 for spans in outer):
        return None
    start = 0
    for spans, length in zip(outer, shape, strict=False):
        start = start * length + spans[0][0]
    inner = prod(shape[depth:])
    base = start * shape[depth - 1]
    return (base + cut[0][0]) * inner, (base + cut[0][1]) * inner


def _is_whole(spans: Spans, length: int) -> bool:
    return spans == ((0, length),)
