"""Low precision on reported faults: listed maxima, codes packed again, defaults, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.blocks import (
    Element,
    Scales,
    dequantise_mx,
    dequantise_nvfp4,
    nvfp4_divisor,
    quantise_mx,
    quantise_nvfp4,
)
from milepost.tools.lowp.elements import decode_e8m0
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from tests.tools.lowp.models import save_model
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub

UP = "model.layers.0.mlp.up_proj.weight"
MAXIMA = [2.9, 5.7, 1.4, 6.0, 7.9, 2.0**-130, 0.0]
WITH_ATTENTION = Scope(include=["*.self_attn.*_proj.weight"])


def blocks_of(size: int) -> Tensor:
    """One block for each maximum, the last of which are all of one value."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(len(MAXIMA), size, generator=generator) * 2 - 1
    rows[:, 0] = 1
    rows *= torch.tensor(MAXIMA)[:, None]
    equal = torch.full((1, size), 5.7)
    return torch.cat([rows, equal]).reshape(1, -1)


@pytest.mark.case("V56")
@pytest.mark.parametrize("rule", Scales)
@pytest.mark.parametrize(("element", "step"), [(Element.E4M3, 2.0**-4), (Element.E2M1, 0.25)])
def test_blocks_of_listed_maxima_lie_within_the_bound_of_their_element(
    element: Element, step: float, rule: Scales
) -> None:
    weight = blocks_of(32)
    made = quantise_mx(weight, element, rule)
    values, found = weight.view(-1, 32), dequantise_mx(made, element).float().view(-1, 32)
    scale = decode_e8m0(made.scale).view(-1)
    amax = values.abs().amax(-1)
    if rule is Scales.MAXIMUM:  # ceil(log2(amax / largest)), nowhere saturated, nowhere too large
        zero = amax == 0
        assert bool((amax <= scale * element.largest).all())
        fits = (amax > scale / 2 * element.largest) | (scale == 2.0**-127)
        assert bool((fits | zero).all())
    # half the gap of a value's binade, and half of the smallest one; a maximum may saturate by mse
    bound = (values.abs() * step).maximum(scale[:, None] * element.largest * 2.0**-9)
    if element is Element.E2M1:
        bound = (values.abs() * step).maximum(scale[:, None] * 0.25)
    worst = ((found - values).abs() / bound.clamp_min(1e-45)).amax()
    assert float(worst) <= (1.0 if rule is Scales.MAXIMUM else 1.5)
    assert not found[MAXIMA.index(0.0)].any()
    error = (found - values).norm() / values.norm()
    assert float(error) < (0.03 if element is Element.E4M3 else 0.13)


@pytest.mark.case("V56")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rule", Scales)
def test_one_value_that_is_no_number_is_refused_in_every_format(value: float, rule: Scales) -> None:
    weight = blocks_of(32)
    weight[0, 40] = value
    for element in Element:
        with pytest.raises(InvalidInputError, match="NaN"):
            quantise_mx(weight, element, rule)
    with pytest.raises(InvalidInputError, match="NaN"):
        quantise_nvfp4(weight, nvfp4_divisor(8.0), rule)


@pytest.mark.case("V56")
@pytest.mark.parametrize("rule", Scales)
def test_codes_of_nvfp4_are_made_for_the_scale_that_is_stored(rule: Scales) -> None:
    """Codes for the exact scale beside the rounded one would be off by up to a sixteenth more."""
    weight = blocks_of(16).repeat(4, 1)
    divisor = nvfp4_divisor(weight.abs().max())
    made = quantise_nvfp4(weight, divisor, rule)
    found = dequantise_nvfp4(made, divisor).view(-1, 16)
    values = weight.view(-1, 16)
    scale = made.scale.float().view(-1, 1) / divisor
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([-levels, levels]) * scale[..., None]
    nearest = (values[..., None] - table).abs().amin(-1)
    torch.testing.assert_close((found - values).abs(), nearest, rtol=1e-4, atol=1e-7)


# ---- V55


@pytest.mark.case("V55")
@pytest.mark.parametrize("format", [Format.MXFP4, Format.NVFP4, Format.FP8])
def test_values_of_codes_are_packed_again_to_the_same_bytes(tmp_path: Path, format: Format) -> None:
    source = save_model("gpt_oss" if format is Format.MXFP4 else "llama", tmp_path / "in")
    run: dict[str, Any] = {"format": format, "options": QUICK}
    quantize_to_lowp(source, tmp_path / "q", **run)
    dequantize(tmp_path / "q", tmp_path / "back", dtype="float32", options=QUICK)
    quantize_to_lowp(tmp_path / "back", tmp_path / "again", **run)
    first, second = read_hub(tmp_path / "q"), read_hub(tmp_path / "again")
    coded = [name for name, tensor in first.items() if tensor.element_size() == 1]
    assert len(coded) >= 4
    assert same_bits({n: first[n] for n in coded}, {n: second[n] for n in coded})


# ---- the defaults


@pytest.mark.parametrize(
    ("format", "rule"),
    [(Format.NVFP4, Scales.LEAST_SQUARES), (Format.MXFP4, Scales.LEAST_SQUARES)],
)
def test_scales_are_searched_for_by_default_where_the_guide_measured_that_it_helps(
    tmp_path: Path, format: Format, rule: Scales
) -> None:
    source = save_model("llama", tmp_path / "in")
    parts = {}
    for name, scales in (("default", None), *((each.value, each) for each in Scales)):
        quantize_to_lowp(source, tmp_path / name, format=format, scales=scales, options=QUICK)
        parts[name] = content(tmp_path / name)["model.safetensors"]
    assert parts["default"] == parts[rule.value]
    assert len(set(parts.values())) == 2


# ---- devices


@pytest.mark.case("V56")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", [Layout.COMPRESSED_TENSORS, Layout.BLOCK_SCALED])
@pytest.mark.parametrize("format", [Format.MXFP8, Format.MXFP4, Format.NVFP4])
def test_bytes_made_on_a_gpu_are_those_of_the_processor(
    tmp_path: Path, format: Format, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {UP: torch.randn(3000, 512) * 0.02, UP.replace("up", "gate"): blocks_of(32)}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    for scales in Scales:
        run: dict[str, Any] = {"format": format, "layout": layout, "scales": scales}
        quantize_to_lowp(source, tmp_path / f"gpu-{scales}", options=QUICK, **run)
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: False)
            quantize_to_lowp(source, tmp_path / f"cpu-{scales}", options=QUICK, **run)
        made = [content(tmp_path / f"{device}-{scales}") for device in ("gpu", "cpu")]
        assert made[0]["model.safetensors"] == made[1]["model.safetensors"]
