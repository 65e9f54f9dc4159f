"""The trio on two real ranks: rank 0 writes, both learn how it went."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import milepost as mp
from milepost.errors import CheckpointError
from tests.manager.small_training import Training, same
from tests.worlds import run_world


def train_and_save(rank: int, world_size: int, run: Path) -> list[float]:
    training = Training()
    wrapped = DistributedDataParallel(training.model)
    random.seed(100 + rank)
    torch.manual_seed(100 + rank)
    with mp.CheckpointManager(run, layout=mp.Layout.TRIO) as manager:
        manager.save_checkpoint(0, wrapped, training.optimizer, loss=0.5)
        assert (run / "latest.meta.json").exists(), "returned means durable, on every rank"
        assert manager.best_loss == 0.5
    return [random.random(), torch.rand(1).item()]


def load_and_draw(rank: int, world_size: int, run: Path) -> tuple[int, list[float], list[str]]:
    training = Training(seed=rank)
    with mp.CheckpointManager(run, layout=mp.Layout.TRIO) as manager:
        start, _ = manager.load_checkpoint(training.model, training.optimizer)
        assert manager.load_report is not None
        return start, [random.random(), torch.rand(1).item()], manager.load_report.differences


@pytest.mark.case("V29")
def test_each_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:
    drawn = run_world(2, train_and_save, tmp_path)
    assert drawn[0] != drawn[1]
    loaded = run_world(2, load_and_draw, tmp_path)
    assert [(start, numbers) for start, numbers, _ in loaded] == [(1, drawn[0]), (1, drawn[1])]
    ((_, numbers, differences),) = run_world(1, load_and_draw, tmp_path)
    assert numbers not in drawn
    assert differences == ["random state: saved by 2 ranks, now 1; it is not restored"]


def fail_to_save(rank: int, world_size: int, run: Path) -> tuple[str, str]:
    training = Training()
    extra = {"where": run} if rank == 0 else None
    with mp.CheckpointManager(run, layout=mp.Layout.TRIO) as manager:
        try:
            manager.save_checkpoint(0, training.model, loss=0.5, extra_state=extra)
        except mp.errors.CheckpointError as error:
            return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.case("C1.9")
def test_an_error_of_rank_0_is_an_error_of_all(tmp_path: Path) -> None:
    (own, text), (other, told) = run_world(2, fail_to_save, tmp_path)
    assert (own, other) == ("UnencodableError", "UnencodableError")
    assert text == told
    assert text.startswith("rank 0: ") and "extra_state.where" in text


def load_with_one_odd_rank(rank: int, world_size: int, run: Path) -> tuple[str, bool]:
    training = Training(seed=3, width=8 if rank == 0 else 16)
    before = training.values()
    with mp.CheckpointManager(run, layout=mp.Layout.TRIO) as manager:
        try:
            manager.load_checkpoint(training.model)
        except mp.errors.ShapeMismatchError as error:
            return type(error).__name__, same(before, training.values())
    return "none", False


@pytest.mark.case("C1.9")
def test_when_one_rank_cannot_load_none_does(tmp_path: Path) -> None:
    run_world(2, train_and_save, tmp_path)
    results = run_world(2, load_with_one_odd_rank, tmp_path)
    assert results == [("ShapeMismatchError", True)] * 2


def shard_and_save(rank: int, world_size: int, run: Path) -> str:
    training = Training()
    fully_shard(training.model, mesh=init_device_mesh("cpu", (world_size,)))
    with mp.CheckpointManager(run, layout=mp.Layout.TRIO) as manager:
        try:
            manager.save_checkpoint(0, training.model, loss=0.5)
        except CheckpointError as error:
            return str(error)
    return "nothing"


@pytest.mark.case("C2.11")
def test_sharded_tensors_are_refused_on_every_rank(tmp_path: Path) -> None:
    for message in run_world(2, shard_and_save, tmp_path):
        assert "0.weight: cut over ranks" in message
    assert not list(tmp_path.glob("*.safetensors"))
