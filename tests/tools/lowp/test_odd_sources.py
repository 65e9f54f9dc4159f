"""Checkpoints whose quantisation is stated elsewhere than usual, or not at all, or is more than
codes and scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import CheckpointError, InvalidInputError
from milepost.tools.average import average
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.dequantize import dequantize
from tests.tools.rewrite.hub import QUICK, read_hub, write_hub

UP = "model.layers.0.mlp.up_proj"
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    },
}
TENSORS = {
    f"{UP}.weight": torch.linspace(-4, 4, 128).reshape(8, 16).to(torch.float8_e4m3fn),
    f"{UP}.weight_scale": torch.tensor(0.0123456789),
    "model.norm.weight": torch.ones(16).bfloat16(),
}
VALUES = TENSORS[f"{UP}.weight"].float() * TENSORS[f"{UP}.weight_scale"]
STATED = {
    "for the language model": {"text_config": {"quantization_config": SCHEME}},
    "by its old name": {"compression_config": SCHEME},
    "nowhere": {},
}


@pytest.mark.parametrize("where", STATED)
@pytest.mark.parametrize("verb", [cast, average])
def test_codes_are_no_values_wherever_their_scheme_is_stated(
    verb: Callable[..., Any], where: str, tmp_path: Path
) -> None:
    source = write_hub(tmp_path / "in", TENSORS, config={"model_type": "llama", **STATED[where]})
    given: Any = (source, {"dtype": "float16"}) if verb is cast else ([source, source], {})
    with pytest.raises(InvalidInputError, match="would treat codes as values"):
        verb(given[0], tmp_path / "out", options=QUICK, **given[1])
    assert not (tmp_path / "out").exists()


def test_weights_of_gptq_beside_another_configuration_are_no_values(tmp_path: Path) -> None:
    names = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
    tensors = {f"{UP}.{name}": torch.ones(2, 8, dtype=dtype) for name, dtype in names.items()}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    (source / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(InvalidInputError, match=r"quantised \(qweight\)"):
        cast(source, tmp_path / "out", dtype="bfloat16", options=QUICK)


@pytest.mark.parametrize("where", STATED)
def test_nothing_says_that_weights_are_quantised_once_they_are_not(
    where: str, tmp_path: Path
) -> None:
    source = write_hub(tmp_path / "in", TENSORS, config={"model_type": "llama", **STATED[where]})
    dequantize(source, tmp_path / "out", dtype="float32", options=QUICK)
    assert torch.equal(read_hub(tmp_path / "out")[f"{UP}.weight"], VALUES)
    config = (tmp_path / "out/config.json").read_text()
    assert "quantization_config" not in config and "compression_config" not in config


@pytest.mark.parametrize("verb", [dequantize, convert_to_bf16])
@pytest.mark.parametrize(
    ("extra", "fields", "told"),
    [
        ({f"{UP}.pre_quant_scale": torch.rand(16)}, {}, "pre_quant_scale"),
        ({f"{UP}.svdquant_lora_a": torch.rand(2, 16)}, {}, "svdquant_lora_a"),
        ({f"{UP}.bitmask": torch.zeros(8, 2, dtype=torch.uint8)}, {}, "bitmask"),
        ({}, {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, "transforms"),
    ],
    ids=["activations scaled first", "low rank beside", "sparse", "rotated"],
)
def test_what_else_a_quantised_layer_computes_with_is_not_lost_without_a_word(
    verb: Callable[..., Any],
    extra: dict[str, torch.Tensor],
    fields: dict[str, Any],
    told: str,
    tmp_path: Path,
) -> None:
    config = {"model_type": "llama", "quantization_config": {**SCHEME, **fields}}
    source = write_hub(tmp_path / "in", {**TENSORS, **extra}, config=config)
    with pytest.raises(CheckpointError, match=told):
        verb(source, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", [cast, convert_to_bf16])
def test_the_type_that_was_asked_for_is_stated_even_where_weights_had_it(
    verb: Callable[..., Any], tmp_path: Path
) -> None:
    weights = {"model.a.weight": torch.ones(4, 4).bfloat16()}
    config = {"model_type": "llama", "dtype": "float32", "text_config": {"dtype": "float32"}}
    source = write_hub(tmp_path / "in", weights, config=config)
    verb(source, tmp_path / "out", dtype="bfloat16", options=QUICK)
    made = json.loads((tmp_path / "out/config.json").read_bytes())
    assert made["dtype"] == made["torch_dtype"] == made["text_config"]["dtype"] == "bfloat16"
