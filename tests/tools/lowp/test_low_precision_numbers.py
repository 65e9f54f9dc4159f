"""Elements and block scales: exact on known values, and never worse than the format allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.lowp.blocks import (
    Blocks,
    Element,
    Scales,
    dequantise_mx,
    dequantise_nvfp4,
    nvfp4_divisor,
    quantise_fp8_rows,
    quantise_fp8_squares,
    quantise_mx,
    quantise_nvfp4,
    spread_squares,
)
from milepost.tools.lowp.elements import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    pack_nibbles,
    round_e2m1_,
    unpack_nibbles,
)


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_e2m1_rounds_to_the_nearest_level_and_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 1e30])
    assert decode_e2m1(encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6]
    values = torch.linspace(-7, 7, 20001)
    levels = decode_e2m1(torch.arange(16))
    nearest = (values[:, None] - levels).abs().amin(-1)
    inside = values.abs() <= 6
    found = decode_e2m1(encode_e2m1(values))
    assert torch.equal((found - values).abs()[inside], nearest[inside])
    assert torch.equal(round_e2m1_(values.abs()).copysign_(values), found)


def test_nibbles_have_the_even_element_in_the_low_half() -> None:
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0xF3]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_e8m0_covers_every_power_down_to_the_subnormal_one() -> None:
    scales = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(scales)
    assert values[0].item() == 2.0**-127 and values[254].item() == 2.0**127
    assert values[127].item() == 1.0 and torch.isnan(values[255])


@pytest.mark.case("V56")
@pytest.mark.parametrize(("element", "limit"), [(Element.E4M3, 0.03), (Element.E2M1, 0.125)])
def test_mx_scales_are_the_smallest_that_saturate_nothing(element: Element, limit: float) -> None:
    weight = weights(64, 256)
    blocks = quantise_mx(weight, element, Scales.MAXIMUM)
    amax = weight.view(64, 8, 32).abs().amax(-1)
    scale = decode_e8m0(blocks.scale)
    assert bool((amax <= scale * element.largest).all())
    assert bool((amax > scale / 2 * element.largest).all())
    assert relative(dequantise_mx(blocks, element), weight) < limit


@pytest.mark.parametrize("amax", [6.0, 448.0, 1.75, 1.75 * 448, 2.0**-100])
@pytest.mark.parametrize("element", Element)
def test_a_block_that_ends_exactly_at_the_range_keeps_its_scale(
    element: Element, amax: float
) -> None:
    weight = torch.full((1, 32), amax)
    scale = decode_e8m0(quantise_mx(weight, element, Scales.MAXIMUM).scale).item()
    assert scale / 2 * element.largest < amax <= scale * element.largest


@pytest.mark.parametrize("element", Element)
def test_what_was_quantised_once_is_quantised_to_the_same_again(element: Element) -> None:
    first = quantise_mx(weights(32, 128), element, Scales.MAXIMUM)
    again = quantise_mx(dequantise_mx(first, element), element, Scales.MAXIMUM)
    assert torch.equal(dequantise_mx(again, element), dequantise_mx(first, element))


def test_the_least_squares_are_never_more_than_by_the_maximum() -> None:
    weight = weights(128, 256)
    divisor = nvfp4_divisor(weight.abs().max())

    def squares(blocks: Blocks) -> Tensor:
        error = (dequantise_nvfp4(blocks, divisor) - weight).square()
        return error.view(128, 16, 16).sum(-1)

    maximum = squares(quantise_nvfp4(weight, divisor, Scales.MAXIMUM))
    least = squares(quantise_nvfp4(weight, divisor, Scales.LEAST_SQUARES))
    assert bool((least <= maximum * 1.0001).all())
    assert float(least.sum()) < 0.8 * float(maximum.sum())


def test_zeros_stay_zeros_in_every_format() -> None:
    zeros = torch.zeros(2, 128)
    for element in Element:
        blocks = quantise_mx(zeros, element, Scales.LEAST_SQUARES)
        assert not dequantise_mx(blocks, element).any() and not blocks.scale.any()
    divisor = nvfp4_divisor(0.0)
    assert not dequantise_nvfp4(quantise_nvfp4(zeros, divisor, Scales.MAXIMUM), divisor).any()
    assert not quantise_fp8_rows(zeros).data.float().any()


@pytest.mark.case("V57")
@pytest.mark.parametrize("shape", [(192, 576), (576, 192), (1, 1), (129, 127)])
def test_fp8_squares_of_sizes_that_the_block_does_not_divide(shape: tuple[int, int]) -> None:
    weight = weights(*shape)
    weight[shape[0] // 2 :] *= 100  # a wrong row of scales would show
    data, scale = quantise_fp8_squares(weight)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    restored = data.float() * spread_squares(scale, weight.shape)
    assert relative(restored, weight) < 0.04
    block = weight[:128, :128].abs().max() / 448
    assert torch.equal(scale[0, 0], block)


def test_values_that_no_scale_can_express_are_refused() -> None:
    weight = weights(4, 64)
    weight[1, 3] = float("nan")
    with pytest.raises(InvalidInputError, match="NaN"):
        quantise_mx(weight, Element.E4M3, Scales.MAXIMUM)
    with pytest.raises(InvalidInputError, match="no multiple of the block of 32"):
        quantise_mx(weights(4, 40), Element.E2M1, Scales.MAXIMUM)
