"""Adapters of experts, those of peft and of expert-parallel runs, on banks and single experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.moe_experts import fuse_moe_experts
from tests.tools.adapters.peft_oracle import (
    EXPERTS,
    PLAIN,
    QUICK,
    load,
    tensors_of,
    write_adapter,
)
from tests.trainer import lora_runs
from tests.trainer import yaml_runs as runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


def test_banks_that_lie_fused_on_disk_get_the_same_values(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["qwen3_moe"]
    settings = {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    adapter = write_adapter(tmp_path / "a", base, **settings)
    fuse_moe_experts(base, tmp_path / "fused", options=QUICK)
    merge_peft_adapters([adapter], tmp_path / "single", options=QUICK)
    merge_peft_adapters([adapter], tmp_path / "out", base=tmp_path / "fused", options=QUICK)
    fuse_moe_experts(tmp_path / "single", tmp_path / "again", options=QUICK)
    found, wanted = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "again")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    name = "model.layers.0.mlp.experts"
    pair = {
        f"base_model.model.{name}.2.up_proj.lora_A.weight": torch.randn(4, 16),
        f"base_model.model.{name}.2.up_proj.lora_B.weight": torch.randn(12, 4),
    }
    save_file(pair, adapter / "adapter_model.safetensors")
    for key, place in (("old", base), ("older", tmp_path / "fused")):
        merge_peft_adapters([adapter], tmp_path / key, base=place, options=QUICK)
    single = tensors_of(tmp_path / "old")[f"{name}.2.up_proj.weight"]
    fused = tensors_of(tmp_path / "older")[f"{name}.gate_up_proj"]
    assert torch.equal(fused[2, 12:], single)


@pytest.mark.parametrize("fused", [False, True])
def test_factors_of_expert_parallel_runs_merge(
    fused: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["qwen3_moe"]
    adapter = tmp_path / "a"
    adapter.mkdir()
    config = {
        "peft_type": "EXPERT_LORA",
        "r": 2,
        "lora_alpha": 6,
        "expert_projections": ["down_proj"],
        "base_model_name_or_path": str(base),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    name = "model.layers.1.mlp.experts"
    a, b = torch.randn(4, 12, 2), torch.randn(4, 2, 16)
    factors = {f"{name}.down_proj.lora_A": a, f"{name}.down_proj.lora_B": b}
    factors |= {key.replace(".1.", ".0."): torch.randn_like(t) for key, t in factors.items()}
    save_file(factors, adapter / "adapter_model.safetensors")
    given = None
    if fused:
        given = tmp_path / "fused"
        fuse_moe_experts(base, given, options=QUICK)
    merge_peft_adapters([adapter], tmp_path / "out", base=given, options=QUICK)
    found, before = tensors_of(tmp_path / "out"), tensors_of(base)
    for expert in range(4):
        key = f"{name}.{expert}.down_proj.weight"
        wanted = before[key] + 3.0 * (a[expert] @ b[expert]).T
        own = found[f"{name}.down_proj"][expert] if fused else found[key]
        assert torch.allclose(own, wanted, atol=1e-5)


def test_an_expert_parallel_run_merges_to_the_logits_of_its_trained_model(tmp_path: Path) -> None:
    text = runs.write_text(tmp_path)
    base = lora_runs.write_base(tmp_path / "base", "moe")
    changes = lora_runs.on_base(base, lora=lora_runs.MIXED, max_steps=3)
    adapter = runs.run(tmp_path / "run", text, "dp_shard2 ep2", **changes)
    assert lora_runs.adapter_config(adapter)["peft_type"] == "LORA_WITH_EP_EXPERT_LORA"
    report = merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert report.counts == {"changed": 2 * (3 + 4 * 3)}  # attention, and three of each expert
    live = lora_runs.live_logits(tmp_path / "run", text, **changes)
    merged = lora_runs.logits_of(load(tmp_path / "out"))
    assert torch.allclose(merged, live, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(lora_runs.logits_of(load(base)), live, atol=1e-2)
