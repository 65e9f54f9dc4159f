"""Codes and scales become the values that they stand for, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.elements import encode_e4m3
from milepost.tools.rewrite.options import Mode, RewriteOptions
from tests.tools.lowp.coded_tensors import DEEPSEEK, codes, packed, scales, written
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def looked_up(data: Tensor) -> Tensor:
    """Values of packed codes, one by one out of the table; the even one is in the low half."""
    flat = [LEVELS[code] for byte in data.flatten().tolist() for code in (byte & 15, byte >> 4)]
    return torch.tensor(flat).reshape(*data.shape[:-1], 2 * data.shape[-1])


def powers(exponents: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (byte - 127) for byte in exponents.flatten().tolist()]).reshape(
        exponents.shape
    )


@pytest.mark.case("V57")
@pytest.mark.parametrize("shape", [(192, 576), (576, 192), (300, 200), (5, 7), (256, 128)])
def test_partial_last_blocks_of_fp8_get_their_own_scale_out_of_whichever_part(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    weight, norm = codes(*shape), torch.randn(7).bfloat16()
    grid = scales(-(-shape[0] // 128), -(-shape[1] // 128))
    tensors = {"a.weight": weight, "norm.weight": norm, "a.weight_scale_inv": grid}
    source = written(tmp_path / "in", tensors, DEEPSEEK, parts=2)
    report = dequantize(source, tmp_path / "out", options=QUICK)
    row, column = torch.meshgrid(*(torch.arange(n) // 128 for n in shape), indexing="ij")
    expected = (weight.float() * grid[row, column]).bfloat16()
    assert same_bits(read_hub(tmp_path / "out"), {"a.weight": expected, "norm.weight": norm})
    assert report.counts == {"dequantised": 1}
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert "quantization_config" not in config
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


@pytest.mark.case("V57")
def test_scales_of_every_name_type_and_grain_are_taken_as_they_are_meant(tmp_path: Path) -> None:
    bytes_of = packed(3, 2, 2).clamp(100, 140)
    e8m0 = bytes_of.view(torch.float8_e8m0fnu)
    tensors: dict[str, Tensor] = {
        "tensor.weight": codes(40, 70, seed=3),
        "tensor.weight_scale": torch.tensor(0.25),
        "tensor.input_scale": torch.tensor(3.0),
        "mistral.weight": codes(40, 70, seed=4),
        "mistral.qscale_weight": torch.tensor(0.5),
        "mistral.qscale_act": torch.tensor(1.0),
        "experts.gate_up_proj": codes(3, 200, 130, seed=5),
        "experts.gate_up_proj_scale_inv": e8m0,
        "v4.weight": codes(200, 130, seed=6),
        "v4.scale": bytes_of[0].clone(),
        "steps": torch.tensor(3),
    }
    dequantize(written(tmp_path / "in", tensors, DEEPSEEK), tmp_path / "out", options=QUICK)
    made = read_hub(tmp_path / "out")
    spread = powers(bytes_of).repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :130]
    expected = {
        "tensor.weight": tensors["tensor.weight"].float() * 0.25,
        "mistral.weight": tensors["mistral.weight"].float() * 0.5,
        "experts.gate_up_proj": tensors["experts.gate_up_proj"].float() * spread,
        "v4.weight": tensors["v4.weight"].float() * spread[0],
    }
    rounded = {name: value.bfloat16() for name, value in expected.items()}
    assert same_bits(made, {**rounded, "steps": tensors["steps"]})


def test_rows_and_experts_have_scales_of_their_own_where_the_config_states_no_blocks(
    tmp_path: Path,
) -> None:
    tensors = {
        "row.weight": codes(40, 70),
        "row.weight_scale": scales(40, 1).bfloat16(),
        "bank.up_proj": codes(3, 8, 6),
        "bank.up_proj_scale": scales(3, 1, 1),
    }
    source = written(tmp_path / "in", tensors, {"quant_method": "fp8"})
    dequantize(source, tmp_path / "out", dtype="float32", options=QUICK)
    made = read_hub(tmp_path / "out")
    for name, scale in (("row.weight", "row.weight_scale"), ("bank.up_proj", "bank.up_proj_scale")):
        assert torch.equal(made[name], tensors[name].float() * tensors[scale].float()), name


@pytest.mark.case("V55")
def test_banks_of_gpt_oss_are_what_the_table_says_transposed_with_biases_kept(
    tmp_path: Path,
) -> None:
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, exponents = packed(2, 12, 3, 16), packed(2, 12, 3, seed=7).clamp(110, 130)
    bias = torch.randn(2, 12).bfloat16()
    tensors = {f"{stem}_blocks": blocks, f"{stem}_scales": exponents, f"{stem}_bias": bias}
    source = written(tmp_path / "in", tensors, {"quant_method": "mxfp4"})
    dequantize(source, tmp_path / "out", options=QUICK)
    values = (looked_up(blocks) * powers(exponents)[..., None]).flatten(-2).transpose(1, 2)
    expected = {stem: values.bfloat16(), f"{stem}_bias": bias}
    assert same_bits(read_hub(tmp_path / "out"), expected)


def test_four_bits_of_modelopt_and_deepseek_are_what_the_table_says(tmp_path: Path) -> None:
    block = encode_e4m3(scales(8, 4) * 1e4)
    exponents = packed(8, 2, seed=8).clamp(110, 130)
    tensors = {
        "a.weight": packed(8, 32),
        "a.weight_scale": block,
        "a.weight_scale_2": torch.tensor(0.003),
        "b.weight": packed(8, 32, seed=9).view(torch.int8),
        "b.scale": exponents.view(torch.float8_e8m0fnu),
    }
    dequantize(
        written(tmp_path / "in", tensors, None), tmp_path / "out", dtype="fp32", options=QUICK
    )
    made = read_hub(tmp_path / "out")
    scale = (block.float() * 0.003).repeat_interleave(16, 1)
    assert torch.equal(made["a.weight"], looked_up(tensors["a.weight"]) * scale)
    other = looked_up(tensors["b.weight"].view(torch.uint8))
    assert torch.equal(made["b.weight"], other * powers(exponents).repeat_interleave(32, 1))


@pytest.mark.case("V57")
def test_weights_without_scales_and_scales_without_weights_are_refused_all_by_name(
    tmp_path: Path,
) -> None:
    tensors = {
        "bare.weight": codes(4, 4),
        "also.weight": codes(4, 4),
        "lost.weight_scale_inv": scales(1, 1),
        "gone.down_proj_scales": packed(2, 2),
        "twice.weight": codes(4, 4),
        "twice.weight_scale": scales(4, 1),
        "twice.weight_scale_inv": scales(1, 1),
        "odd.weight": codes(300, 200),
        "odd.weight_scale_inv": scales(2, 2),
        "amd.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fnuz),
    }
    source = written(tmp_path / "in", tensors, DEEPSEEK)
    with pytest.raises(InvalidInputError) as refused:
        dequantize(source, tmp_path / "out", options=QUICK)
    message = str(refused.value)
    assert "have no scale" in message and "bare.weight" in message and "also.weight" in message
    assert "twice.weight: has more than one scale" in message
    assert "odd.weight_scale_inv: shape (2, 2)" in message and "(3, 2)" in message
    assert "fnuz" in message and "amd.weight" in message
    assert not (tmp_path / "out").exists()
    lost = {name: tensors[name] for name in ("lost.weight_scale_inv", "gone.down_proj_scales")}
    source = written(tmp_path / "lost", lost, DEEPSEEK)
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    (problem,) = dequantize(source, tmp_path / "out", options=dry).problems
    assert all(name in problem for name in lost)


def test_other_methods_damaged_scales_and_values_out_of_range_are_refused(tmp_path: Path) -> None:
    weight = {"a.weight": codes(64, 64), "a.weight_scale": packed(64, 2).clamp(max=140)}
    gptq = written(tmp_path / "gptq", weight, {"quant_method": "gptq"})
    with pytest.raises(InvalidInputError, match="quantised by gptq"):
        dequantize(gptq, tmp_path / "out", options=QUICK)
    plain = written(tmp_path / "plain", {"a.weight": torch.ones(2, 2)}, None)
    with pytest.raises(InvalidInputError, match="no quantised weights"):
        dequantize(plain, tmp_path / "out", options=QUICK)
    nan = written(tmp_path / "nan", {**weight, "a.weight_scale": packed(64, 2) | 255}, None)
    with pytest.raises(InvalidInputError, match=r"a\.weight.*infinite values or NaN"):
        dequantize(nan, tmp_path / "out", options=QUICK)
    large = {"a.weight": codes(64, 64), "a.weight_scale": torch.tensor(1e6)}
    with pytest.raises(InvalidInputError, match="too large for float16"):
        dequantize(
            written(tmp_path / "large", large, None), tmp_path / "out", dtype="fp16", options=QUICK
        )
    assert not (tmp_path / "out").exists()
