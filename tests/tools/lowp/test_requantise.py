"""What is quantised already is quantised anew in one step, from the exact values of its codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import Measure, quantize_to_lowp
from tests.tools.lowp.coded_tensors import DEEPSEEK, codes, packed, scales
from tests.tools.lowp.models import decompressed, save_model
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FP8_BLOCK: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}
LEAVES = {"gate_proj": (576, 192), "up_proj": (576, 192), "down_proj": (192, 576)}


def quantised(place: Path, kind: str) -> Path:
    """A dense model in FP8 by blocks of 128, attention too; the last blocks are partial."""
    scale = "weight_scale" if kind == "compressed-tensors" else "weight_scale_inv"
    tensors: dict[str, Tensor] = {"model.norm.weight": torch.randn(192).bfloat16()}
    shapes = {f"mlp.{leaf}": shape for leaf, shape in LEAVES.items()}
    for seed, (leaf, shape) in enumerate({**shapes, "self_attn.o_proj": (192, 192)}.items()):
        module = f"model.layers.0.{leaf}"
        grid = scales(-(-shape[0] // 128), -(-shape[1] // 128), seed=seed)
        tensors[f"{module}.weight"] = codes(*shape, seed=seed)
        tensors[f"{module}.{scale}"] = grid.bfloat16() if scale == "weight_scale" else grid
    document = FP8_BLOCK if kind == "compressed-tensors" else DEEPSEEK
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": document}
    return write_hub(place, tensors, config=config, parts=2)


@pytest.mark.parametrize("kind", ["compressed-tensors", "deepseek"])
@pytest.mark.parametrize("format", Format)
def test_one_step_from_blocks_of_fp8_is_two_steps_by_way_of_fp32(
    tmp_path: Path, format: Format, kind: str
) -> None:
    source = quantised(tmp_path / "in", kind)
    report = quantize_to_lowp(
        source, tmp_path / "q", format=format, measure=Measure.ERRORS, options=QUICK
    )
    dequantize(source, tmp_path / "floats", dtype="float32", options=QUICK)
    quantize_to_lowp(tmp_path / "floats", tmp_path / "two", format=format, options=QUICK)
    one, two = read_hub(tmp_path / "q"), read_hub(tmp_path / "two")
    attention = "model.layers.0.self_attn.o_proj.weight"
    assert same_bits(one, {**two, attention: two[attention].bfloat16()})
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    theirs = decompressed(tmp_path / "q", tmp_path / "theirs")
    assert same_bits(theirs, read_hub(tmp_path / "back"))
    document = json.loads((tmp_path / "q/config.json").read_bytes())
    assert document["quantization_config"]["format"] != FP8_BLOCK["format"] or format is Format.FP8
    assert "model.layers.0.self_attn.o_proj" in document["quantization_config"]["ignore"]
    assert document["dtype"] == "bfloat16"
    (note,) = [each for each in report.notes if "were quantised before" in each]
    assert note.startswith("4 weights") and attention in note
    assert len(report.errors) == 3


def test_experts_of_gpt_oss_go_from_mxfp4_to_nvfp4_and_the_old_scheme_is_gone(
    tmp_path: Path,
) -> None:
    model = save_model("gpt_oss", tmp_path / "model")
    quantize_to_lowp(model, tmp_path / "four", format=Format.MXFP4, options=QUICK)
    run: dict[str, Any] = {"format": Format.NVFP4, "layout": Layout.BLOCK_SCALED, "options": QUICK}
    quantize_to_lowp(tmp_path / "four", tmp_path / "q", **run)
    dequantize(tmp_path / "four", tmp_path / "floats", dtype="fp32", options=QUICK)
    quantize_to_lowp(tmp_path / "floats", tmp_path / "two", **run)
    assert same_bits(read_hub(tmp_path / "q"), read_hub(tmp_path / "two"))
    assert not any(name.endswith(("_blocks", "_scales")) for name in read_hub(tmp_path / "q"))
    quantize_to_lowp(tmp_path / "q", tmp_path / "back", format=Format.MXFP4, options=QUICK)
    document = json.loads((tmp_path / "back/config.json").read_bytes())["quantization_config"]
    assert document["quant_method"] == "mxfp4"
    assert not (tmp_path / "back/quantization_config.json").exists()
    assert read_hub(tmp_path / "back").keys() == read_hub(tmp_path / "four").keys()


def test_quantised_banks_are_cut_into_experts_and_experts_left_out_become_bf16(
    tmp_path: Path,
) -> None:
    """Banks in FP8, one scale for each square of each expert, to experts one by one."""
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": codes(3, 320, 192),
        f"{prefix}.gate_up_proj_scale_inv": scales(3, 3, 2),
        f"{prefix}.down_proj": codes(3, 192, 160, seed=5),
        f"{prefix}.down_proj_scale_inv": scales(3, 2, 2, seed=6),
    }
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "hidden_size": 192,
        "moe_intermediate_size": 160,
        "quantization_config": DEEPSEEK,
    }
    source = write_hub(tmp_path / "in", tensors, config=config)
    scope = Scope(exclude=["*.experts.1.*"])
    run: dict[str, Any] = {"format": Format.NVFP4, "scope": scope, "options": QUICK}
    quantize_to_lowp(source, tmp_path / "q", **run)
    dequantize(source, tmp_path / "floats", dtype="fp32", options=QUICK)
    quantize_to_lowp(tmp_path / "floats", tmp_path / "two", **run)
    one, two = read_hub(tmp_path / "q"), read_hub(tmp_path / "two")
    left = [name for name in two if ".experts.1." in name]
    assert len(left) == 3
    assert same_bits(one, {**two, **{name: two[name].bfloat16() for name in left}})
    torch.save(tensors, tmp_path / "banks.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantize_to_lowp(tmp_path / "banks.pt", tmp_path / "of-pt", **run)
    assert same_bits(read_hub(tmp_path / "of-pt"), one)


def test_scales_that_are_lost_are_told_before_anything_is_written(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": codes(64, 64)}
    config = {"model_type": "llama", "quantization_config": DEEPSEEK}
    source = write_hub(tmp_path / "in", tensors, config=config)
    with pytest.raises(ValueError, match="have no scale"):
        quantize_to_lowp(source, tmp_path / "q", format=Format.NVFP4, options=QUICK)
    assert not (tmp_path / "q").exists()
    odd = {"a.weight_packed": packed(8, 32).view(torch.int8), "a.weight_scale": scales(8, 2)}
    source = write_hub(tmp_path / "odd", odd, config={**config, "quantization_config": FP8_BLOCK})
    with pytest.raises(ValueError, match="belong to no weight"):
        quantize_to_lowp(source, tmp_path / "q", format=Format.NVFP4, options=QUICK)
