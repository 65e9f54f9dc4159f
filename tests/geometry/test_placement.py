"""Index sets against the definition: `torch.chunk` on the indices themselves."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.geometry.placement import (
    Placement,
    Replicate,
    Shard,
    between,
    chunk,
    coordinate_of,
    index_set,
    intersect_spans,
    local_shape,
    numel,
    span_length,
    whole,
)


def indices(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, end in spans for index in range(start, end)]


def cut_by_chunk(held: torch.Tensor, placement: Shard, count: int, index: int) -> torch.Tensor:
    def piece(tensor: torch.Tensor, pieces: int, number: int) -> torch.Tensor:
        parts = torch.chunk(tensor, pieces)
        return parts[number] if number < len(parts) else tensor[:0]

    virtual = [piece(held, placement.split_factor, n) for n in range(placement.split_factor)]
    return torch.cat([piece(part, count, index) for part in virtual])


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    placements = tuple(
        draw(
            st.one_of(
                st.just(Replicate()),
                st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3])),
            )
        )
        for _ in mesh
    )
    return shape, mesh, placements


@given(sharded())
@settings(max_examples=500, deadline=None)
def test_an_index_set_is_what_torch_chunk_leaves_of_the_indices(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    for coordinate in product(*(range(length) for length in mesh)):
        expected = [torch.arange(length) for length in shape]
        for count, index, placement in zip(mesh, coordinate, placements, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim
                expected[dim] = cut_by_chunk(expected[dim], placement, count, index)
        held = index_set(shape, mesh, coordinate, placements)
        assert [indices(spans) for spans in held] == [e.tolist() for e in expected]
        assert local_shape(held) == tuple(len(e) for e in expected)


@given(sharded())
@settings(max_examples=300, deadline=None)
def test_shards_hold_every_element_as_often_as_there_are_replicas(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    replicas = 1
    for length, placement in zip(mesh, placements, strict=True):
        replicas *= length if isinstance(placement, Replicate) else 1
    seen: Counter[tuple[int, ...]] = Counter()
    for coordinate in product(*(range(length) for length in mesh)):
        held = index_set(shape, mesh, coordinate, placements)
        elements = list(product(*(indices(spans) for spans in held)))
        assert len(elements) == numel(held)
        seen.update(elements)
    assert seen == Counter(dict.fromkeys(product(*(range(n) for n in shape)), replicas))


spans_of = st.lists(st.integers(0, 40), min_size=0, max_size=10, unique=True).map(
    lambda borders: tuple(
        (a, b) for a, b in zip(sorted(borders)[::2], sorted(borders)[1::2], strict=False)
    )
)


@given(spans_of, spans_of, st.randoms())
def test_intersections_are_the_common_indices_at_their_local_positions(
    first: tuple[tuple[int, int], ...], second: tuple[tuple[int, int], ...], random: object
) -> None:
    ours, theirs = indices(first), indices(second)
    found = [
        (ours[a + k], theirs[b + k])
        for a, b, length in intersect_spans(first, second)
        for k in range(length)
    ]
    assert found == [(index, index) for index in ours if index in set(theirs)]


@given(spans_of, st.integers(0, 30), st.integers(0, 30))
def test_a_range_of_local_positions_is_a_slice_of_the_indices(
    spans: tuple[tuple[int, int], ...], start: int, end: int
) -> None:
    assert indices(tuple(between(spans, start, end))) == indices(spans)[start:end]


@pytest.mark.case("V39")
def test_an_uneven_dim_gives_the_last_ranks_less_and_then_nothing() -> None:
    held = [index_set((5, 8), (4,), (rank,), (Shard(0),)) for rank in range(4)]
    assert [local_shape(h) for h in held] == [(2, 8), (2, 8), (1, 8), (0, 8)]
    assert span_length(held[3][0]) == 0
    assert chunk(1, 4, 1) == (1, 1)


def test_a_packed_projection_holds_two_spans_of_one_dim() -> None:
    assert index_set((2, 8), (2,), (0,), (Shard(1, split_factor=2),)) == (
        ((0, 2),),
        ((0, 2), (4, 6)),
    )


def test_whole_and_coordinates_follow_row_major_order() -> None:
    assert whole((2, 0)) == (((0, 2),), ())
    assert [coordinate_of(n, (2, 3)) for n in range(6)] == list(product(range(2), range(3)))
