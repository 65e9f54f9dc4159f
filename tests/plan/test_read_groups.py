"""Groups of ranks that share reading: every row is read once, and everybody gets what it wants."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.geometry.blocks import Shape
from milepost.geometry.placement import (
    IndexSet,
    Placement,
    Replicate,
    Shard,
    coordinate_of,
    index_set,
    numel,
    span_length,
    whole,
)
from milepost.plan.read_groups import SMALL_NBYTES, ReadGroup, Want, read_groups

ITEM = SMALL_NBYTES  # one element is enough to be worth sharing


@st.composite
def held_everywhere(draw: st.DrawFn) -> tuple[Shape, list[IndexSet]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: prod(m) < 17))
    dims = st.integers(0, len(shape) - 1)
    shards = st.builds(Shard, dims, st.sampled_from([1, 1, 2, 3]))
    one: st.SearchStrategy[Placement] = st.one_of(st.just(Replicate()), shards)
    placements = [draw(one) for _ in mesh]
    ranks = range(prod(mesh))
    return shape, [index_set(shape, mesh, coordinate_of(r, mesh), placements) for r in ranks]


@given(held_everywhere())
def test_a_group_reads_each_of_its_rows_once_and_its_ranks_want_these_rows(
    case: tuple[Shape, list[IndexSet]],
) -> None:
    shape, held = case
    groups = read_groups([[Want("w", shape, ITEM, own)] for own in held])
    seen: set[int] = set()
    for group in groups:
        assert not seen & set(group.ranks)
        seen.update(group.ranks)
        assert len(group.ranks) > 1
        for rank, columns in zip(group.ranks, group.columns, strict=True):
            assert held[rank] == (group.rows, *columns)
        spans = sorted(span for step in group.steps() for span in step if span[0] < span[1])
        assert spans[0][0] == 0
        assert spans[-1][1] == span_length(group.rows)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert sum(numel(c) for c in set(group.columns)) == prod(shape[1:])


@given(held_everywhere())
def test_whoever_is_in_no_group_shares_its_rows_with_nobody_or_not_all_columns_are_wanted(
    case: tuple[Shape, list[IndexSet]],
) -> None:
    shape, held = case
    groups = read_groups([[Want("w", shape, ITEM, own)] for own in held])
    grouped = {rank for group in groups for rank in group.ranks}
    for rank, own in enumerate(held):
        if rank in grouped or numel(own) == 0:
            continue
        alike = [other for other in held if other[0] == own[0] and numel(other)]
        columns = {other[1:] for other in alike}
        assert len(alike) == 1 or sum(map(numel, columns)) != prod(shape[1:])


def test_small_tensors_scalars_and_nothing_are_read_by_everybody() -> None:
    big = (SMALL_NBYTES // 2,)
    wants = [
        [
            Want("small", (100,), 2, whole((100,))),
            Want("scalar", (), 8, ()),
            Want("empty", (0, 4), ITEM, whole((0, 4))),
            Want("big", big, 2, whole(big)),
        ]
    ] * 2
    assert [group.key for group in read_groups(wants)] == ["big"]


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_what_a_group_has_in_flight_is_bounded(ranks: int) -> None:
    shape = (100_000, 4096)
    group = ReadGroup("w", shape, 2, ((0, shape[0]),), tuple(range(ranks)), ())
    in_flight = group.block_rows() * group.row_nbytes * ranks
    assert in_flight <= max(8 * 2**20, ranks * 64 * 1024)
    assert group.block_rows() * group.row_nbytes <= 4 * 2**20
