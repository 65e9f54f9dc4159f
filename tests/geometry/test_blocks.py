"""Boxes of ranges and byte runs of boxes, against plain enumeration of elements."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.geometry.blocks import Shape, Span, blocks_of_range, byte_runs, normalise_spans

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(shapes)
    count = prod(shape)
    start = draw(st.integers(0, count))
    return shape, start, draw(st.integers(start, count))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Shape, tuple[Span, ...]]:
    shape = draw(shapes)
    spans = []
    for length in shape:
        start = draw(st.integers(0, length))
        spans.append((start, draw(st.integers(start, length))))
    return shape, tuple(spans)


def elements(shape: Shape, spans: tuple[Span, ...]) -> list[int]:
    """Row-major numbers of the elements of a box, in order."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    points = product(*(range(start, end) for start, end in spans))
    return [sum(i * stride for i, stride in zip(point, strides, strict=True)) for point in points]


@given(ranges(), st.integers(1, 40))
def test_the_boxes_of_a_range_are_its_elements_in_order(
    case: tuple[Shape, int, int], limit: int
) -> None:
    shape, start, end = case
    found: list[int] = []
    for box in blocks_of_range(shape, start, end, limit):
        inside = elements(shape, box)
        assert len(inside) <= limit
        assert inside == list(range(inside[0], inside[0] + len(inside))), "not contiguous"
        found += inside
    assert found == list(range(start, end))


@given(boxes(), st.sampled_from([1, 2, 4, 8]))
def test_the_byte_runs_of_a_box_are_its_bytes_in_order_and_merged(
    case: tuple[Shape, tuple[Span, ...]], itemsize: int
) -> None:
    shape, spans = case
    runs = list(byte_runs(shape, spans, itemsize))
    found = [byte for start, nbytes in runs for byte in range(start, start + nbytes)]
    assert found == [
        number * itemsize + byte for number in elements(shape, spans) for byte in range(itemsize)
    ]
    assert all(nbytes > 0 for _, nbytes in runs)
    trailing = len(shape)
    while trailing and spans[trailing - 1] == (0, shape[trailing - 1]):
        trailing -= 1
    rows = prod(end - start for start, end in spans[: max(0, trailing - 1)])
    assert len(runs) <= rows, "dims that are covered whole did not merge"


def test_a_tensor_of_a_billion_rows_is_cut_without_listing_them() -> None:
    first = next(blocks_of_range((10**9, 7), 3, 7 * 10**9, 10**6))
    assert first == ((0, 1), (3, 7))
    assert next(byte_runs((10**9, 7), ((5, 10**9), (0, 7)), 4)) == (140, 4 * 7 * (10**9 - 5))


@given(boxes(), st.data())
def test_slices_resolve_as_python_resolves_them(
    case: tuple[Shape, tuple[Span, ...]], data: st.DataObject
) -> None:
    shape, _ = case
    bound = st.none() | st.integers(-7, 7)
    index = [slice(data.draw(bound), data.draw(bound)) for _ in shape]
    spans = normalise_spans(shape, index)
    for length, part, (start, end) in zip(shape, index, spans, strict=True):
        assert list(range(length))[part] == list(range(start, end))


def test_dims_without_a_slice_are_covered_whole() -> None:
    assert normalise_spans((4, 5, 6), [slice(1, 2)]) == ((1, 2), (0, 5), (0, 6))


def test_more_slices_than_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="2 slices for a tensor of 1 dims"):
        normalise_spans((4,), [slice(None), slice(None)])


@pytest.mark.parametrize("step", [2, -1])
def test_a_step_other_than_one_is_refused_by_dim(step: int) -> None:
    with pytest.raises(ValueError, match="of dim 1: the step must be 1"):
        normalise_spans((4, 4), [slice(None), slice(None, None, step)])
