"""Blocks of low-precision elements with one scale each: MXFP8, MXFP4, NVFP4 and blocks of FP8.

Blocks run along the last dim of a weight, which is the contracted one. All arithmetic is fp32; a
block scale is chosen by the block's largest value, or by the least squared error among a few
candidates (`Scales`).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.lowp.elements import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    exponent_of,
    pack_nibbles,
    power_of_two,
    round_e2m1_,
    unpack_nibbles,
)

MX_BLOCK = 32
NVFP4_BLOCK = 16
FP8_BLOCK = 128

# What a block scale by the maximum is multiplied with, beside 1, when the error decides. Values
# below 1 clip the largest elements; 1.5 puts the largest on 4, the level below 6. On Gaussian
# weights these three bring the relative error from 0.095 to 0.083, ten would bring it to 0.082.
_NVFP4_FACTORS = (0.875, 0.9375, 1.5)


class Element(Enum):
    """What a block holds."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"

    @property
    def largest(self) -> float:
        return E2M1_MAX if self is Element.E2M1 else E4M3_MAX


class Scales(Enum):
    """How the scale of a block is chosen."""

    MAXIMUM = "max"
    """The smallest that saturates nothing."""
    LEAST_SQUARES = "mse"
    """Of a few around it, the one with the least squared error of the block."""


class Blocks(NamedTuple):
    """Elements and block scales of a weight `[..., K]`.

    `data`: `float8_e4m3fn` of its shape, or uint8 `[..., K/2]` with two E2M1 codes a byte. `scale`:
    `[..., K/block]`, uint8 (E8M0) for MX, `float8_e4m3fn` for NVFP4.
    """

    data: Tensor
    scale: Tensor


def quantise_mx(weight: Tensor, element: Element, scales: Scales) -> Blocks:
    """MXFP8 or MXFP4 of a weight `[..., K]`, K a multiple of 32.

    The exponent is ceil(log2(amax / largest)); with `LEAST_SQUARES` the one below is tried too,
    which saturates what is larger than half the range. A block of zeros has scale 2^-127.
    """
    blocks = _split(weight, MX_BLOCK)
    amax = blocks.abs().amax(-1)
    exponent = _ceil_exponent(amax, element.largest)
    if scales is Scales.LEAST_SQUARES:
        lower = (exponent - 1).clamp(min=-127)
        sizes = _turned_sizes(blocks)
        worse = _squares(sizes, element, exponent) > _squares(sizes, element, lower)
        exponent = torch.where(worse, lower, exponent)
    scaled = blocks / power_of_two(exponent)[..., None]
    return Blocks(_joined(_encoded(scaled, element)), encode_e8m0(exponent))


def dequantise_mx(blocks: Blocks, element: Element) -> Tensor:
    """fp32 `[..., K]`, exact."""
    values = _blocks_of(_decoded(blocks.data, element), MX_BLOCK)
    return _joined(values * decode_e8m0(blocks.scale)[..., None])


def nvfp4_divisor(amax: Tensor | float) -> Tensor:
    """The global scale of a tensor, or of tensors that share one, by their largest value: fp32.

    Stored values are divided by it (the convention of compressed-tensors); 1 for zeros. It is at
    most 2^126: larger ones have no inverse that is a normal number, or are infinite.
    """
    largest = torch.as_tensor(amax, dtype=torch.float32)
    divisor = (E4M3_MAX * E2M1_MAX / largest).clamp(max=2.0**126)
    return torch.where(largest > 0, divisor, torch.ones_like(largest))


def quantise_nvfp4(weight: Tensor, divisor: Tensor, scales: Scales) -> Blocks:
    """NVFP4 of a weight `[..., K]`, K a multiple of 16, with the global scale `nvfp4_divisor`."""
    blocks = _split(weight, NVFP4_BLOCK)
    largest = blocks.abs().amax(-1) * (divisor / E2M1_MAX)
    scale = _nvfp4_scale(largest)
    if scales is Scales.LEAST_SQUARES:
        scale = _nvfp4_search(blocks, largest, divisor)
    codes = encode_e2m1(blocks / (scale / divisor)[..., None])
    return Blocks(pack_nibbles(_joined(codes)), scale.to(torch.float8_e4m3fn))


def nvfp4_power_divisor(amax: Tensor | float) -> Tensor:
    """As `nvfp4_divisor`, rounded down to a power of two: its inverse is exact, and tensors of
    about the same range get the same one."""
    largest = torch.as_tensor(amax, dtype=torch.float32)
    exponent = _ceil_exponent(largest, E4M3_MAX * E2M1_MAX).clamp(min=-126, max=126)
    return torch.where(largest > 0, power_of_two(-exponent), torch.ones_like(largest))


def dequantise_nvfp4(blocks: Blocks, divisor: Tensor) -> Tensor:
    """fp32 `[..., K]`."""
    return dequantise_e2m1(blocks.data, blocks.scale.float() / divisor, NVFP4_BLOCK)


def dequantise_e2m1(data: Tensor, scale: Tensor, block: int) -> Tensor:
    """fp32 `[..., K]` of packed codes `[..., K/2]` and fp32 scales `[..., K/block]`."""
    values = _blocks_of(decode_e2m1(unpack_nibbles(data)), block)
    return _joined(values * scale[..., None])


def quantise_fp8_rows(weight: Tensor) -> Blocks:
    """FP8 with one bf16 scale a row: `[..., K]`, scales `[..., 1]`.

    Codes are made for the rounded scale, so readers that hold scales in bf16 lose nothing.
    """
    rows = _finite(weight)
    scale = _fp8_scale(rows.abs().amax(-1, keepdim=True)).bfloat16()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Blocks(encode_e4m3(rows / scale.float()), scale)


def quantise_fp8_squares(weight: Tensor) -> Blocks:
    """FP8 with one fp32 scale for each 128 by 128 block, the last ones smaller: `[..., N, K]`,
    scales `[..., ceil(N/128), ceil(K/128)]`."""
    values = _finite(weight)
    scale = _fp8_scale(_square_amax(values))
    return Blocks(encode_e4m3(values / spread_squares(scale, values.shape)), scale)


def spread_squares(
    scale: Tensor, shape: torch.Size, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> Tensor:
    """The scale of every element: block (row // 128, column // 128), partial ones too."""
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def _square_amax(values: Tensor) -> Tensor:
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    squares = _blocks_of(padded, FP8_BLOCK).amax(-1)
    return _blocks_of(squares.transpose(-1, -2), FP8_BLOCK).amax(-1).transpose(-1, -2)


def _fp8_scale(amax: Tensor) -> Tensor:
    """That by the maximum; 1 for zeros, and where it would be less than the smallest number."""
    scale = amax / E4M3_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _finite(weight: Tensor) -> Tensor:
    """fp32; `InvalidInputError` when something is infinite or no number."""
    values = weight.float()
    if values.numel() and not all(bound.isfinite() for bound in values.aminmax()):
        raise InvalidInputError(
            "holds infinite values or NaN, which no block scale can express; find where they come "
            "from, or exclude the tensor"
        )
    return values


def _split(weight: Tensor, block: int) -> Tensor:
    if weight.shape[-1] % block:
        raise InvalidInputError(
            f"the contracted dim has {weight.shape[-1]} elements, no multiple of the block of "
            f"{block}; exclude the tensor"
        )
    return _blocks_of(_finite(weight), block)


def _blocks_of(values: Tensor, block: int) -> Tensor:
    """`[..., K]` as `[..., K/block, block]`."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // block, block)


def _joined(blocks: Tensor) -> Tensor:
    """`[..., n, m]` as `[..., n * m]`."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def _ceil_exponent(amax: Tensor, largest: float) -> Tensor:
    """The smallest e with amax <= largest * 2^e, by exact comparison; -127 for zero."""
    exponent = exponent_of(amax) - int(exponent_of(torch.tensor(largest)))
    exponent = exponent.clamp(-127, 127)
    fits = amax.double() <= power_of_two(exponent).double() * largest
    exponent = torch.where(fits, exponent, exponent + 1)
    return torch.where(amax > 0, exponent, torch.full_like(exponent, -127)).clamp(-127, 127)


def _turned_sizes(blocks: Tensor) -> Tensor:
    """Magnitudes of `[..., block]` as `[block, n]`: one operation then goes along many blocks."""
    return blocks.abs().reshape(-1, blocks.shape[-1]).t().contiguous()


def _squares(sizes: Tensor, element: Element, exponent: Tensor) -> Tensor:
    """The squared error of each block, of the shape of `exponent`; `sizes` are turned."""
    scale = power_of_two(exponent).reshape(-1)
    rounded = _rounded(sizes / scale, element)
    return _sum(rounded.mul_(scale).sub_(sizes).square_()).reshape(exponent.shape)


def _sum(values: Tensor) -> Tensor:
    """The sum along dim 0, a power of two, in one order whatever device adds."""
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    return values[0]


def _rounded(sizes: Tensor, element: Element) -> Tensor:
    """The nearest levels of values that are not negative, which may be overwritten."""
    if element is Element.E4M3:
        return encode_e4m3(sizes).float()
    return round_e2m1_(sizes)


def _encoded(values: Tensor, element: Element) -> Tensor:
    return encode_e4m3(values) if element is Element.E4M3 else pack_nibbles(encode_e2m1(values))


def _decoded(data: Tensor, element: Element) -> Tensor:
    return data.float() if element is Element.E4M3 else decode_e2m1(unpack_nibbles(data))


def _nvfp4_scale(scale: Tensor) -> Tensor:
    """The nearest E4M3 number that is not zero, as fp32: at least the smallest, 2^-9."""
    return encode_e4m3(scale.clamp(min=2.0**-9)).float()


def _nvfp4_search(blocks: Tensor, largest: Tensor, divisor: Tensor) -> Tensor:
    """Block scales of the least squared error, among that by the maximum and a few beside it."""
    sizes = _turned_sizes(blocks)
    scale = _nvfp4_scale(largest)
    error = _nvfp4_squares(sizes, scale, divisor)
    for factor in _NVFP4_FACTORS:
        other = _nvfp4_scale(largest * factor)
        squares = _nvfp4_squares(sizes, other, divisor)
        scale = torch.where(squares < error, other, scale)
        error = torch.minimum(squares, error)
    return scale


def _nvfp4_squares(sizes: Tensor, scale: Tensor, divisor: Tensor) -> Tensor:
    factor = (scale / divisor).reshape(-1)
    rounded = round_e2m1_(sizes / factor)
    return _sum(rounded.mul_(factor).sub_(sizes).square_()).reshape(scale.shape)
