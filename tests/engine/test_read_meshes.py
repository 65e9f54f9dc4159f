"""Any rank of any mesh reads its index set, all of it, and each byte of it once."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milepost.engine.read import ReadOptions, StoredTensor
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.geometry.placement import (
    IndexSet,
    Placement,
    Replicate,
    Shard,
    coordinate_of,
    index_set,
    local_shape,
)

START = 24


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[IndexSet], int]:
    """A shape, what each rank of a mesh holds of it, and how often each element is held."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=4)))
    mesh = draw(st.lists(st.integers(1, 4), max_size=3).filter(lambda m: prod(m) <= 16))
    shard = st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3]))
    one: st.SearchStrategy[Placement] = st.one_of(st.just(Replicate()), shard)
    placements = [draw(one) for _ in mesh]
    held = [
        index_set(shape, mesh, coordinate_of(rank, mesh), placements) for rank in range(prod(mesh))
    ]
    pairs = zip(mesh, placements, strict=True)
    return shape, held, prod(n for n, placement in pairs if isinstance(placement, Replicate))


def picked(whole: torch.Tensor, held: IndexSet) -> torch.Tensor:
    """The index set of a tensor, by torch's own indexing."""
    for dim, spans in enumerate(held):
        indices = [index for start, end in spans for index in range(start, end)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


@settings(
    max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=meshes(), threads=st.sampled_from([1, 2]))
def test_every_rank_gets_what_it_holds_and_every_wanted_element_is_read_once(
    case: tuple[tuple[int, ...], list[IndexSet], int], threads: int, tmp_path: Path
) -> None:
    shape, held, replicas = case
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    path = tmp_path / "part"
    path.write_bytes(b"\0" * START + whole.numpy().tobytes())
    stored = StoredTensor(name="w", path=path, start=START, dtype="I32", shape=shape)
    read: list[int] = []
    found: list[int] = []
    for own in held:
        target = torch.full(local_shape(own), -1, dtype=torch.int32)
        before = sum(read)
        options = ReadOptions(threads=threads, on_bytes=read.append)
        fill_shards([ShardRead(stored=stored, held=own, target=target)], options)
        assert torch.equal(target, picked(whole, own))
        needed = target.numel() * target.element_size()
        if own[1:] == tuple(((0, n),) if n else () for n in shape[1:]):
            assert sum(read) - before == needed, "whole rows: not a byte more"
        assert sum(read) - before >= needed
        found += target.flatten().tolist()
    assert sorted(found) == sorted(list(range(prod(shape))) * replicas)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_several_tensors_of_one_file_are_read_together(count: int, tmp_path: Path) -> None:
    values = [torch.arange(24, dtype=torch.int32).reshape(6, 4) + 100 * n for n in range(count)]
    path = tmp_path / "part"
    path.write_bytes(b"".join(value.numpy().tobytes() for value in values))
    held = index_set((6, 4), (2, 2), (1, 0), (Shard(0), Shard(1)))
    read: list[int] = []
    reads = [
        ShardRead(
            stored=StoredTensor(name=str(n), path=path, start=96 * n, dtype="I32", shape=(6, 4)),
            held=held,
            target=torch.empty(local_shape(held), dtype=torch.int32),
        )
        for n in range(count)
    ]
    fill_shards(reads, ReadOptions(threads=2, on_bytes=read.append))
    for one, value in zip(reads, values, strict=True):
        assert torch.equal(one.target, value[3:, :2])
