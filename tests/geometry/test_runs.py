"""Arrays with an entry for every run of elements, against a walk over all elements."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from milepost.geometry.placement import Shard, boxes_of, index_set, local_shape, numel
from milepost.geometry.runs import runs_held, runs_shape


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], tuple[Shard, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    run = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    grid = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    placements = tuple(
        Shard(draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 1, 2]))) for _ in grid
    )
    return shape, run, grid, placements


def taken(array: np.ndarray, held: tuple[tuple[tuple[int, int], ...], ...]) -> list[int]:
    """The elements of an index set, in local row-major order."""
    local = np.empty(local_shape(held), dtype=np.int64)
    for box, inner in boxes_of(held):
        local[tuple(slice(*s) for s in inner)] = array[tuple(slice(*s) for s in box)]
    found: list[int] = local.flatten().tolist()
    return found


@given(cuts())
def test_the_runs_of_a_shard_are_runs_of_the_whole_or_none(
    cut: tuple[tuple[int, ...], int, tuple[int, ...], tuple[Shard, ...]],
) -> None:
    shape, run, grid, placements = cut
    count = prod(shape)
    runs = np.arange(-(-count // run)).reshape(runs_shape(shape, run))
    elements = np.arange(count).reshape(shape)
    for coordinate in np.ndindex(*grid):
        held = index_set(shape, grid, coordinate, placements)
        own = taken(elements, held)
        pieces = [own[start : start + run] for start in range(0, len(own), run)]
        whole = all(
            piece == list(range(piece[0], min(piece[0] + run, count))) and piece[0] % run == 0
            for piece in pieces
        )
        found = runs_held(shape, run, held)
        if found is None:
            # A shard of two ranges may have whole runs that no spans of one dim can name.
            assert not whole or shape[-1] % run
            continue
        assert whole or numel(held) == 0
        assert taken(runs, found) == [piece[0] // run for piece in pieces]
