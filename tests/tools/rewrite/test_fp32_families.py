"""What a family keeps in fp32 stays so in a conversion: transformers' own lists are the judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.hf.fp32_names import stays_fp32
from milepost.tools.convert_to_bf16 import convert_to_bf16
from tests.tools.rewrite.hub import QUICK, read_hub, write_hub

FAMILIES = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots3_note", "ernie4_5_moe", "ernie4_5_vl_moe",
    "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "hy_v3",
    "inkling_mm_model", "inkling_text", "kimi_linear", "longcat_flash", "mimo_v2_flash",
    "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip
# The class lists them for readers of FP8, and says itself that they are bf16.
NOT_WIDE = re.compile(r"compressor\.(?:kv_proj|gate_proj|indexer\.)")


def on_meta(kind: str) -> Any:
    """A model of its default size, without data."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = CONFIG_MAPPING[kind]()
    is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = (
        transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    )
    with torch.device("meta"):
        return auto.from_config(config)


def wide_names(model: Any, names: list[str]) -> set[str]:
    """What the classes of transformers keep in fp32, whatever else the model is loaded in."""
    kept = [*(model._keep_in_fp32_modules_strict or ()), *(model._keep_in_fp32_modules or ())]
    patterns = [re.compile(rf"(?:^|\.){re.escape(each)}(?:$|\.)") for each in kept]
    return {
        name
        for name in names
        if any(each.search(name) for each in patterns)
        and (NOT_WIDE.search(name) is None or name.endswith("position_bias"))
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_tensors_that_transformers_keeps_wide_are_not_narrowed(tmp_path: Path, kind: str) -> None:
    model = on_meta(kind)
    names = [name for name, t in model.state_dict().items() if t.is_floating_point()]
    wide = wide_names(model, names)
    assert wide and len(wide) < len(names) * 0.6
    source = write_hub(
        tmp_path / "in", {name: torch.ones(2) for name in names}, config={"model_type": kind}
    )
    convert_to_bf16(source, tmp_path / "out", options=QUICK)
    made = read_hub(tmp_path / "out")
    assert {name for name in wide if made[name].dtype != torch.float32} == set()
    norms = [name for name in names if name.endswith("norm.weight")]
    assert norms and all(made[name].dtype == torch.float32 for name in norms)
    narrow = [name for name in names if "experts.gate_up_proj" in name or "experts.down" in name]
    assert narrow and all(made[name].dtype == torch.bfloat16 for name in narrow)


# As hub checkpoints have them; the model is a small one of the same names.
HUB_NAMES = {
    "bailing_hybrid": (
        "attention.A_log", "attention.dt_bias", "attention.q_conv1d.weight",
        "attention.v_conv1d.weight", "mlp.gate.expert_bias",
    ),
    "deepseek_v4": (
        "attn.attn_sink", "attn.compressor.ape", "hc_attn_base", "hc_attn_fn", "hc_ffn_scale",
        "ffn.gate.bias", "attn_norm.weight", "attn.q_norm.weight",
    ),
    "glm5_next": (
        "self_attn.A_log", "self_attn.dt_bias", "self_attn.k_conv1d.weight", "hc_attn_base",
        "hc_ffn_scale",
    ),
    "inkling_mm_model": ("attn_sconv.weight", "mlp_sconv.weight", "mlp.gate.bias"),
    "kimi_linear": ("self_attn.dt_bias", "block_sparse_moe.gate.weight"),
}  # fmt: skip
LAYERS_OF = {"glm5_next": "model.language_model", "inkling_mm_model": "model.llm"}


@pytest.mark.parametrize("kind", sorted(HUB_NAMES))
def test_they_are_known_by_their_hub_names_too(kind: str) -> None:
    from milepost.hf.hub_family import family_of, names_on_load

    model = on_meta(kind)
    names = list(model.state_dict())
    family = family_of(model)
    assert family is not None
    wide = wide_names(model, names)
    root = LAYERS_OF.get(kind, "model")
    layers = range(model.config.get_text_config().num_hidden_layers)
    for name in HUB_NAMES[kind]:
        places = [f"{root}.layers.{layer}.{name}" for layer in layers]
        loaded = names_on_load(family, places, names)
        assert any(found & wide for found in loaded.values()), name
        assert all(stays_fp32(place, [kind]) for place in places), name
    assert not stays_fp32("model.layers.0.mlp.shared_experts.up_proj.weight", [kind])
