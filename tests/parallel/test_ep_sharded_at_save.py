"""What slices of experts cannot express is refused once more by the save itself, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import milepost as mp
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.ep_sharded import MergeOnSave
from tests.parallel.test_ep_sharded import EXPECTED, Experts, Layered, UlyssesAttention, reason
from tests.worlds import run_world

ROWS = {
    "merge-on-save", "no-experts", "whole-experts", "ulysses", "cp-stated", "expert-lora", "peft",
    "unknown-type", "hub-namespace", "etp", "several-groups", "pipeline", "per-node",
}  # fmt: skip


def refused_saves(rank: int, size: int, run: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "expert_tp"))
    lone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("efsdp", "ep"))

    def model(kind: str = "qwen3_moe", on: Any = mesh, *placements: Placement) -> Any:
        return Layered(kind, Experts(on, list(placements) or [Shard(0)]))

    adapted, under_cp = model(), model()
    adapted.experts.adapter = nn.ParameterDict({"lora_A": nn.Parameter(torch.ones(2))})
    under_cp.attention = UlyssesAttention()
    peft = type("PeftModel", (Layered,), {})("qwen3_moe", Experts(mesh, [Shard(0)]))
    saves: dict[str, tuple[Any, dict[str, Any]]] = {
        "merge-on-save": (model(), {"merge": MergeOnSave.EXPERT_LORA}),
        "no-experts": (Layered("qwen3_moe", None), {}),
        "whole-experts": (model("qwen3_moe", mesh, Replicate()), {}),
        "ulysses": (under_cp, {}),
        "cp-stated": (model(), {"fingerprint": {"cp_size": 2}}),
        "expert-lora": (adapted, {}),
        "peft": (peft, {}),
        "unknown-type": (model("made_up"), {}),
        "hub-namespace": (model("step3p7"), {}),
        "etp": (model("qwen3_moe", both, Shard(0), Shard(2)), {}),
        "several-groups": (model("qwen3_moe", lone, Replicate(), Shard(0)), {}),
        "pipeline": (model(), {"fingerprint": {"pp_size": 2}}),
        "per-node": (model(), {"copies": Copies.PER_NODE}),
    }
    found = {}
    for row, (live, options) in saves.items():
        state = {"model": live}
        found[row] = reason(mp.save_sharded_ep, run / "checkpoint-1", state, step=1, **options)
        dist.barrier()
    return found


def test_the_save_refuses_every_row_on_every_rank_and_writes_nothing(tmp_path: Path) -> None:
    assert EXPECTED.keys() - {"fine", "at-save", "at-save-merge", "stages"} == ROWS
    first, second = run_world(2, refused_saves, tmp_path)
    assert first == second and first.keys() == ROWS
    for row, text in first.items():
        assert EXPECTED[row] in text, (row, text)
        assert re.match(r"rank [01]: save_sharded_ep: ", text), (row, text)
    assert list(tmp_path.iterdir()) == []


def test_a_state_without_a_model_is_refused(tmp_path: Path) -> None:
    state = {"progress": {"step": 1}}
    text = reason(mp.save_sharded_ep, tmp_path / "checkpoint-1", state, step=1)
    assert text == "save_sharded_ep: the state holds no model"
    assert list(tmp_path.iterdir()) == []
