"""Saves behind training on several ranks, where one rank gets out of step with the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost as mp
from milepost.checkpointing.world import drop_exchange_group, kept_exchange_group
from milepost.engine.rendezvous import Rendezvous
from tests.worlds import run_world


def refuse_on_one(rank: int, world_size: int, run: Path) -> str:
    def refuse(talk: Rendezvous) -> None:
        raise RuntimeError("can't start new thread")

    if rank == 1:
        pytest.MonkeyPatch().setattr(Rendezvous, "hand_over", refuse)
    try:
        mp.save_async(run / "checkpoint-1", {"progress": {"step": 1}}, step=1).wait()
    except mp.errors.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_cannot_go_on_behind_training_tells_the_others(tmp_path: Path) -> None:
    first, second = run_world(2, refuse_on_one, tmp_path)
    assert first.startswith("RankError: rank 1: RuntimeError: can't start new thread"), first
    assert second == first


def save_after_one_dropped(rank: int, world_size: int, run: Path) -> list[bool]:
    """Rank 0 has dropped the group of an exchange that failed, rank 1 is about to."""
    os.environ["MILEPOST_RANK_TIMEOUT_S"] = "10"
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(1)]))

    def save(step: int) -> bool:
        return mp.save(run / f"checkpoint-{step}", {"model": model}, step=step).written

    written, group = [save(1)], kept_exchange_group()
    assert group is not None, "columns travel"
    if rank == 0:
        drop_exchange_group(group)
    written.append(save(2))
    drop_exchange_group(group)
    return [*written, save(3), kept_exchange_group() is not group]


def test_ranks_agree_on_the_connections_of_an_exchange_when_one_has_none(tmp_path: Path) -> None:
    assert run_world(2, save_after_one_dropped, tmp_path) == 2 * [4 * [True]]
    for entry in mp.list_run(tmp_path).committed:
        weight = mp.Checkpoint.open(entry.path).read("weight")
        assert torch.equal(weight, torch.arange(64.0).view(8, 8))
