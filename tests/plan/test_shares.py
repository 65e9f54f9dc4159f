"""Every byte of a tensor has one writer, and the writer gets every byte it writes."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.geometry.placement import Placement, Replicate, Shard, local_shape
from milepost.plan import shares
from milepost.plan.holding import Holding, PlacementClass, group_holdings
from milepost.plan.shares import (
    TensorPlace,
    column_boxes,
    file_runs,
    share_at,
    share_of,
)


@st.composite
def held_tensors(draw: st.DrawFn) -> tuple[TensorPlace, list[PlacementClass], int]:
    """A tensor and its classes: one mesh, or the same placements on several disjoint meshes."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    dims = st.integers(0, max(0, len(shape) - 1))
    cut = st.builds(Shard, dims, st.sampled_from([1, 1, 2]))
    options = st.one_of(st.just(Replicate()), cut) if shape else st.just(Replicate())
    placements: tuple[Placement, ...] = tuple(draw(options) for _ in mesh)
    copies = draw(st.integers(1, 2))
    order = draw(st.permutations(range(prod(mesh) * copies)))
    size = prod(mesh)
    classes = [
        PlacementClass(mesh, tuple(order[n * size : (n + 1) * size]), placements)
        for n in range(copies)
    ]
    place = TensorPlace(shape=shape, start=draw(st.integers(0, 10**8)), itemsize=2)
    return place, classes, size * copies


def one_holding(classes: list[PlacementClass]) -> Holding:
    (holding,) = group_holdings(classes)
    assert holding.is_complete()
    return holding


def with_small_nbytes(small: int) -> None:
    shares.SMALL_NBYTES = small


@given(held_tensors(), st.sampled_from([0, 16, 10**6]))
@settings(max_examples=600, deadline=None)
def test_every_byte_of_the_tensor_is_written_by_exactly_one_rank(
    case: tuple[TensorPlace, list[PlacementClass], int], small: int
) -> None:
    place, classes, world = case
    before = shares.SMALL_NBYTES
    with_small_nbytes(small)
    try:
        holding = one_holding(classes)
        written: Counter[int] = Counter()
        for rank in range(world):
            share = share_of(holding, place, rank)
            if share is not None:
                for start, end in file_runs(place, share.rows):
                    written.update(range(start, end))
    finally:
        with_small_nbytes(before)
    assert written == Counter(range(place.start, place.start + place.nbytes))


@given(held_tensors(), st.sampled_from([0, 16, 10**6]))
@settings(max_examples=400, deadline=None)
def test_the_row_exchange_gives_every_writer_its_whole_rows(
    case: tuple[TensorPlace, list[PlacementClass], int], small: int
) -> None:
    place, classes, world = case
    shape = place.shape or (1,)
    values = np.arange(prod(shape)).reshape(shape)
    before = shares.SMALL_NBYTES
    with_small_nbytes(small)
    try:
        holding = one_holding(classes)
        for rank in range(world):
            share = share_of(holding, place, rank)
            if share is None:
                continue
            coordinate = holding.shard_coordinate(rank)
            assert coordinate is not None
            replica = holding.replicas(coordinate).index(rank)
            expected = np.concatenate([values[start:end] for start, end in share.rows])
            assert (received(holding, place, values, coordinate, replica, rank) == expected).all()
    finally:
        with_small_nbytes(before)


def received(
    holding: Holding,
    place: TensorPlace,
    values: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    coordinate: tuple[int, ...],
    replica: int,
    rank: int,
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """What `rank` has after its peers sent it their columns, from local tensors only."""
    shape = place.shape or (1,)
    share = share_at(holding, place, coordinate, replica)
    assert share is not None and share.rank == rank
    first, last = share.local
    out = np.full((last - first, *shape[1:]), -1)
    for peer in holding.peers(coordinate):
        held = holding.held(place.shape, peer) if place.shape else (((0, 1),),)
        grid = np.ix_(*([i for a, b in spans for i in range(a, b)] for spans in held))
        local = values[grid].reshape(local_shape(held))
        for target, source in column_boxes(held, shape):
            into = tuple(slice(*span) for span in target)
            out[(slice(None), *into)] = local[
                (slice(first, last), *(slice(*span) for span in source))
            ]
    assert (out >= 0).all()
    return out


def test_peers_are_the_shards_that_hold_the_same_rows() -> None:
    mesh = PlacementClass((2, 2), (0, 1, 2, 3), (Shard(0), Shard(1)))
    holding = one_holding([mesh])
    assert holding.peer_count == 2
    assert list(holding.peers((1, 0))) == [(1, 0), (1, 1)]
    place = TensorPlace(shape=(4096, 4096), start=0, itemsize=2)
    assert [share_of(holding, place, rank).rows for rank in range(4)] == [  # type: ignore[union-attr]
        ((0, 1024),),
        ((1024, 2048),),
        ((2048, 3072),),
        ((3072, 4096),),
    ]


def test_a_norm_that_each_mesh_sees_on_its_own_has_replicas_on_all_of_them() -> None:
    classes = [
        PlacementClass((2,), (0, 2), (Shard(0),)),
        PlacementClass((2,), (1, 3), (Shard(0),)),
    ]
    holding = one_holding(classes)
    assert holding.replicas((0,)) == (0, 1)
    assert holding.replicas((1,)) == (2, 3)


def test_tensors_cut_in_different_ways_are_different_holdings_the_lowest_rank_first() -> None:
    classes = [
        PlacementClass((2,), (4, 5), (Shard(0),)),
        PlacementClass((), (0,), ()),
        PlacementClass((), (1,), ()),
    ]
    first, second = group_holdings(classes)
    assert (first.ranks, second.ranks) == ([0, 1], [4, 5])


def test_neighbouring_small_tensors_have_one_writer() -> None:
    holding = one_holding([PlacementClass((4,), (0, 1, 2, 3), (Replicate(),))])
    writers = {
        rank
        for start in range(0, 1_000_000, 4096)
        for rank in range(4)
        if share_of(holding, TensorPlace(shape=(2048,), start=start, itemsize=2), rank)
    }
    assert len(writers) == 1


def test_coordinates_of_a_grid_are_all_held() -> None:
    mesh = PlacementClass((2, 3), tuple(range(6)), (Shard(0), Replicate()))
    holding = one_holding([mesh])
    assert holding.grid == (2,)
    assert [holding.replicas(c) for c in product(range(2))] == [(0, 1, 2), (3, 4, 5)]
