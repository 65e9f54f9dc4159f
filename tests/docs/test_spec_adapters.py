"""Rules of docs/spec/v1.md about adapters, read without us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import milepost as mp
from milepost.format.manifest import AdapterEntry
from tests.adapters.lora_models import adapted
from tests.adapters.test_expert_lora import declare, family
from tests.docs.test_spec import code, fields, rows, section


def test_the_table_of_adapters_has_every_key() -> None:
    cells = [row for row in rows(section("Adapters")) if len(row) == 4]
    expected = fields(AdapterEntry)
    assert {code(row[0])[0]: row[2] == "yes" for row in cells} == expected


@pytest.mark.spec("v1#adapters-1")
def test_an_adapter_alone_is_all_that_the_model_has(tmp_path: Path) -> None:
    place = mp.save(tmp_path / "checkpoint-1", {"model": adapted()}, step=1).path
    entry = json.loads((place / "milepost.json").read_bytes())["models"]["model"]
    assert entry["adapter"]["kind"] == "adapter" and entry["stem"] == entry["adapter"]["stem"]
    assert (place / f"{entry['stem']}.safetensors").is_file()
    assert not (place / "config.json").exists()
    assert not (place / f"{entry['stem']}.safetensors.index.json").exists()


@pytest.mark.spec("v1#adapters-2")
def test_merged_weights_contain_the_adapter_that_the_marker_names(tmp_path: Path) -> None:
    model = adapted()
    state = {"model": model}
    place = mp.save(tmp_path / "checkpoint-1", state, step=1, adapters=mp.Adapters.MERGED).path
    marker = json.loads((place / "resume_adapter.json").read_bytes())
    factors = load_file(place / marker["adapter_dir"] / "adapter_model.safetensors")
    config = json.loads((place / marker["adapter_dir"] / "adapter_config.json").read_bytes())
    assert not (place / "adapter_config.json").exists()
    weights = load_file(place / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    live = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.detach()
    a, b = (factors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    expected = live + config["lora_alpha"] / config["r"] * b @ a
    torch.testing.assert_close(weights[f"{name}.weight"], expected)
    assert not torch.equal(weights[f"{name}.weight"], live)
    before = live.clone()
    mp.load(place, {"model": model})
    assert torch.equal(live, before)


@pytest.mark.spec("v1#adapters-3")
def test_factors_of_experts_have_a_kind_that_peft_does_not_know(tmp_path: Path) -> None:
    place = mp.save(tmp_path / "checkpoint-1", {"model": declare(family("qwen3_moe"))}, step=1).path
    config = json.loads((place / "adapter_config.json").read_bytes())
    assert config["peft_type"] == "EXPERT_LORA"
    tensors = load_file(place / "adapter_model.safetensors")
    assert tensors["model.layers.0.mlp.experts.down_proj.lora_A"].shape == (4, 24, 2)
    assert tensors["model.layers.0.mlp.experts.down_proj.lora_B"].shape == (4, 2, 32)
