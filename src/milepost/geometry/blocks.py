"""Row-major arithmetic on boxes: which elements of a tensor a range or a slice covers.

Pure integer code. A *span* is a half-open interval along one dim; offsets and counts are in
elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[int, int]


def blocks_of_range(shape: Shape, start: int, end: int, limit: int) -> Iterator[tuple[Span, ...]]:
    """Cut the row-major element range `[start, end)` into boxes of at most `limit` elements.

    Each box is contiguous in row-major order, boxes follow each other without a gap, and together
    they are exactly the range.

    >>> list(blocks_of_range((2, 3), 1, 6, 100))
    [((0, 1), (1, 3)), ((1, 2), (0, 3))]
    """
    if not shape:
        if start < end:
            yield ()
        return
    inner = prod(shape[1:])
    while start < end:
        row, rest = divmod(start, inner)
        if rest == 0 and end - start >= inner and inner <= limit:
            rows = min((end - start) // inner, max(1, limit // inner))
            yield ((row, row + rows), *((0, length) for length in shape[1:]))
            start += rows * inner
            continue
        stop = min(end, (row + 1) * inner)
        for box in blocks_of_range(shape[1:], rest, stop - row * inner, limit):
            yield ((row, row + 1), *box)
        start = stop


def byte_runs(shape: Shape, spans: Sequence[Span], itemsize: int) -> Iterator[tuple[int, int]]:
    """Byte ranges `(start, nbytes)` of the box `spans` inside a contiguous tensor, in order.

    Dims that are covered whole at the end of the shape are merged into one run.

    >>> list(byte_runs((4, 3), ((1, 3), (0, 3)), 2))
    [(6, 12)]
    >>> list(byte_runs((2, 4), ((0, 2), (1, 3)), 1))
    [(1, 2), (5, 2)]
    """
    if any(start >= end for start, end in spans):
        return
    depth = len(shape)
    while depth > 0 and spans[depth - 1] == (0, shape[depth - 1]):
        depth -= 1
    inner = prod(shape[depth:]) * itemsize
    if depth == 0:
        yield 0, inner
        return
    strides = [inner * prod(shape[dim + 1 : depth]) for dim in range(depth)]
    start, end = spans[depth - 1]
    for base in _row_starts(spans[: depth - 1], strides[: depth - 1]):
        yield base + start * inner, (end - start) * inner


def _row_starts(spans: Sequence[Span], strides: Sequence[int]) -> Iterator[int]:
    if not spans:
        yield 0
        return
    (start, end), *rest = spans
    for index in range(start, end):
        for inner in _row_starts(rest, strides[1:]):
            yield index * strides[0] + inner


def normalise_spans(shape: Shape, index: Sequence[slice]) -> tuple[Span, ...]:
    """Spans of `tensor[index]`, with negative and open ends resolved as Python does.

    `ValueError` for more slices than dims, or a step other than 1.
    """
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for a tensor of {len(shape)} dims")
    spans = []
    for dim, length in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        start, end, step = part.indices(length)
        if step != 1:
            raise ValueError(f"slice {part} of dim {dim}: the step must be 1")
        spans.append((start, max(start, end)))
    return tuple(spans)
