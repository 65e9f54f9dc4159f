"""Axis views against numpy: what a rank holds of a slice, a transpose, one index of a tensor."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.geometry import axis_view
from milepost.geometry.axis_view import (
    NEW_DIM,
    AxisDim,
    AxisKind,
    Fixed,
    find_axis_view,
    local_boxes,
    view_held,
)
from milepost.geometry.placement import IndexSet, Placement, local_shape
from milepost.geometry.strided import StridedCopy, contiguous_strides
from milepost.plan.holding import Holding, PlacementClass
from milepost.plan.view_holding import view_holding
from tests.geometry.test_placement import sharded

Index = tuple[Any, ...]


def slices(length: int) -> st.SearchStrategy[slice]:
    """Slices of a dim with a step of 1 to 3 that take at least one element."""

    def cut(start: int, step: int, count: int) -> slice:
        last = min(count, (length - 1 - start) // step + 1)
        return slice(start, start + step * (last - 1) + 1, step)

    return st.builds(
        cut, st.integers(0, length - 1), st.sampled_from([1, 1, 2, 3]), st.integers(1, length)
    )


@st.composite
def viewed(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], Index, list[int]]:
    """A sharded tensor, and a view: for each dim an index or a slice, and an order of the dims."""
    shape, mesh, placements = draw(sharded(shortest=1))
    index = tuple(
        draw(st.one_of(st.integers(0, n - 1), slices(n), st.just(slice(0, n, 1)))) for n in shape
    )
    kept = [n for n, part in enumerate(index) if isinstance(part, slice)]
    return shape, mesh, placements, index, draw(st.permutations(range(len(kept))))


def copy_of(view: np.ndarray) -> StridedCopy:
    """The view as a copy from the flat tensor of its own element numbers."""
    strides = tuple(stride // view.itemsize for stride in view.strides)
    first = int(view.flat[0])
    shape = tuple(view.shape)
    return StridedCopy(shape, 0, contiguous_strides(shape), first, strides).normalised()


def positions(held: IndexSet) -> list[list[int]]:
    return [[index for span in spans for index in range(*span)] for spans in held]


def taken(array: np.ndarray, held: IndexSet) -> np.ndarray:
    return array[np.ix_(*positions(held))] if held else array


def from_boxes(local: np.ndarray, kind: AxisKind, fixed: Fixed, held: IndexSet) -> np.ndarray:
    """A rank's part of the view, put together from strided views of its local tensor."""
    found = np.full(local_shape(view_held(kind, held)), -1)
    flat = local.reshape(-1)
    strides = contiguous_strides(tuple(local.shape))
    for box in local_boxes(kind, fixed, held):
        start = sum(a * b for a, b in zip(box.starts, strides, strict=True))
        steps = [0 if d.source == NEW_DIM else strides[d.source] * d.step for d in kind.dims]
        part = np.lib.stride_tricks.as_strided(
            flat[start:],
            shape=[end - first for first, end in box.place],
            strides=[step * flat.itemsize for step in steps],
        )
        found[tuple(slice(*span) for span in box.place)] = part
    return found


@given(viewed())
@settings(max_examples=2000, deadline=None)
def test_every_rank_holds_of_a_view_what_the_indices_say_and_all_of_it_has_a_holder(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], Index, list[int]],
) -> None:
    shape, mesh, placements, index, order = case
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    view = np.asarray(numbers[index]).transpose(order)
    found = find_axis_view(copy_of(view), tuple(view.shape), shape)
    assert found is not None
    kind, fixed = found
    assert kind.shape == view.shape
    size = int(np.prod(mesh, dtype=int))
    base = Holding((PlacementClass(mesh, tuple(range(size)), placements),))
    holding = view_holding(base, kind, fixed)
    covered = np.zeros(view.shape, dtype=int)
    for rank in range(size):
        coordinate = base.shard_coordinate(rank)
        assert coordinate is not None
        held = base.held(shape, coordinate)
        local = taken(numbers, held)
        own = holding.shard_coordinate(rank)
        if own is None:
            assert base.is_shared or local_boxes(kind, fixed, held) == []
            assert base.is_shared or not np.isin(view, local).any()
            continue
        of_view = holding.held(kind.shape, own)
        expected = taken(view, of_view)
        assert np.array_equal(from_boxes(local, kind, fixed, held), expected)
        assert np.isin(view, local).sum() == expected.size
        if rank == holding.replicas(own)[0]:
            owned = holding.owned(kind.shape, own)
            if of_view:
                covered[np.ix_(*positions(owned))] += 1
            else:
                covered += 1
    assert (covered == 1).all()
    assert holding.is_complete()


def test_the_shards_of_a_view_with_the_same_rows_are_peers_in_its_own_dims() -> None:
    """A transposed view: what cuts the rows of the source cuts the columns of the view."""
    from milepost.geometry.placement import Shard

    base = Holding((PlacementClass((2, 3), tuple(range(6)), (Shard(1), Shard(2))),))
    plain = AxisKind((4, 8, 9), (AxisDim(1, 0, 1, 8), AxisDim(2, 0, 1, 9)))
    turned = AxisKind((4, 8, 9), (AxisDim(2, 0, 1, 9), AxisDim(1, 0, 1, 8)))
    assert view_holding(base, plain, (1,)).peer_count == 3
    assert view_holding(base, turned, (1,)).peer_count == 2
    holding = view_holding(base, turned, (3,))
    assert holding.held((9, 8), (1, 0)) == (((0, 3),), ((4, 8),))


def test_an_expert_belongs_to_the_ranks_of_its_group_and_is_divided_among_them_alone() -> None:
    from milepost.geometry.placement import Replicate, Shard

    placements = (Shard(0, split_factor=2), Shard(0), Replicate())
    base = Holding((PlacementClass((2, 2, 2), tuple(range(8)), placements),))
    expert = AxisKind((8, 6, 4), (AxisDim(1, 0, 1, 6), AxisDim(2, 0, 1, 4)))
    holders = [list(view_holding(base, expert, (number,)).ranks) for number in range(8)]
    assert holders == [[0, 1]] * 2 + [[4, 5]] * 2 + [[2, 3]] * 2 + [[6, 7]] * 2
    assert view_holding(base, expert, (2,)).replica_count == 2
    assert view_holding(base, expert, (2,)) is view_holding(base, expert, (3,))


@pytest.mark.parametrize(
    ("copy", "shape", "source"),
    [
        (StridedCopy((6,), 0, (1,), 0, (1,)), (6,), (2, 3)),  # two dims joined
        (StridedCopy((2, 2), 0, (2, 1), 0, (1, 4)), (4,), (2, 4)),  # interleaved in the view
        (StridedCopy((4,), 0, (1,), 1, (2,)), (4,), (3, 3)),  # a step that crosses rows
        (StridedCopy((2, 2), 0, (2, 1), 0, (2, 1)), (2, 2), (4,)),  # one dim cut in two
        (StridedCopy((3,), 0, (1,), 0, (1,)), (4,), (4,)),  # not all of the view
    ],
)
def test_what_is_not_even_in_each_dim_is_no_axis_view(
    copy: StridedCopy, shape: tuple[int, ...], source: tuple[int, ...]
) -> None:
    assert find_axis_view(copy, shape, source) is None


def test_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(axis_view).failed == 0
