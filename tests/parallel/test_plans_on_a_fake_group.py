"""Plans for worlds that no machine here can start: torch's own parallelism on meta tensors, with a
process group that only says how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from milepost.checkpointing.files import FilesPlan, TensorSetPlace, plan_files
from milepost.engine.write import Piece
from milepost.geometry.placement import local_shape
from milepost.plan.holding import Holding
from milepost.plan.inventory import Inventory, merge_inventories
from milepost.plan.shares import WriteRules
from milepost.state import placements
from milepost.state.placements import Held, describe
from tests.parallel.models import Shape, build

TENSOR_PARALLEL = 4
PLACES = {
    "model": TensorSetPlace(stem="model", prefix="", role="weights", max_part_nbytes=20_000),
    "moments": TensorSetPlace(
        stem="moments", prefix="training", role="state", max_part_nbytes=2**40
    ),
}


@contextmanager
def being(rank: int, world: int) -> Iterator[None]:
    """This process as one of many ranks, none of which will ever answer."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        for kept in (placements._grid, placements._class_on):
            kept.cache_clear()  # submeshes of two ranks are one to torch: a process has one rank


def held_by_rank(rank: int, world: int) -> dict[str, dict[str, Held]]:
    """What a rank of FSDP2 x TP holds, as torch cuts a model on meta; `describe` compares the shape
    of each local tensor with what the placements give."""
    shape = Shape("fsdp_tp", (world // TENSOR_PARALLEL, TENSOR_PARALLEL))
    with being(rank, world), torch.device("meta"):
        model = build(shape)
        found = {name: describe(param, key=name) for name, param in model.named_parameters()}
    return dict.fromkeys(PLACES, found)


def stated(sets: dict[str, dict[str, Held]]) -> Inventory:
    return Inventory(sets={k: {n: h.info for n, h in own.items()} for k, own in sets.items()})


def merged(world: int) -> Inventory:
    """The inventory of all ranks: those with one place on the tensor-parallel axis say the same."""
    lines = [list(range(line, world, TENSOR_PARALLEL)) for line in range(TENSOR_PARALLEL)]
    return merge_inventories([(ranks, stated(held_by_rank(ranks[0], world))) for ranks in lines])


def local_of(inventory: Inventory, key: str, name: str, rank: int) -> Held:
    """A tensor of the shape that the merged inventory gives a rank."""
    leaf = inventory.sets[key][name]
    holding = Holding(leaf.classes)
    place = holding.shard_coordinate(rank)
    assert place is not None
    local = local_shape(holding.held(leaf.shape, place))
    return Held(leaf, torch.empty(local, device="meta"))


def planned(inventory: Inventory, world: int, rank: int, rules: WriteRules) -> FilesPlan:
    held = {
        key: {name: local_of(inventory, key, name, rank) for name in leaves}
        for key, leaves in inventory.sets.items()
    }
    return plan_files(PLACES, inventory, held, rules, rank=rank)


def written(plan: FilesPlan) -> Iterator[tuple[str, int, int]]:
    """File, first byte and end of all that a rank writes, by itself or after an exchange."""
    for file in plan.files:
        pieces: tuple[Piece, ...] = file.pieces
        yield from ((file.name, piece.start, piece.end) for piece in pieces)
    for step in plan.steps:
        yield from ((str(step.path), start, end) for start, end, _ in step.chunks)


@pytest.mark.parametrize("below", [1, 2**20], ids=["direct", "aggregated"])
@pytest.mark.parametrize(
    "world", [16, pytest.param(256, marks=pytest.mark.slow)], ids=lambda n: f"{n}-ranks"
)
def test_the_plans_of_all_ranks_tile_every_file(world: int, below: int) -> None:
    inventory = merged(world)
    rules = WriteRules(
        writers=tuple(range(world)),
        hosts=tuple(rank // 8 for rank in range(world)),
        aggregate_below=below,
    )
    plans = [planned(inventory, world, rank, rules) for rank in range(world)]
    sizes = {file.name: file.nbytes for file in plans[0].files}
    assert len(sizes) > 3 and all({f.name: f.nbytes for f in p.files} == sizes for p in plans)
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for plan in plans:
        for name, start, end in written(plan):
            ranges[name].append((start, end))
    for name, found in ranges.items():
        end = 0
        for start, stop in sorted(found):
            assert start == end, f"{name}: byte {end} has no writer, or two"
            end = stop
        assert end == sizes[name], name
    travelling = dict.fromkeys(sizes, 0)
    for plan in plans:
        for step in plan.steps:
            travelling[str(step.path)] += len(step.receives)
    assert sum(travelling.values()) > 0, "columns travel"


@pytest.mark.parametrize("world", [16, 512, 4096], ids=lambda n: f"{n}-ranks")
def test_every_rank_holds_what_the_merged_inventory_says(world: int) -> None:
    inventory = merged(world)
    for rank in {0, 1, world // 3, world // 2 + 2, world - 1}:
        own: dict[str, Any] = held_by_rank(rank, world)["model"]
        assert own.keys() == inventory.sets["model"].keys()
        for name, held in own.items():
            expected = local_of(inventory, "model", name, rank)
            assert held.local.shape == expected.local.shape, (rank, name)
            assert held.info.shape == expected.info.shape, (rank, name)
