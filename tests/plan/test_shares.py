"""How one tensor is divided: into blocks where they are large, by domains where they are small."""

from __future__ import annotations

from itertools import product

from milepost.geometry.placement import Replicate, Shard
from milepost.plan.holding import Holding, PlacementClass, group_holdings
from milepost.plan.shares import Division, TensorPlace, WriteRules, block_writers, row_blocks

KIB = 1024
ONE_HOST = WriteRules(writers=(0, 1, 2, 3), hosts=(0,) * 4)


def one_holding(*classes: PlacementClass) -> Holding:
    (holding,) = group_holdings(classes)
    assert holding.is_complete()
    return holding


def rows_of(division: Division, rank: int) -> list[tuple[int, int]]:
    row = division.place.row_nbytes
    return [(s.start // row, s.end // row) for s in division.segments_of(rank)]


def test_peers_are_the_shards_that_hold_the_same_rows_and_divide_them() -> None:
    holding = one_holding(PlacementClass((2, 2), (0, 1, 2, 3), (Shard(0), Shard(1))))
    assert holding.peer_count == 2
    assert list(holding.peers((1, 0))) == [(1, 0), (1, 1)]
    place = TensorPlace(shape=(4096, 4096), start=0, itemsize=2)
    division = Division(place, holding, ONE_HOST)
    assert [rows_of(division, rank) for rank in range(4)] == [
        [(0, 1024)],
        [(1024, 2048)],
        [(2048, 3072)],
        [(3072, 4096)],
    ]


def test_a_norm_that_each_mesh_sees_on_its_own_has_replicas_on_all_of_them() -> None:
    holding = one_holding(
        PlacementClass((2,), (0, 2), (Shard(0),)), PlacementClass((2,), (1, 3), (Shard(0),))
    )
    assert holding.replicas((0,)) == (0, 1)
    assert holding.replicas((1,)) == (2, 3)
    assert [c.rank for c in block_writers(holding, (1,), ONE_HOST)] == [2, 3]


def test_tensors_cut_in_different_ways_are_different_holdings_the_lowest_rank_first() -> None:
    first, second = group_holdings(
        [
            PlacementClass((2,), (4, 5), (Shard(0),)),
            PlacementClass((), (0,), ()),
            PlacementClass((), (1,), ()),
        ]
    )
    assert (list(first.ranks), list(second.ranks)) == ([0, 1], [4, 5])


def test_neighbouring_small_tensors_have_one_writer() -> None:
    holding = one_holding(PlacementClass((4,), (0, 1, 2, 3), (Replicate(),)))
    writers = {
        segment.writer
        for start in range(0, 1_000_000, 4096)
        for segment in Division(
            TensorPlace(shape=(2048,), start=start, itemsize=2), holding, ONE_HOST
        ).segments(0, 2**40)
    }
    assert len(writers) == 1


def test_coordinates_of_a_grid_are_all_held() -> None:
    holding = one_holding(PlacementClass((2, 3), tuple(range(6)), (Shard(0), Replicate())))
    assert holding.grid == (2,)
    assert [holding.replicas(c) for c in product(range(2))] == [(0, 1, 2), (3, 4, 5)]


def test_blocks_of_a_strided_shard_are_in_order_of_rows() -> None:
    holding = one_holding(PlacementClass((2,), (0, 1), (Shard(0, split_factor=2),)))
    assert [tuple(block) for block in row_blocks(holding, (8, 3))] == [
        (0, 2, (0,), 0),
        (2, 4, (1,), 0),
        (4, 6, (0,), 2),
        (6, 8, (1,), 2),
    ]


def test_small_blocks_are_aggregated_and_large_ones_are_written_as_they_lie() -> None:
    holding = one_holding(PlacementClass((4,), (0, 1, 2, 3), (Shard(0),)))
    rules = WriteRules(writers=(0, 1, 2, 3), hosts=(0,) * 4, aggregate_below=64 * KIB)
    small = Division(TensorPlace(shape=(1024, 50), start=0, itemsize=2), holding, rules)
    assert [s.writer for s in small.segments(0, 2**40)] == [0]
    large = Division(TensorPlace(shape=(1024, 200), start=0, itemsize=2), holding, rules)
    assert [s.writer for s in large.segments(0, 2**40)] == [0, 1, 2, 3]


def test_what_ranks_without_the_disk_hold_goes_to_ranks_that_have_it() -> None:
    holding = one_holding(PlacementClass((4,), (0, 1, 2, 3), (Shard(0),)))
    rules = WriteRules(writers=(0, 1), hosts=(0, 0, 1, 1))
    place = TensorPlace(shape=(4096, 16384), start=0, itemsize=2)
    segments = list(Division(place, holding, rules).segments(0, 2**40))
    assert {s.writer for s in segments} == {0, 1}
    assert sum(s.end - s.start for s in segments) == place.nbytes
    assert [s.writer for s in segments if s.end <= place.nbytes // 2] == [0, 1]
