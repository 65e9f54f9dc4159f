"""Known faults of the trade on real ranks: random streams, schedules, values, frozen and tied."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import milepost as mp
from milepost.errors import KeyMismatchError
from tests.worlds import run_world

# ---- V29: random streams


def draws(count: int = 5) -> list[tuple[float, float, float]]:
    return [
        (random.random(), float(np.random.rand()), float(torch.rand(1).item()))
        for _ in range(count)
    ]


def draw_and_save(rank: int, world_size: int, run: Path) -> Any:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    draws(rank + 1)
    mp.save(run / "checkpoint-1", {"progress": {"step": 1}}, step=1)
    return draws()


def load_and_draw(rank: int, world_size: int, run: Path) -> Any:
    found = []
    for _ in range(2):
        report = mp.load(run / "checkpoint-1", {"progress": {}})
        found.append(draws())
    return found, report.level.value, report.notes


@pytest.mark.case("V29")
@pytest.mark.parametrize("saved", [2, 4])
def test_streams_go_on_on_as_many_ranks_and_are_fresh_and_distinct_on_others(
    saved: int, tmp_path: Path
) -> None:
    before = run_world(saved, draw_and_save, tmp_path)
    for world_size in (2, 4, 1):
        results = run_world(world_size, load_and_draw, tmp_path)
        streams = [found[0] for found, _, _ in results]
        assert all(found[0] == found[1] for found, _, _ in results), "the same at every load"
        if world_size == saved:
            assert streams == before
            assert {level for _, level, _ in results} == {"exact"}
            continue
        for part in range(3):  # python, numpy, torch: each rank a stream that nobody had
            firsts = {stream[0][part] for stream in [*streams, *before]}
            assert len(firsts) == world_size + saved
        for _, level, notes in results:
            assert level == "resharded"
            assert any(f"saved by {saved} ranks, {world_size} load it" in note for note in notes)


# ---- V30: schedules


def schedule(total: int, *, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[10])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def rates(state: dict[str, Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(state["optimizer"].param_groups[0]["lr"])
        state["optimizer"].step()
        state["scheduler"].step()
    return found


def follow_a_schedule(rank: int, world_size: int, run: Path, stop: int) -> Any:
    whole = schedule(100, rank=rank)
    expected = rates(whole, 100)
    before = schedule(100, rank=rank)
    seen = rates(before, stop)
    with mp.CheckpointManager(run) as manager:
        manager.resume(before)
        manager.save(stop, before)
    same = schedule(100, rank=rank)
    with mp.CheckpointManager(run) as manager:
        manager.resume(same)
    seen += rates(same, 100 - stop)
    with mp.CheckpointManager(run) as manager:
        report = manager.resume(schedule(200, rank=rank))
        assert report is not None
    bare = {k: v for k, v in schedule(100, rank=rank).items() if k != "scheduler"}
    with mp.CheckpointManager(run / "bare") as manager:
        manager.resume(bare)
        manager.save(stop, bare)
    refused = ""
    with mp.CheckpointManager(run / "bare") as manager:
        try:
            manager.resume(schedule(100, rank=rank))
        except KeyMismatchError as error:
            refused = str(error)
        kept = manager.resume(schedule(100, rank=rank), missing=mp.Missing.KEEP)
        assert kept is not None
    return expected, seen, report.notes, refused, kept.kept


@pytest.mark.case("V30")
@pytest.mark.parametrize("stop", [3, 10, 57])
def test_a_schedule_goes_on_at_its_step_on_every_rank(stop: int, tmp_path: Path) -> None:
    for expected, seen, notes, refused, kept in run_world(2, follow_a_schedule, tmp_path, stop):
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(seen, expected, strict=True))
        assert any("T_max is 90 as saved, not 190" in note for note in notes), notes
        assert refused.startswith(("rank 0: ", "rank 1: ")) and "holds no scheduler" in refused
        assert kept == ["scheduler"], "never a silent warm-up"


# ---- V31: plain values


def fill_a_template(rank: int, world_size: int, run: Path) -> Any:
    saved = {"w": torch.ones(2), "step": 37, "name": "y", "lst": [3, 4], "none": 5, "f": 1.5}
    mp.save(run / "checkpoint-37", {"all": saved, "own": {"rank": rank, "step": 37}}, step=37)
    template: dict[str, Any] = {
        "w": torch.zeros(2), "step": 0, "name": "x", "lst": [0], "none": None, "f": 0.0
    }  # fmt: skip
    own: dict[str, Any] = {}
    mp.load(run / "checkpoint-37", {"all": template, "own": own})
    return template, own


@pytest.mark.case("V31")
def test_plain_values_of_any_type_are_set_on_every_rank(tmp_path: Path) -> None:
    for rank, (template, own) in enumerate(run_world(2, fill_a_template, tmp_path)):
        assert template.pop("w").tolist() == [1.0, 1.0]
        assert template == {"step": 37, "name": "y", "lst": [3, 4], "none": 5, "f": 1.5}
        assert own == {"rank": rank, "step": 37}
    alone = mp.Checkpoint.open(tmp_path / "checkpoint-37").training_state()
    assert alone["all"]["lst"] == [3, 4]


# ---- V42: frozen and tied weights


class Tied(nn.Module):
    """A tied pair, a frozen layer of another dtype, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(10, 6)
        self.frozen = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.randn(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(ids).to(torch.bfloat16)).float()
        found: torch.Tensor = self.head(self.body(hidden) * self.scale)
        return found


def sharded(seed: int) -> Tied:
    model = Tied(seed)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.frozen, mesh=mesh)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def train_tied(rank: int, world_size: int, run: Path) -> Any:
    model = sharded(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.arange(10)).pow(2).sum().backward()
    optimizer.step()
    mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)
    other = sharded(7)
    again = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1)
    mp.load(run / "checkpoint-1", {"model": other, "optimizer": again})
    return gathered(model), gathered(other), other.head.weight is other.embedding.weight


@pytest.mark.case("V42")
@pytest.mark.case("C2.12")
def test_frozen_and_tied_weights_are_in_the_files_without_any_model_code(tmp_path: Path) -> None:
    for saved, loaded, is_tied in run_world(2, train_tied, tmp_path):
        assert is_tied
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    plain = Tied(0)
    with safe_open(tmp_path / "checkpoint-1" / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    names = found.keys() | dict(checkpoint.tied).keys()
    assert names == plain.state_dict().keys()
    assert len(found) == len(names) - 1, "the tied pair is stored once"
    for name, value in found.items():
        assert torch.equal(value, saved[name]) and value.dtype == plain.state_dict()[name].dtype
    assert torch.equal(found["frozen.weight"], plain.frozen.weight)
    alone = Tied(9)
    mp.load(tmp_path / "checkpoint-1", {"model": alone})
    assert torch.equal(alone.head.weight, saved["embedding.weight"])
