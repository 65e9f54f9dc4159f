"""`quantize_to_lowp` where formats end: the smallest numbers, and what no layout can hold."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.blocks import (
    Scales,
    dequantise_nvfp4,
    nvfp4_divisor,
    quantise_fp8_rows,
    quantise_fp8_squares,
    quantise_nvfp4,
    spread_squares,
)
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import Mode, RewriteOptions
from tests.tools.lowp.models import decompressed
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DRY = RewriteOptions(mode=Mode.DRY_RUN)
UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts"
SMALLEST = 2.0**-149


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.02


def source_of(place: Path, kind: str) -> Path:
    """A dense model, one with banks, one with a stack of matrices in place of one expert."""
    tensors = {
        "llama": {UP: weights(64, 64)},
        "gpt_oss": {f"{EXPERTS}.gate_up_proj": weights(3, 64, 64)},
        "qwen3_moe": {f"{EXPERTS}.0.up_proj.weight": weights(3, 64, 64)},
    }[kind]
    return write_hub(place, tensors, config={"model_type": kind})


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "qwen3_moe"])
def test_what_a_layout_cannot_hold_is_a_problem_of_the_dry_run_and_refused_by_the_real_one(
    tmp_path: Path, kind: str, axis: int
) -> None:
    source = source_of(tmp_path / "in", kind)
    refused = 0
    for format, layout in product(Format, Layout):
        scope = Scope(axis=axis)
        report = quantize_to_lowp(
            source, tmp_path / "q", format=format, layout=layout, scope=scope, options=DRY
        )
        if not report.problems:
            continue
        refused += 1
        with pytest.raises(InvalidInputError) as caught:
            quantize_to_lowp(
                source, tmp_path / "q", format=format, layout=layout, scope=scope, options=QUICK
            )
        assert all(message in str(caught.value) for message in report.problems)
        assert not (tmp_path / "q").exists()
    assert refused >= 9


def test_squares_of_a_bank_are_refused_with_the_words_of_other_layouts(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", "gpt_oss")
    found = [
        quantize_to_lowp(source, tmp_path / "q", format=Format.FP8, layout=layout, options=DRY)
        for layout in (Layout.DEEPSEEK_FP8, Layout.COMPRESSED_TENSORS)
    ]
    ours, theirs = (report.problems for report in found)
    assert len(ours) == len(theirs) == 1
    assert "deepseek-fp8 needs experts one by one" in ours[0]
    assert ours[0].replace("deepseek-fp8", "compressed-tensors") == theirs[0]


@pytest.mark.parametrize("amax", [1e-30, 7e-36, 1e-38, 1e-41, SMALLEST])
def test_the_smallest_weights_have_a_finite_global_scale_and_no_reader_finds_nan(
    amax: float, tmp_path: Path
) -> None:
    values = weights(64, 64)
    weight = values / values.abs().max() * amax
    source = write_hub(tmp_path / "in", {UP: weight}, config={"model_type": "llama"})
    quantize_to_lowp(source, tmp_path / "q", format=Format.NVFP4, options=QUICK)
    made = read_hub(tmp_path / "q")
    scale = made[UP.replace("weight", "weight_global_scale")]
    assert bool(scale.isfinite()) and bool((1 / scale).isfinite())
    assert float(1 / scale) >= torch.finfo(torch.float32).tiny
    theirs = decompressed(tmp_path / "q", tmp_path / "theirs")
    assert bool(theirs[UP].isfinite().all())
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    assert same_bits(theirs, read_hub(tmp_path / "back"))
    dequantize(tmp_path / "q", tmp_path / "wide", dtype="float32", options=QUICK)
    found = read_hub(tmp_path / "wide")[UP].double()
    step = 2.0**-9 / 2.0**126 / 2  # half of the smallest level in a block of the smallest scale
    assert float((found - weight.double()).abs().max()) <= max(amax / 6, step)


def test_a_global_scale_at_its_bound_costs_no_accuracy_for_weights_that_fit() -> None:
    values = weights(64, 64)
    values /= values.abs().max()
    errors = []
    for exponent in (0, -118):
        weight = values * 2.0**exponent
        divisor = nvfp4_divisor(weight.abs().max())
        found = dequantise_nvfp4(quantise_nvfp4(weight, divisor, Scales.MAXIMUM), divisor)
        errors.append(float((found.double() - weight.double()).norm() / weight.double().norm()))
    assert float(divisor) == 2.0**126 and float(nvfp4_divisor(0.0)) == 1.0
    assert errors[1] < 1.1 * errors[0] < 0.12


@pytest.mark.parametrize("amax", [SMALLEST, 3e-43, 1e-38])
def test_fp8_of_the_smallest_numbers_has_no_scale_of_zero_and_no_nan(amax: float) -> None:
    weight = torch.zeros(130, 130)
    weight[5, 7] = weight[129, 129] = amax
    squares, rows = quantise_fp8_squares(weight), quantise_fp8_rows(weight)
    assert bool((squares.scale > 0).all()) and bool((rows.scale > 0).all())
    read = squares.data.float() * spread_squares(squares.scale, weight.shape)
    assert float((read - weight).abs().max()) <= max(amax * 0.04, 3e-43)
    read = rows.data.float() * rows.scale.float()  # of bf16, whose smallest number is 9e-41
    assert float((read - weight).abs().max()) <= amax
