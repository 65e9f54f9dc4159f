"""Pieces that do not follow the rule of their placement are refused, never written elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import milepost as mp
from milepost.errors import InvalidInputError
from milepost.state.tensors import local_of
from tests.worlds import run_world

ROWS = (3, 0, 4, 0)


def cut_as_it_fell(rank: int, size: int, run: Path, padded: bool) -> str:
    """7 rows as a packed buffer left them, where `torch.chunk` gives 2, 2, 2 and 1."""
    mesh = init_device_mesh("cpu", (size,))
    value = torch.arange(35.0).reshape(7, 5)
    begin = sum(ROWS[:rank])
    local = value[begin : begin + ROWS[rank]].clone()
    if padded:  # each piece as long as the longest
        local = torch.cat([local, torch.full((4 - len(local), 5), -1.0)])
    model = nn.Module()
    model.register_buffer(
        "w",
        DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
        ),
    )
    with pytest.raises(InvalidInputError) as refused:
        mp.save(run / "checkpoint-1", {"model": model}, step=1)
    return str(refused.value)


@pytest.mark.case("V39")
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_rows_that_lie_as_they_fell_are_refused_with_both_shapes(
    padded: bool, tmp_path: Path
) -> None:
    messages = set(run_world(4, cut_as_it_fell, tmp_path, padded))
    (message,) = messages
    assert re.match(r"rank (\d): model: w: rank \1 holds shape \([034], 5\); ", message), message
    assert re.search(r"of global shape \(7, 5\) give it \([12], 5\)$", message), message
    assert not list(tmp_path.iterdir())


# ---- key and value heads, fewer than the ranks of a tensor-parallel group

HEADS, HEAD_SIZE, WIDTH = 2, 3, 4


def labelled(offset: float = 0.0) -> torch.Tensor:
    """Row i of the projection is i, plus `offset`."""
    rows = torch.arange(float(HEADS * HEAD_SIZE)) + offset
    return rows[:, None].expand(-1, WIDTH).contiguous()


class KeyProjection(nn.Module):
    """The head of this rank as a plain tensor; with more ranks than heads, several have one."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        groups = min(HEADS, ranks)
        mesh: Any = torch.arange(ranks).view(groups, ranks // groups).tolist()
        rows = labelled().chunk(groups)[rank // (ranks // groups)]
        self.key = nn.Parameter(rows.clone())
        mp.declare_placement(
            self,
            "key",
            global_shape=labelled().shape,
            mesh=mesh,
            placements=[Shard(0), Replicate()],
        )


def with_moment(rank: int, ranks: int) -> dict[str, Any]:
    model = KeyProjection(rank, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model.key.grad = model.key.detach() + 0.5
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_heads(rank: int, ranks: int, run: Path) -> None:
    mp.save(run / "checkpoint-1", with_moment(rank, ranks), step=1)


def load_heads(rank: int, ranks: int, run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    state = with_moment(rank, ranks)
    model, optimizer = state["model"], state["optimizer"]
    with torch.no_grad():
        model.key.fill_(-1.0)
        optimizer.state[model.key]["momentum_buffer"].fill_(-1.0)
    mp.load(run / "checkpoint-1", state)
    return model.key.detach().clone(), optimizer.state[model.key]["momentum_buffer"].clone()


@pytest.mark.case("V41")
@pytest.mark.parametrize("before", [1, 2, 4])
def test_heads_that_several_ranks_hold_are_stored_once_and_go_to_any_width(
    before: int, tmp_path: Path
) -> None:
    run_world(before, save_heads, tmp_path)
    stored = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert list(stored) == ["key"] and torch.equal(stored["key"], labelled())
    moments = load_file(tmp_path / "checkpoint-1" / "training" / "optimizer.safetensors")
    assert torch.equal(moments["key.momentum_buffer"], labelled(0.5))
    for after in (1, 2, 4):
        groups = min(HEADS, after)
        for rank, (rows, moment) in enumerate(run_world(after, load_heads, tmp_path)):
            head = rank // (after // groups)
            assert torch.equal(rows, labelled().chunk(groups)[head]), (after, rank)
            assert torch.equal(moment, labelled(0.5).chunk(groups)[head]), (after, rank)


# ---- three fused projections of equal width, as multi-head attention has them


def fused(rank: int, ranks: int) -> torch.Tensor:
    """Rows of query, key and value, 8 each, of which every rank has its part of each."""
    whole = torch.arange(24.0)[:, None].expand(24, 2)
    return torch.cat([block.chunk(ranks)[rank] for block in whole.chunk(3)]).clone()


class FusedAttention(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(fused(rank, ranks))
        mp.declare_placement(
            self,
            "qkv",
            global_shape=(24, 2),
            mesh=list(range(ranks)),
            placements=[_StridedShard(0, split_factor=3)],
        )


def save_fused(rank: int, ranks: int, run: Path) -> None:
    mp.save(run / "checkpoint-1", {"model": FusedAttention(rank, ranks)}, step=1)


def load_fused(rank: int, ranks: int, run: Path) -> bool:
    model = FusedAttention(rank, ranks)
    with torch.no_grad():
        model.qkv.zero_()
    mp.load(run / "checkpoint-1", {"model": model})
    return torch.equal(model.qkv, fused(rank, ranks))


@pytest.mark.case("V41")
@pytest.mark.parametrize(("before", "after"), [(2, [1]), (1, [4]), (4, [2])])
def test_rows_of_a_fused_projection_lie_where_the_unfused_model_has_them(
    before: int, after: list[int], tmp_path: Path
) -> None:
    run_world(before, save_fused, tmp_path)
    stored = load_file(tmp_path / "checkpoint-1" / "model.safetensors")["qkv"]
    assert stored[:, 0].tolist() == list(range(24))
    for ranks in after:
        assert all(run_world(ranks, load_fused, tmp_path))


# ---- query, key and value of different lengths, with a gate behind them

SIZES = (8, 4, 4, 4)  # 4 query heads, 2 key and 2 value heads of size 2, and the rows of a gate
GROUPS = (4, 2, 2, 4)  # what the ranks divide


def packing(ranks: int) -> mp.PackedShard:
    """The cut of the blocks on so many ranks: those of more ranks than heads share a head."""
    return mp.PackedShard(0, SIZES, tuple(max(1, ranks // heads) for heads in GROUPS))


def by_label(rank: int, ranks: int, offset: float = 0.0) -> torch.Tensor:
    """What `rank` has of the blocks of a projection whose row i is i, plus `offset`."""
    whole = (torch.arange(float(sum(SIZES))) + offset)[:, None].expand(-1, WIDTH)
    parts = []
    for block, heads in zip(torch.split(whole, list(SIZES)), GROUPS, strict=True):
        shared = max(1, ranks // heads)
        parts.append(block.chunk(ranks // shared)[rank // shared])
    return torch.cat(parts)


class GroupedAttention(nn.Module):
    """The plain local tensor of `rank` and its moment, whose rows are half a row further on."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.qkvg = nn.Parameter(by_label(rank, ranks))

    def with_moment(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)
        self.qkvg.grad = self.qkvg.detach() + 0.5
        optimizer.step()
        return {"model": self, "optimizer": optimizer}


def declared(rank: int, ranks: int) -> dict[str, Any]:
    model = GroupedAttention(rank, ranks)
    mp.declare_placement(
        model,
        "qkvg",
        global_shape=(sum(SIZES), WIDTH),
        mesh=list(range(ranks)),
        placements=[packing(ranks)],
    )
    return model.with_moment()


def declared_under_fsdp(rank: int, ranks: int) -> dict[str, Any]:
    """Two ranks of tensor parallelism, whose rows `fully_shard` cuts in halves, through a head."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("tp", "dp"))
    model = GroupedAttention(mesh.get_local_rank("tp"), 2)
    fully_shard(model, mesh=mesh["dp"])
    mp.declare_placement(
        model,
        "qkvg",
        global_shape=(sum(SIZES), WIDTH),
        mesh=mesh,
        placements=[packing(2), Shard(0)],
    )
    return model.with_moment()


Build = Callable[[int, int], dict[str, Any]]


def save_grouped(rank: int, ranks: int, run: Path, build: Build) -> None:
    mp.save(run / "checkpoint-1", build(rank, ranks), step=1)


def load_grouped(rank: int, ranks: int, run: Path, build: Build) -> list[torch.Tensor]:
    """The local tensors of the parameter and its moment, after a load into other values."""
    state = build(rank, ranks)
    param = state["model"].qkvg
    moment = state["optimizer"].state[param]["momentum_buffer"]
    with torch.no_grad():
        param.fill_(-1.0)
        moment.fill_(-1.0)
    mp.load(run / "checkpoint-1", state)
    moment = state["optimizer"].state[param]["momentum_buffer"]
    return [local_of(tensor).detach().clone() for tensor in (param, moment)]


def assert_stored_by_label(run: Path) -> None:
    checkpoint = run / "checkpoint-1"
    weights = load_file(checkpoint / "model.safetensors")
    moments = load_file(checkpoint / "training" / "optimizer.safetensors")
    assert list(weights) == ["qkvg"]
    assert torch.equal(weights["qkvg"], by_label(0, 1))
    assert torch.equal(moments["qkvg.momentum_buffer"], by_label(0, 1, 0.5))
    assert mp.Checkpoint.open(checkpoint).verify().problems == ()


@pytest.mark.case("V41")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_blocks_of_unequal_length_are_cut_one_by_one_and_shared_heads_are_stored_once(
    before: int, after: int, tmp_path: Path
) -> None:
    run_world(before, save_grouped, tmp_path, declared)
    assert_stored_by_label(tmp_path)
    for rank, (rows, moment) in enumerate(run_world(after, load_grouped, tmp_path, declared)):
        assert torch.equal(rows, by_label(rank, after)), rank
        assert torch.equal(moment, by_label(rank, after, 0.5)), rank


@pytest.mark.case("V41")
def test_blocks_that_fsdp_cuts_once_more_go_to_ranks_that_share_heads_and_back(
    tmp_path: Path,
) -> None:
    run_world(4, save_grouped, tmp_path / "fsdp", declared_under_fsdp)
    assert_stored_by_label(tmp_path / "fsdp")
    run_world(4, save_grouped, tmp_path / "heads", declared)
    found = run_world(4, load_grouped, tmp_path / "heads", declared_under_fsdp)
    for rank, halves in enumerate(found):
        tp, dp = divmod(rank, 2)
        for offset, half in zip((0.0, 0.5), halves, strict=True):
            assert torch.equal(half, by_label(tp, 2, offset).chunk(2)[dp]), (rank, offset)


@pytest.mark.case("V41")
@pytest.mark.parametrize(
    ("placements", "said"),
    [
        ([mp.PackedShard(0, (8, 4, 4))], r"sizes add up to 16, dim 0 of \(20, 4\) has 20"),
        ([mp.PackedShard(0, (24, -4))], "a size is negative"),
        ([mp.PackedShard(0, SIZES, (1, 2))], "2 replicas for 4 blocks"),
        ([mp.PackedShard(0, SIZES, (1, 2, 2, 1))], "its axis has 1 ranks"),
        ([mp.PackedShard(2, SIZES)], "of a tensor of 2 dims"),
        ([Shard(0), mp.PackedShard(0, SIZES)], "dim 0 is cut before"),
        ([mp.PackedShard(1, (2, 2))], r"rank 0 holds shape \(19, 4\); .* gives it \(20, 4\)"),
    ],
)
def test_blocks_that_are_not_those_of_the_tensor_are_refused(
    placements: list[Any], said: str
) -> None:
    model = nn.Linear(WIDTH, 19, bias=False)
    mesh = torch.zeros([1] * len(placements), dtype=torch.long).tolist()
    with pytest.raises(InvalidInputError, match=said) as refused:
        mp.declare_placement(
            model, "weight", global_shape=(20, WIDTH), mesh=mesh, placements=placements
        )
    assert str(refused.value).startswith("weight: ")
