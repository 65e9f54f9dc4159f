"""Strided copies against the plainest possible oracle: every single element."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.geometry import strided
from milepost.geometry.placement import Shard, index_set, local_shape
from milepost.geometry.strided import (
    MAX_STEPS,
    StridedCopy,
    compose,
    contiguous_strides,
    local_copies,
    whole_copy,
)

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def elements(copy: StridedCopy) -> list[tuple[int, int]]:
    """(to, from) of each element."""
    found = []
    for index in itertools.product(*map(range, copy.shape)):
        to = sum(i * s for i, s in zip(index, copy.to_strides, strict=True))
        source = sum(i * s for i, s in zip(index, copy.from_strides, strict=True))
        found.append((copy.to_offset + to, copy.from_offset + source))
    return found


@st.composite
def box_copies(draw: Any) -> StridedCopy:
    """A box of a grid, filled from strides that a transposed or sliced tensor has."""
    grid = draw(shapes)
    ends = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(1, n)))) for n in grid]
    spans = [(a, max(b, a + 1)) for a, b in ends]
    order = draw(st.permutations(range(len(grid))))
    lengths = tuple(b - a for a, b in spans)
    source = [0] * len(grid)
    step = draw(st.integers(1, 2))
    for dim in order:
        source[dim], step = step, step * lengths[dim]
    strides = contiguous_strides(grid)
    start = sum(a * s for (a, _), s in zip(spans, strides, strict=True))
    return StridedCopy(lengths, start, strides, draw(st.integers(0, 5)), tuple(source))


@st.composite
def any_copies(draw: Any) -> StridedCopy:
    """Row-major on the `to` side; any strides at all on the other."""
    shape = draw(shapes)
    strides = tuple(draw(st.integers(0, 9)) for _ in shape)
    return StridedCopy(shape, 0, contiguous_strides(shape), draw(st.integers(0, 9)), strides)


def views() -> st.SearchStrategy[StridedCopy]:
    """What indexing and reshaping give: boxes of a grid, read in another order of dims."""
    return box_copies().map(StridedCopy.inverse)


def expected(later: StridedCopy, earlier: StridedCopy) -> Counter[tuple[int, int]]:
    known = dict(elements(earlier))
    return Counter((to, known[at]) for to, at in elements(later) if at in known)


def composed(later: StridedCopy, earlier: StridedCopy) -> Counter[tuple[int, int]]:
    return Counter(pair for copy in compose(later, earlier) for pair in elements(copy))


@given(any_copies(), box_copies())
def test_composing_is_following_each_element_through_both(
    later: StridedCopy, earlier: StridedCopy
) -> None:
    assert composed(later, earlier) == expected(later, earlier)


@given(views(), box_copies())
def test_a_view_of_a_copy_takes_its_elements_from_where_the_copy_had_them(
    later: StridedCopy, earlier: StridedCopy
) -> None:
    assert composed(later, earlier) == expected(later, earlier)


@given(box_copies(), views())
def test_neither_side_needs_to_be_a_box(later: StridedCopy, earlier: StridedCopy) -> None:
    if len({to for to, _ in elements(earlier)}) == earlier.numel:
        assert composed(later, earlier) == expected(later, earlier)


@given(any_copies())
def test_normalising_keeps_every_element(copy: StridedCopy) -> None:
    assert sorted(elements(copy.normalised())) == sorted(elements(copy))


def test_a_contiguous_tensor_is_one_run() -> None:
    run = whole_copy((3, 1, 4)).normalised()
    assert run == StridedCopy((12,), 0, (1,), 0, (1,))
    assert run.is_run
    assert whole_copy(()).normalised().is_run


def test_deinterleaving_needs_one_copy_for_each_half() -> None:
    """Rows g0 u0 g1 u1 become g0 g1 and u0 u1."""
    halves = [StridedCopy((2, 3), 0, (3, 1), offset, (6, 1)) for offset in (0, 3)]
    interleaved = whole_copy((4, 3)).normalised()
    assert [compose(half, interleaved) for half in halves] == [[half] for half in halves]


def test_a_flattened_transpose_is_cut_into_its_two_dims() -> None:
    flat = StridedCopy((6,), 0, (1,), 0, (1,))
    transposed = StridedCopy((2, 3), 0, (3, 1), 0, (1, 2))
    assert compose(flat, transposed) == [StridedCopy((2, 3), 0, (3, 1), 0, (1, 2))]


def test_what_only_single_elements_could_describe_is_refused() -> None:
    numel = 3 * (MAX_STEPS + 1)
    thirds = StridedCopy((numel // 3,), 0, (1,), 0, (3,))
    pairs = StridedCopy((numel // 2, 2), 0, (2, 1), 0, (1, numel))
    with pytest.raises(ValueError, match="too irregular"):
        compose(thirds, pairs)


@given(shapes, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=2), st.data())
def test_local_copies_put_each_local_element_at_its_global_place(
    shape: tuple[int, ...], cuts: list[tuple[int, int]], data: Any
) -> None:
    placements = [Shard(dim, factor) for dim, factor in cuts if dim < len(shape)]
    mesh = [2] * len(placements)
    coordinate = [data.draw(st.integers(0, 1)) for _ in mesh]
    held = index_set(shape, mesh, coordinate, placements)
    found = sorted(pair for copy in local_copies(shape, held) for pair in elements(copy))
    indices = [[i for a, b in spans for i in range(a, b)] for spans in held]
    strides, local = contiguous_strides(shape), contiguous_strides(local_shape(held))
    wanted = []
    for places in itertools.product(*(range(len(dim)) for dim in indices)):
        to = sum(indices[d][p] * strides[d] for d, p in enumerate(places))
        wanted.append((to, sum(p * local[d] for d, p in enumerate(places))))
    assert found == sorted(wanted)


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(strided).failed == 0
