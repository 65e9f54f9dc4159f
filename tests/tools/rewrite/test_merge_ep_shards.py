"""Slices of experts, one file for each rank, become one checkpoint that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from milepost.errors import InvalidInputError
from milepost.hf.ep_families import EP_FAMILIES, FUSED_ON_HUB, EpSave
from milepost.hf.expert_layouts import EXPERT_NAMES, INPUT_FIRST_BANKS
from milepost.tools.merge_ep_shards import (
    InputShards,
    merge_ep_shards,
    supported_ep_merge_model_types,
)
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions
from tests.tools.rewrite.experts import (
    BASE,
    HIDDEN,
    INNER,
    REST,
    E,
    make_experts,
    save_slices,
    write_slices,
)
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits
from tests.worlds import run_world

# What hub checkpoints call the MLP with experts, and the part that all tokens take.
SPARSE = {"kimi_linear", "minimax", "minimax_m2", "minimax_m3_vl", "mixtral", "phimoe"}
SHARED = {"hy_v3": "shared_mlp", "laguna": "shared_expert"}
CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)


def test_every_family_whose_slices_can_be_saved_is_merged_in_a_known_form() -> None:
    kinds = {kind for kind, save in EP_FAMILIES.items() if save is EpSave.SLICES}
    assert set(supported_ep_merge_model_types()) == kinds
    assert kinds <= FUSED_ON_HUB | EXPERT_NAMES.keys()


@pytest.mark.parametrize("form", ["joined", "apart"])
@pytest.mark.parametrize("kind", supported_ep_merge_model_types())
def test_slices_with_the_input_dim_first_become_the_form_of_the_family(
    tmp_path: Path, kind: str, form: str
) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(E, HIDDEN, INNER), torch.randn(E, HIDDEN, INNER)
    down = torch.randn(E, INNER, HIDDEN)
    is_gpt_oss = kind == "gpt_oss"
    names = None if kind in FUSED_ON_HUB else EXPERT_NAMES[kind]
    if names is not None and names.gate is None:
        slices = {f"{BASE}.up_proj": up}
    elif form == "apart":
        ending = "_gmm" if is_gpt_oss else ""
        slices = {f"{BASE}.gate_proj{ending}": gate, f"{BASE}.up_proj{ending}": up}
    elif is_gpt_oss:
        slices = {f"{BASE}.gate_up_proj": torch.stack([gate, up], -1).flatten(-2)}
    else:
        slices = {f"{BASE}.gate_up_proj": torch.cat([gate, up], -1)}
    slices[f"{BASE}.down_proj"] = down
    source = write_slices(tmp_path / "in", slices, REST, model_type=kind)

    merge_ep_shards(source, tmp_path / "out", options=QUICK)

    made = read_hub(tmp_path / "out")
    if is_gpt_oss:
        assert torch.equal(made[f"{BASE}.gate_up_proj"][:, :, ::2], gate)
        assert torch.equal(made[f"{BASE}.gate_up_proj"][:, :, 1::2], up)
        assert torch.equal(made[f"{BASE}.down_proj"], down)
    elif names is None:
        banks = torch.cat([gate, up], -1)
        is_turned = kind not in INPUT_FIRST_BANKS
        gate_up_name, down_name = f"{BASE}.gate_up_proj", f"{BASE}.down_proj"
        if kind in ("aria", "aria_text"):
            gate_up_name, down_name = f"{BASE}.fc1.weight", f"{BASE}.fc2.weight"
        assert torch.equal(made[gate_up_name], banks.transpose(1, 2) if is_turned else banks)
        assert torch.equal(made[down_name], down.transpose(1, 2) if is_turned else down)
    else:
        mlp = BASE.removesuffix("experts")
        if kind == "nemotron_h":
            mlp = mlp.replace("model.", "backbone.")
        if kind in SPARSE:
            mlp = mlp.replace(".mlp.", ".block_sparse_moe.")
        for expert in range(E):
            at = f"{mlp}experts.{expert}"
            if names.gate is not None:
                assert torch.equal(made[f"{at}.{names.gate}.weight"], gate[expert].t())
            assert torch.equal(made[f"{at}.{names.up}.weight"], up[expert].t())
            assert torch.equal(made[f"{at}.{names.down}.weight"], down[expert].t())
        shared = SHARED.get(kind, "shared_experts")
        assert torch.equal(
            made[f"{mlp}{shared}.up_proj.weight"],
            REST["model.layers.1.mlp.shared_experts.up_proj.weight"],
        )
    assert torch.equal(made["mtp.0.w"], REST["mtp.0.w"])
    assert not any(".shard_" in name for name in made)


def test_biases_of_gpt_oss_are_interleaved_like_their_weights(tmp_path: Path) -> None:
    gate, up = torch.randn(E, INNER), torch.randn(E, INNER)
    slices = {
        f"{BASE}.gate_proj_gmm": torch.randn(E, HIDDEN, INNER),
        f"{BASE}.up_proj_gmm": torch.randn(E, HIDDEN, INNER),
        f"{BASE}.gate_proj_gmm_bias": gate,
        f"{BASE}.up_proj_gmm_bias": up,
        f"{BASE}.down_proj": torch.randn(E, INNER, HIDDEN),
        f"{BASE}.down_proj_bias": torch.randn(E, HIDDEN),
    }
    source = write_slices(tmp_path / "in", slices, {}, model_type="gpt_oss")
    merge_ep_shards(source, tmp_path / "out", options=QUICK)
    made = read_hub(tmp_path / "out")
    assert torch.equal(made[f"{BASE}.gate_up_proj_bias"][:, ::2], gate)
    assert torch.equal(made[f"{BASE}.gate_up_proj_bias"][:, 1::2], up)
    assert torch.equal(made[f"{BASE}.down_proj_bias"], slices[f"{BASE}.down_proj_bias"])


def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    bank = {f"{BASE}.down_proj": torch.randn(E, INNER, HIDDEN)}
    with pytest.raises(InvalidInputError, match="none of those whose slices"):
        merge_ep_shards(
            write_slices(tmp_path / "kind", bank, REST, model_type="step3p7"), tmp_path / "out"
        )
    source = write_slices(tmp_path / "adapter", bank, REST, model_type="qwen3_moe")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="adapter"):
        merge_ep_shards(source, tmp_path / "out")
    source = write_slices(tmp_path / "index", bank, REST, model_type="qwen3_moe")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInputError, match="without their index"):
        merge_ep_shards(source, tmp_path / "out")
    gated = {f"{BASE}.gate_up_proj": torch.randn(E, HIDDEN, 2 * INNER)}
    with pytest.raises(InvalidInputError, match="nemotron_h have no gate"):
        merge_ep_shards(
            write_slices(tmp_path / "gated", gated, REST, model_type="nemotron_h"),
            tmp_path / "out",
        )
    strange = {**bank, "model.layers.1.self_attn.q_proj": torch.randn(E, 2)}
    with pytest.raises(InvalidInputError, match="no known tensor of experts"):
        merge_ep_shards(
            write_slices(tmp_path / "strange", strange, REST, model_type="qwen3_moe"),
            tmp_path / "out",
        )
    source = write_slices(tmp_path / "fewer", bank, REST, model_type="qwen3_moe")
    index = json.loads((source / "model.safetensors.index.json").read_bytes())
    index["metadata"]["ep_size"] = 3
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInputError, match="3 slices expected, ranks 0, 1"):
        merge_ep_shards(source, tmp_path / "out")
    merge = RewriteOptions(mode=Mode.DRY_RUN)
    assert len(merge_ep_shards(source, tmp_path / "out", options=merge).problems) == 1
    assert not (tmp_path / "out").exists()


def test_slices_are_deleted_only_when_asked_and_only_after_the_output_is_there(
    tmp_path: Path,
) -> None:
    bank = {f"{BASE}.down_proj": torch.randn(E, INNER, HIDDEN)}
    source = write_slices(tmp_path / "in", bank, REST, model_type="qwen3_moe")
    delete = InputShards.DELETE
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    merge_ep_shards(source, tmp_path / "out", input_shards=delete, options=dry)
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError):
        merge_ep_shards(source, tmp_path / "taken", input_shards=delete, options=QUICK)
    assert len(list(source.iterdir())) == 4
    merge_ep_shards(source, tmp_path / "out", input_shards=delete, options=QUICK)
    assert [path.name for path in source.iterdir()] == ["config.json"]
    assert len(read_hub(tmp_path / "out")) == E + len(REST)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_what_ranks_of_milepost_saved_is_merged_to_the_model_that_they_held(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    make_experts(family).save_pretrained(tmp_path / "base")
    held = run_world(2, save_slices, tmp_path / "base", tmp_path)[0]
    report = merge_ep_shards(tmp_path / "checkpoint-1", tmp_path / "merged", options=CHECKED)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert same_bits(dict(loaded.named_parameters()), held)
    assert same_bits(read_hub(tmp_path / "merged"), read_hub(tmp_path / "base"))
    assert report.check is not None and report.check.notes == ()
