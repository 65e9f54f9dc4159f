"""Banks of experts and single experts: both ways, bit for bit, as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import EXPERT_NAMES, NO_EXPERT_NAMES
from milepost.tools.moe_experts import fuse_moe_experts, unfuse_moe_experts
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub

E, INNER, HIDDEN = 4, 6, 8
CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 12}),
    "mixtral": ("Mixtral", {"moe_intermediate_size": 24}),
    "phimoe": ("Phimoe", {"moe_intermediate_size": 24}),
    "olmoe": ("Olmoe", {"intermediate_size": 12}),
    "glm4_moe": ("Glm4Moe", {"n_group": 1, "topk_group": 1, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "lfm2_moe": ("Lfm2Moe", {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1}),
}


def build(family: str) -> Any:
    import transformers

    prefix, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_forms_of_a_family_are_what_transformers_writes_and_loads(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = build(family)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "banks", save_original_format=False)
    singles, banks = read_hub(tmp_path / "single"), read_hub(tmp_path / "banks")
    assert not same_bits(singles, banks)

    unfused = unfuse_moe_experts(tmp_path / "banks", tmp_path / "unfused", options=CHECKED)
    assert same_bits(read_hub(tmp_path / "unfused"), singles)
    assert unfused.check is not None and unfused.check.model_class == type(model).__name__
    assert unfused.check.notes == ()

    fuse_moe_experts(tmp_path / "single", tmp_path / "fused", options=CHECKED)
    assert not any(".experts.0." in name for name in read_hub(tmp_path / "fused"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert same_bits(loaded.state_dict(), model.state_dict())

    unfuse_moe_experts(tmp_path / "fused", tmp_path / "again", options=QUICK)
    assert same_bits(read_hub(tmp_path / "again"), singles)


def bank_forms(*, gate: str, up: str, down: str) -> dict[str, dict[str, torch.Tensor]]:
    """One layer in three forms: banks, single experts, banks with a last part `.weight`."""
    torch.manual_seed(0)
    gate_up = torch.randn(E, 2 * INNER, HIDDEN).bfloat16()
    downs = torch.randn(E, HIDDEN, INNER).bfloat16()
    bias = torch.randn(E, 2 * INNER)
    rest = {
        "model.layers.0.mlp.gate.weight": torch.randn(E, HIDDEN),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": torch.randn(INNER, HIDDEN),
        "mtp.0.proj.weight": torch.randn(3, 3),
    }
    base = "model.layers.0.mlp.experts"
    single = {
        **{f"{base}.{e}.{gate}.weight": gate_up[e, :INNER].clone() for e in range(E)},
        **{f"{base}.{e}.{up}.weight": gate_up[e, INNER:].clone() for e in range(E)},
        **{f"{base}.{e}.{down}.weight": downs[e].clone() for e in range(E)},
    }
    assert bias.shape[1] == gate_up.shape[1]
    return {
        "banks": {f"{base}.gate_up_proj": gate_up, f"{base}.down_proj": downs, **rest},
        "single": {**single, **rest},
        "suffixed": {
            f"{base}.gate_up_proj.weight": gate_up,
            f"{base}.down_proj.weight": downs,
            **rest,
        },
    }


CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": E,
}


@pytest.mark.case("V54")
@pytest.mark.parametrize("form", ["banks", "single", "suffixed"])
def test_every_form_becomes_every_other_with_each_tensor_written_once(
    tmp_path: Path, form: str
) -> None:
    forms = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")
    source = write_hub(tmp_path / "in", forms[form], config=CONFIG, parts=3)
    unfuse_moe_experts(source, tmp_path / "single", options=QUICK)
    fuse_moe_experts(tmp_path / "single", tmp_path / "banks", options=QUICK)
    assert same_bits(read_hub(tmp_path / "single"), forms["single"])
    assert same_bits(read_hub(tmp_path / "banks"), forms["banks"])


def test_biases_are_cut_like_their_weights(tmp_path: Path) -> None:
    base = "model.layers.0.mlp.experts"
    tensors = {
        f"{base}.gate_up_proj": torch.randn(E, 2 * INNER, HIDDEN),
        f"{base}.gate_up_proj_bias": torch.randn(E, 2 * INNER),
        f"{base}.down_proj": torch.randn(E, HIDDEN, INNER),
        f"{base}.down_proj_bias": torch.randn(E, HIDDEN),
    }
    source = write_hub(tmp_path / "in", tensors, config=CONFIG)
    unfuse_moe_experts(source, tmp_path / "out", options=QUICK)
    made = read_hub(tmp_path / "out")
    assert torch.equal(
        made[f"{base}.2.up_proj.bias"], tensors[f"{base}.gate_up_proj_bias"][2, INNER:]
    )
    assert torch.equal(made[f"{base}.3.down_proj.bias"], tensors[f"{base}.down_proj_bias"][3])
    fuse_moe_experts(tmp_path / "out", tmp_path / "again", options=QUICK)
    assert same_bits(read_hub(tmp_path / "again"), tensors)


@pytest.mark.case("V54")
def test_an_expert_that_is_missing_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    tensors = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")["single"]
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    source = write_hub(tmp_path / "in", tensors, config=CONFIG)
    with pytest.raises(InvalidInputError, match=r"missing: 2\.up_proj"):
        fuse_moe_experts(source, tmp_path / "out", options=QUICK)
    last = "model.layers.0.mlp.experts.3."
    fewer = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    with pytest.raises(InvalidInputError, match="experts are missing"):
        fuse_moe_experts(write_hub(tmp_path / "in", fewer, config=CONFIG), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bank_of_another_shape_than_config_says_is_refused_not_guessed(tmp_path: Path) -> None:
    forms = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")["banks"]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    turned = {**forms, name: forms[name].transpose(1, 2).contiguous()}
    source = write_hub(tmp_path / "in", turned, config=CONFIG)
    with pytest.raises(InvalidInputError, match="transposed or interleaved"):
        unfuse_moe_experts(source, tmp_path / "out", options=QUICK)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4", "granitemoe", "nobody_knows"])
def test_families_without_single_experts_are_refused_with_the_reason(
    tmp_path: Path, kind: str
) -> None:
    forms = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")
    source = write_hub(tmp_path / "in", forms["banks"], config={**CONFIG, "model_type": kind})
    with pytest.raises(InvalidInputError, match=f"model type {kind}: .*qwen3_moe"):
        unfuse_moe_experts(source, tmp_path / "out", options=QUICK)
    assert not set(EXPERT_NAMES) & set(NO_EXPERT_NAMES)


def test_a_model_without_experts_is_copied_whatever_its_family(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3)}
    for verb in (unfuse_moe_experts, fuse_moe_experts):
        source = write_hub(tmp_path / "in", tensors)
        report = verb(source, tmp_path / verb.__name__, options=QUICK)
        assert same_bits(read_hub(tmp_path / verb.__name__), tensors)
        assert any("copied as it is" in note for note in report.notes)


def test_scales_beside_a_bank_are_never_stretched_over_experts(tmp_path: Path) -> None:
    forms = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")
    scale = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    tensors = {**forms["banks"], scale: torch.ones(E, 1, 1)}
    source = write_hub(tmp_path / "in", tensors, config=CONFIG)
    with pytest.raises(InvalidInputError, match="quantised"):
        unfuse_moe_experts(source, tmp_path / "out", options=QUICK)
    single = {**forms["single"]}
    single["model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(InvalidInputError, match="weight_scale_inv"):
        fuse_moe_experts(write_hub(tmp_path / "in", single, config=CONFIG), tmp_path / "out")


def test_check_says_which_server_will_not_read_banks(tmp_path: Path) -> None:
    forms = bank_forms(gate="gate_proj", up="up_proj", down="down_proj")
    config = {**CONFIG, "architectures": []}
    source = write_hub(tmp_path / "in", forms["single"], config=config)
    report = fuse_moe_experts(source, tmp_path / "out", options=RewriteOptions(is_durable=False))
    assert report.check is None
    from milepost.tools.rewrite.check import look_at

    assert any("SGLang" in note for note in look_at(tmp_path / "out").notes)
    assert json.loads((tmp_path / "out/config.json").read_bytes()) == config
