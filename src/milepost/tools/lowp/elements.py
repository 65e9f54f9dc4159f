"""Elements of low-precision formats: E2M1 (4 bits), E4M3 (8 bits) and E8M0 scales.

OCP Microscaling Formats (MX) 1.0 defines them. Everything here is exact arithmetic on fp32 and its
bits, so that every device gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127
_EXPONENT_BITS = 0x7F800000
_E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e2m1(values: Tensor) -> Tensor:
    """Codes (uint8, sign in bit 3) of fp32 values: the nearest level, ties to the even code.

    What is larger than 6 becomes 6. The grid is that of halves below 2, of ones below 4 and of twos
    above it; the smallest of the three codes is the one of the grid that applies.
    """
    size = values.abs()
    code = torch.minimum((size * 2).round_(), size.round() + 2)
    code = torch.minimum(code, (size * 0.5).round_() + 4).clamp_(max=7)
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def round_e2m1_(sizes: Tensor) -> Tensor:
    """What `decode_e2m1(encode_e2m1(sizes))` is, in place, of fp32 values that are not negative.

    Half the power of two below a value, from 1 to 4, is the step of the grid there.
    """
    power = (sizes.clamp(1.0, 4.0).view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    step = power.mul_(0.5)
    return sizes.div_(step).round_().mul_(step).clamp_(max=E2M1_MAX)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of codes in the low four bits."""
    levels = torch.tensor([*_E2M1_LEVELS, *(-level for level in _E2M1_LEVELS)])
    return levels.to(codes.device)[codes.to(torch.int64) & 15]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of the last dim in a byte, the even one low: `[..., n]` to `[..., n/2]`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes of `pack_nibbles`: `[..., n]` to `[..., 2n]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(values: Tensor) -> Tensor:
    """`float8_e4m3fn` nearest to fp32 values, ties to even; what is larger than 448 becomes 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def exponent_of(values: Tensor) -> Tensor:
    """floor(log2) of positive fp32 values, subnormal ones too, as int32; -127 or less for zero."""
    _, exponent = torch.frexp(values)
    return torch.where(values > 0, exponent - 1, torch.full_like(exponent, -E8M0_BIAS))


def power_of_two(exponents: Tensor) -> Tensor:
    """2^e as fp32 for int32 exponents in [-127, 127], by its bits: exact on every device."""
    normal = (exponents + E8M0_BIAS) << 23
    bits = torch.where(exponents > -E8M0_BIAS, normal, torch.full_like(normal, 1 << 22))
    return bits.view(torch.float32)


def decode_e8m0(scales: Tensor) -> Tensor:
    """2^(byte - 127) as fp32; NaN for 255."""
    exponents = scales.view(torch.uint8).to(torch.int32) - E8M0_BIAS
    values = power_of_two(exponents.clamp(max=E8M0_BIAS))
    return torch.where(exponents > E8M0_BIAS, torch.full_like(values, torch.nan), values)


def encode_e8m0(exponents: Tensor) -> Tensor:
    """Bytes of powers of two, exponents held to [-127, 127]."""
    return (exponents.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)
