"""`--check` tells what loaders and servers would miss, or keeps the output from being kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import EXPERT_NAMES
from milepost.tools.moe_experts import fuse_moe_experts, unfuse_moe_experts
from milepost.tools.rename import rename
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.check import look_at
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.hf.conftest import make_model
from tests.tools.rewrite.experts import make_experts
from tests.tools.rewrite.hub import QUICK, read_hub, write_hub

CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)


def test_parameters_are_counted_and_the_class_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "in")
    report = reshard(tmp_path / "in", tmp_path / "out", options=CHECKED)
    assert report.check is not None and report.check.problems == report.check.notes == ()
    assert report.check.model_class == "LlamaForCausalLM"
    assert report.check.parameters == sum(tensor.numel() for tensor in model.parameters())


def test_an_output_that_the_class_would_fill_with_random_values_is_not_kept(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "in")
    rules = [(r"layers\.1\.mlp\.up_proj", "layers.1.mlp.pu_proj")]
    with pytest.raises(InvalidInputError, match=r"not kept.*layers\.1\.mlp\.up_proj\.weight"):
        rename(tmp_path / "in", tmp_path / "out", rules=rules, options=CHECKED)
    assert not (tmp_path / "out").exists()
    rename(tmp_path / "in", tmp_path / "out", rules=rules, options=QUICK)
    found = look_at(tmp_path / "out")
    assert any("pu_proj" in note for note in found.notes)
    assert any("up_proj.weight" in problem for problem in found.problems)


def test_a_tensor_of_another_size_than_the_config_says_keeps_an_output_from_being_kept(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    config["vocab_size"] += 2
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    rows, width = model.get_input_embeddings().weight.shape
    match = rf"embed_tokens\.weight: {rows * width} elements, expected {(rows + 2) * width}"
    with pytest.raises(InvalidInputError, match=match):
        reshard(tmp_path / "in", tmp_path / "out", options=CHECKED)
    assert not (tmp_path / "out").exists()


def test_an_expert_that_is_not_there_is_told_though_its_bank_gets_others(tmp_path: Path) -> None:
    make_experts("qwen3_moe").save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    held = load_file(file)
    lost = [name for name in held if "layers.0.mlp.experts.1.up_proj" in name]
    assert lost and not look_at(tmp_path / "in").problems
    save_file({n: t for n, t in held.items() if n not in lost}, file, {"format": "pt"})
    (problem,) = look_at(tmp_path / "in").problems
    assert "layers.0.mlp.experts.gate_up_proj" in problem


def test_slices_that_are_left_over_keep_an_output_from_being_kept(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "in")
    rules = [(r"up_proj\.weight$", "up_proj.weight.shard_0")]
    with pytest.raises(InvalidInputError, match=r"2 slices of ranks are left over"):
        rename(tmp_path / "in", tmp_path / "out", rules=rules, options=CHECKED)
    assert not (tmp_path / "out").exists()


BANKS = {
    "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 8),
    "model.layers.0.mlp.experts.down_proj": torch.ones(2, 8, 2),
}
LOOK_FOR = "servers look for .block_sparse_moe.experts."
SERVERS = {
    "qwen3_moe": "SGLang",
    "mixtral": "SGLang",
    "qwen2_moe": "SGLang",
    "olmoe": "SGLang",
    "deepseek_v3": "vLLM",
    "glm4_moe_lite": "vLLM",
    "longcat_flash": "vLLM",
}


@pytest.mark.parametrize("kind", SERVERS)
def test_fused_experts_that_a_server_does_not_read_are_told_and_single_ones_are_not(
    tmp_path: Path, kind: str
) -> None:
    config = {"model_type": kind, "num_experts": 2}
    banks = write_hub(tmp_path / "banks", BANKS, config=config)
    unfuse_moe_experts(banks, tmp_path / "single", options=QUICK)
    fuse_moe_experts(tmp_path / "single", tmp_path / "again", options=QUICK)
    for place, is_fused in (("banks", True), ("single", False), ("again", True)):
        told = [note for note in look_at(tmp_path / place).notes if "unfuse-moe-experts" in note]
        assert any(SERVERS[kind] in note for note in told) is is_fused, place


@pytest.mark.parametrize(
    "kind", [k for k, names in EXPERT_NAMES.items() if names.gate == "w1" and names.renames]
)
def test_names_of_memory_that_servers_look_for_under_another_path_are_told(
    tmp_path: Path, kind: str
) -> None:
    tensors = {f"model.layers.0.mlp.experts.0.{leaf}.weight": torch.ones(2, 2) for leaf in "ab"}
    place = write_hub(tmp_path / kind, tensors, config={"model_type": kind})
    assert any(LOOK_FOR in note for note in look_at(place).notes)
    right = {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in tensors.items()}
    place = write_hub(tmp_path / "right", right, config={"model_type": kind})
    assert not any(LOOK_FOR in note for note in look_at(place).notes)


def test_prediction_layers_are_carried_and_named(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(2)}, file, {"format": "pt"})
    report = reshard(tmp_path / "in", tmp_path / "out", options=CHECKED)
    assert report.check is not None
    assert any("mtp.fc.weight" in note for note in report.check.notes)
    assert "mtp.fc.weight" in read_hub(tmp_path / "out")


def test_what_could_not_be_compared_is_said(tmp_path: Path) -> None:
    def notes(config: dict[str, Any] | None) -> tuple[str, ...]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        write_hub(place, {"w": torch.ones(2)}, config=config)
        return look_at(place).notes

    for config in (None, {"model_type": "x"}, {"quantization_config": {"quant_method": "fp8"}}):
        assert any("not compared with the model's class" in note for note in notes(config))
