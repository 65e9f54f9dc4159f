"""Index sets against the definition: `torch.chunk` on the indices themselves."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.geometry import placement as placement_module
from milepost.geometry.placement import (
    AnyShard,
    PackedShard,
    Placement,
    Replicate,
    Shard,
    between,
    chunk,
    coordinate_of,
    hide,
    index_set,
    intersect_spans,
    local_shape,
    numel,
    owned_set,
    span_length,
    whole,
)


def indices(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, end in spans for index in range(start, end)]


def cut_by_chunk(held: torch.Tensor, placement: AnyShard, count: int, index: int) -> torch.Tensor:
    def piece(tensor: torch.Tensor, pieces: int, number: int) -> torch.Tensor:
        parts = torch.chunk(tensor, pieces)
        return parts[number] if number < len(parts) else tensor[:0]

    if isinstance(placement, PackedShard):
        blocks = torch.split(held, list(placement.sizes))
        replicas = placement.replicas or [1] * len(blocks)
        chunks = [
            piece(block, count // shared, index // shared)
            for block, shared in zip(blocks, replicas, strict=True)
        ]
        return torch.cat(chunks)
    virtual = [piece(held, placement.split_factor, n) for n in range(placement.split_factor)]
    return torch.cat([piece(part, count, index) for part in virtual])


@st.composite
def sharded(
    draw: st.DrawFn, shortest: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(shortest, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    return shape, mesh, draw(placements_on(mesh, shape))


@st.composite
def placements_on(
    draw: st.DrawFn, mesh: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Placements on the axes of a mesh, of all kinds; blocks are packed in a dim that is whole."""
    placements: list[Placement] = []
    for count in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        is_whole = all(isinstance(p, Replicate) or p.dim != dim for p in placements)
        kinds = ["replicate", "shard", "packed"] if is_whole else ["replicate", "shard"]
        match draw(st.sampled_from(kinds)):
            case "replicate":
                placements.append(Replicate())
            case "shard":
                placements.append(Shard(dim, draw(st.sampled_from([1, 1, 2, 3]))))
            case _:
                placements.append(draw(packings(dim, shape[dim], count)))
    return tuple(placements)


@st.composite
def packings(draw: st.DrawFn, dim: int, length: int, count: int) -> PackedShard:
    """Blocks of any lengths, 0 among them, each held by so many of `count` ranks as divide it."""
    borders = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    sizes = tuple(b - a for a, b in zip([0, *borders], [*borders, length], strict=True))
    groups = [n for n in range(1, count + 1) if count % n == 0]
    replicas = tuple(draw(st.sampled_from(groups)) for _ in sizes)
    return PackedShard(dim, sizes, draw(st.sampled_from([replicas, ()])))


@given(sharded())
@settings(max_examples=500, deadline=None)
def test_an_index_set_is_what_torch_chunk_leaves_of_the_indices(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    for coordinate in product(*(range(length) for length in mesh)):
        expected = [torch.arange(length) for length in shape]
        for count, index, placement in zip(mesh, coordinate, placements, strict=True):
            if isinstance(placement, AnyShard):
                dim = placement.dim
                expected[dim] = cut_by_chunk(expected[dim], placement, count, index)
        held = index_set(shape, mesh, coordinate, placements)
        assert [indices(spans) for spans in held] == [e.tolist() for e in expected]
        assert local_shape(held) == tuple(len(e) for e in expected)


@given(sharded())
@settings(max_examples=300, deadline=None)
def test_shards_own_every_element_as_often_as_there_are_replicas(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    replicas = 1
    for length, placement in zip(mesh, placements, strict=True):
        replicas *= length if isinstance(placement, Replicate) else 1
    seen: Counter[tuple[int, ...]] = Counter()
    for coordinate in product(*(range(length) for length in mesh)):
        owned = owned_set(shape, mesh, coordinate, placements)
        elements = list(product(*(indices(spans) for spans in owned)))
        assert len(elements) == numel(owned)
        seen.update(elements)
    assert seen == Counter(dict.fromkeys(product(*(range(n) for n in shape)), replicas))


@given(sharded())
@settings(max_examples=300, deadline=None)
def test_what_a_shard_does_not_own_is_hidden_and_the_rest_keeps_its_place(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    for coordinate in product(*(range(length) for length in mesh)):
        held = index_set(shape, mesh, coordinate, placements)
        owned = owned_set(shape, mesh, coordinate, placements)
        seen = hide(held, owned, shape)
        for ours, own, left, length in zip(held, owned, seen, shape, strict=True):
            kept = set(indices(own))
            assert indices(left) == [i if i in kept else i + length for i in indices(ours)]


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


@pytest.mark.case("V41")
def test_grouped_heads_and_a_gate_are_cut_block_by_block_and_shared_heads_have_one_owner() -> None:
    packed = PackedShard(0, sizes=(8, 4, 4, 4), replicas=(1, 2, 2, 1))
    held = [index_set((20,), (4,), (rank,), (packed,)) for rank in range(4)]
    assert held == [
        (((0, 2), (8, 10), (12, 14), (16, 17)),),
        (((2, 4), (8, 10), (12, 14), (17, 18)),),
        (((4, 6), (10, 12), (14, 16), (18, 19)),),
        (((6, 8), (10, 12), (14, 16), (19, 20)),),
    ]
    owned = [owned_set((20,), (4,), (rank,), (packed,)) for rank in range(4)]
    assert owned == [held[0], (((2, 4), (17, 18)),), held[2], (((6, 8), (19, 20)),)]


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(placement_module).failed == 0


def test_whole_and_coordinates_follow_row_major_order() -> None:
    assert whole((2, 0)) == (((0, 2),), ())
    assert [coordinate_of(n, (2, 3)) for n in range(6)] == list(product(range(2), range(3)))
