"""What weights are quantised to: the numbers (format), and how files hold them (layout)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from milepost.tools.lowp.blocks import (
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    Blocks,
    Element,
    Scales,
    dequantise_mx,
    dequantise_nvfp4,
    quantise_fp8_rows,
    quantise_fp8_squares,
    quantise_mx,
    quantise_nvfp4,
    spread_squares,
)


class Format(StrEnum):
    """The numbers."""

    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    FP8 = "fp8"

    @property
    def multiple(self) -> int:
        """What the contracted dim must be a multiple of."""
        blocks = {Format.NVFP4: NVFP4_BLOCK, Format.FP8: 1}
        return blocks.get(self, MX_BLOCK)

    @property
    def is_packed(self) -> bool:
        """Whether two elements are in a byte."""
        return self in (Format.MXFP4, Format.NVFP4)

    @property
    def largest_error(self) -> float:
        """The relative error (Frobenius) of a tensor above which something is wrong."""
        return {Format.NVFP4: 0.25, Format.MXFP4: 0.35}.get(self, 0.08)


class Layout(StrEnum):
    """The names, and the entry in config.json."""

    COMPRESSED_TENSORS = "compressed-tensors"
    BLOCK_SCALED = "block-scaled"
    GPT_OSS = "gpt-oss"
    MXFP8_INV = "mxfp8-inv"
    DEEPSEEK_FP8 = "deepseek-fp8"

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that it can hold."""
        match self:
            case Layout.COMPRESSED_TENSORS:
                return tuple(Format)
            case Layout.BLOCK_SCALED:
                return (Format.MXFP8, Format.MXFP4, Format.NVFP4)
            case Layout.GPT_OSS:
                return (Format.MXFP4,)
            case Layout.MXFP8_INV:
                return (Format.MXFP8,)
            case Layout.DEEPSEEK_FP8:
                return (Format.FP8,)

    @property
    def has_banks(self) -> bool:
        """Whether fused banks of experts stay fused."""
        return self in (Layout.BLOCK_SCALED, Layout.GPT_OSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format in a layout, its block scales chosen by `scales`."""

    format: Format
    layout: Layout
    scales: Scales

    @property
    def has_squares(self) -> bool:
        """Whether blocks span rows, so that rows cannot be made one by one."""
        return self.layout is Layout.DEEPSEEK_FP8

    def encode(self, weight: Tensor, divisor: Tensor | None) -> Blocks:
        """Blocks of a weight `[..., K]`; NVFP4 needs the global scale that it is divided by."""
        match self.format:
            case Format.MXFP8:
                return quantise_mx(weight, Element.E4M3, self.scales)
            case Format.MXFP4:
                return quantise_mx(weight, Element.E2M1, self.scales)
            case Format.NVFP4:
                assert divisor is not None
                return quantise_nvfp4(weight, divisor, self.scales)
            case Format.FP8:
                return (quantise_fp8_squares if self.has_squares else quantise_fp8_rows)(weight)

    def decode(self, blocks: Blocks, divisor: Tensor | None) -> Tensor:
        """fp32 `[..., K]`: what a reader makes of the blocks."""
        match self.format:
            case Format.MXFP8:
                return dequantise_mx(blocks, Element.E4M3)
            case Format.MXFP4:
                return dequantise_mx(blocks, Element.E2M1)
            case Format.NVFP4:
                assert divisor is not None
                return dequantise_nvfp4(blocks, divisor)
            case Format.FP8:
                scale = blocks.scale.float()
                if self.has_squares:
                    scale = spread_squares(scale, blocks.data.shape)
                return blocks.data.float() * scale

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the data and the scales of a weight `[..., K]`."""
        *rows, columns = shape
        data = (*rows, columns // 2 if self.format.is_packed else columns)
        if self.has_squares:
            squares = (-(-rows[-1] // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return data, (*rows[:-1], *squares)
        if self.format is Format.FP8:
            return data, (*rows, 1)
        return data, (*rows, columns // self.format.multiple)

    @property
    def data_dtype(self) -> str:
        return "U8" if self.format.is_packed else "F8_E4M3"

    @property
    def scale_dtype(self) -> str:
        if self.has_squares:
            return "F32"
        return {Format.NVFP4: "F8_E4M3", Format.FP8: "BF16"}.get(self.format, "U8")
