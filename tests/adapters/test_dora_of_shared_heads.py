"""DoRA of a weight whose blocks ranks share is not folded with norms that count them twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import milepost as mp
from milepost.errors import InvalidInputError
from tests.worlds import run_world

HEADS = mp.PackedShard(0, sizes=(8, 2), replicas=(1, 2))  # 4 query heads and one for keys


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(2, 6, bias=False)


def save_merged(rank: int, ranks: int, run: Path) -> str:
    """The rows are cut in heads and the columns in halves, so that norms are sums over ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "sp"))
    model: Any = get_peft_model(Projection(), LoraConfig(r=2, target_modules=["qk"], use_dora=True))
    slices: list[tuple[str, tuple[int, ...], list[Any]]] = [
        ("base_layer.weight", (10, 4), [HEADS, Shard(1)]),
        ("lora_A.default.weight", (2, 4), [Replicate(), Shard(1)]),
        ("lora_B.default.weight", (10, 2), [HEADS, Replicate()]),
        ("lora_magnitude_vector.default.weight", (10,), [HEADS, Replicate()]),
    ]
    for part, shape, placements in slices:
        mp.declare_placement(
            model.base_model.model.qk,
            part,
            global_shape=shape,
            mesh=mesh,
            placements=placements,
        )
    with pytest.raises(InvalidInputError) as refused:
        mp.save(run / "checkpoint-1", {"model": model}, step=1, adapters=mp.Adapters.MERGED)
    return str(refused.value)


def test_dora_over_shared_heads_that_are_cut_inside_is_refused(tmp_path: Path) -> None:
    for message in run_world(4, save_merged, tmp_path):
        assert "the norms of DoRA would count the blocks twice that ranks share" in message
        assert "qk.weight" in message
    assert not list(tmp_path.iterdir())
