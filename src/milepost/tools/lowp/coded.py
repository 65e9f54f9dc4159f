"""Tensors of codes and the scales that make values of them, found by names, dtypes and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, lcm, prod
from typing import TypeAlias

import torch
from torch import Tensor

from milepost.tools.lowp.blocks import (
    MX_BLOCK,
    NVFP4_BLOCK,
    Blocks,
    Element,
    dequantise_e2m1,
    dequantise_mx,
    dequantise_nvfp4,
    spread_squares,
)
from milepost.tools.lowp.elements import decode_e8m0
from milepost.tools.lowp.schemes import Block, Scheme, scales_of
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import SourceTensor

Decode: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]

_CHUNK = 2**18
"""Elements of a transposed bank that are made at a time."""
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_E8M0 = ("U8", "F8_E8M0")
_ACTIVATIONS = re.compile(
    r".*\.(?:input_scale|input_global_scale|output_scale|qscale_act|activation_scale"
    r"|[qkv]_scale|kv_scale)"
)
_SCALE = re.compile(
    r".*(?:weight_scale(?:_inv|_2)?|_scale_inv|_proj_scale|weight_global_scale|weight_packed"
    r"|weight_shape|weight_zero_point|weight_g_idx|qscale_weight|_proj_(?:scales|blocks)"
    r"|\.pre_quant_scale|\.svdquant_lora_[ab]|\.compressed|\.bitmask)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A weight that is made of codes and scales.

    `decode` makes fp32 values of the `inputs`, by key. `rows` has for each input how many rows
    (dim 0) of the result one row of it is for, so that a run of rows can be made alone; inputs
    without an entry are given whole to each call. Where blocks run on from row to row it `is_flat`:
    `rows` counts elements then, and `decode` makes a run of them. `scratch` is what an element of
    the result takes while it is made, in bytes. `dtype` is the float type that `decode` rounds to,
    where the format has one.
    """

    name: str
    shape: tuple[int, ...]
    inputs: Mapping[str, SourceTensor]
    decode: Decode
    rows: Mapping[str, int] = field(default_factory=lambda: {"codes": 1, "scale": 1})
    scratch: int = 24
    is_flat: bool = False
    dtype: str | None = None

    @property
    def step(self) -> int:
        """Runs of rows begin at multiples of this."""
        return lcm(*self.rows.values())


@dataclass(slots=True)
class CodedTensors:
    """What of a checkpoint's tensors is quantised. `weights` are by the name of their first input;
    `used` are names of all their inputs, `dropped` those that only matter to a quantised model."""

    tensors: Mapping[str, SourceTensor]
    scheme: Scheme
    problems: Problems
    weights: dict[str, Coded] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in self.tensors.values():
            found = self._coded(tensor)
            if found is not None:
                self.weights[tensor.name] = found
                self.used |= {each.name for each in found.inputs.values()}
        for tensor in self.tensors.values():
            is_scalar = prod(tensor.shape) == 1 and tensor.name not in self.used
            if is_scalar and _ACTIVATIONS.fullmatch(tensor.name):
                self.dropped[tensor.name] = "scales activations of the quantised model"
        self._refuse_the_rest()

    def _refuse_the_rest(self) -> None:
        rest = [t for t in self.tensors.values() if t.name not in {*self.used, *self.dropped}]
        scales = [t.name for t in rest if _SCALE.fullmatch(t.name) or t.dtype == "F8_E8M0"]
        codes = [t for t in rest if t.dtype.startswith(("F8_E4", "F8_E5", "F4", "F6"))]
        other = [t.name for t in codes if "FNUZ" in t.dtype]
        bare = [t.name for t in codes if t.name not in other and t.name not in scales]
        if other:
            self.problems.refuse(
                f"float8 of the fnuz kind has another exponent bias and is not understood: "
                f"{', '.join(other)}"
            )
        if bare:
            self.problems.refuse(
                f"{len(bare)} quantised weights have no scale, and codes are no values: "
                f"{', '.join(bare)}"
            )
        if scales and not other:
            self.problems.refuse(
                f"{len(scales)} scales or codes belong to no weight that is understood: "
                f"{', '.join(scales)}"
            )

    def _coded(self, tensor: SourceTensor) -> Coded | None:
        name = tensor.name
        if name.endswith(".weight_packed"):
            return self._packed(tensor, name.removesuffix(".weight_packed"))
        if name.endswith("_blocks") and tensor.dtype == "U8":
            return self._gpt_oss(tensor, name.removesuffix("_blocks"))
        if tensor.dtype in (*_EIGHT_BITS, "U8", "I8") and not _SCALE.fullmatch(name):
            return self._weight(tensor)
        return None

    def _weight(self, tensor: SourceTensor) -> Coded | None:
        """`X.weight` or a bank `X`, with a scale beside it."""
        name = tensor.name
        found = [self.tensors[each] for each in scales_of(name) if each in self.tensors]
        if not found:
            return None
        if len(found) > 1:
            listed = ", ".join(each.name for each in found)
            message = f"{name}: has more than one scale ({listed}); only one can be its"
            self._refuse(message, tensor, *found)
            return None
        (scale,) = found
        second = self.tensors.get(f"{name}_scale_2")
        if tensor.dtype == "U8" and second is not None:
            return self._modelopt(tensor, scale, second)
        if tensor.dtype == "I8" and scale.dtype == "F8_E8M0":
            return self._mx_packed(name, tensor, scale)
        if tensor.dtype in _EIGHT_BITS:
            return self._eight_bits(tensor, scale, name.removesuffix(".weight"))
        return None

    def _eight_bits(self, tensor: SourceTensor, scale: SourceTensor, module: str) -> Coded | None:
        """One scale for all, for each expert, for each row, or for each block."""
        shape, block = tensor.shape, self.scheme.block_of(module)
        factor = partial(_factor, is_e8m0=scale.dtype in _E8M0)
        make = partial(
            Coded, name=tensor.name, shape=shape, inputs={"codes": tensor, "scale": scale}
        )
        is_by_row = self.scheme.is_by_row(module)
        if prod(scale.shape) == 1 and not (is_by_row and prod(shape[:-1]) != 1):
            return make(
                decode=lambda t: t["codes"].float() * factor(t["scale"]).flatten(),
                rows={"codes": 1},
            )
        if block is None and scale.dtype in _E8M0 and scale.shape == _scales(shape, (1, MX_BLOCK)):
            block = (1, MX_BLOCK)
        if block is not None and len(shape) >= 2 and scale.shape == _scales(shape, block):
            return make(
                decode=lambda t: (
                    t["codes"].float() * spread_squares(factor(t["scale"]), t["codes"].shape, block)
                ),
                rows={"codes": 1, "scale": block[0] if len(shape) == 2 else 1},
            )
        ones = [1] * (len(shape) - 1)
        by_row = (shape[:-1], (*shape[:-1], 1), shape[:1], (*shape[:1], *ones))
        if block is None and scale.shape in by_row:
            missing = [1] * (len(shape) - len(scale.shape))
            return make(
                decode=lambda t: (
                    t["codes"].float() * factor(t["scale"]).reshape(*t["scale"].shape, *missing)
                )
            )
        self._refuse_shape(tensor, scale, block)
        return None

    def _refuse_shape(self, tensor: SourceTensor, scale: SourceTensor, block: Block | None) -> None:
        if block is None:
            wanted = "config.json states no blocks: expected a scale for all, or for each row"
            if self.scheme.is_by_row(tensor.name.removesuffix(".weight")):
                wanted = f"config.json states one for each row: expected {(*tensor.shape[:-1], 1)}"
        else:
            wanted = f"blocks are {block}: expected {_scales(tensor.shape, block)}"
        message = f"{scale.name}: shape {scale.shape} for a weight {tensor.shape}, but {wanted}"
        self._refuse(message, tensor, scale)

    def _modelopt(
        self, tensor: SourceTensor, scale: SourceTensor, second: SourceTensor
    ) -> Coded | None:
        """NVFP4 whose global scale is multiplied with."""
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        wanted = _scales(shape, (1, NVFP4_BLOCK))
        if not self._fits(tensor, scale, wanted, "F8_E4M3", beside=[second]):
            return None
        return Coded(
            name=tensor.name,
            shape=shape,
            inputs={"codes": tensor, "scale": scale, "global": second},
            decode=lambda t: dequantise_e2m1(
                t["codes"], t["scale"].float() * t["global"].float(), NVFP4_BLOCK
            ),
        )

    def _mx_packed(self, name: str, tensor: SourceTensor, scale: SourceTensor) -> Coded | None:
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        if not self._fits(tensor, scale, _scales(shape, (1, MX_BLOCK)), *_E8M0):
            return None
        return Coded(
            name=name,
            shape=shape,
            inputs={"codes": tensor, "scale": scale},
            decode=lambda t: dequantise_mx(
                Blocks(t["codes"].view(torch.uint8), t["scale"]), Element.E2M1
            ),
        )

    def _packed(self, tensor: SourceTensor, stem: str) -> Coded | None:
        """`weight_packed` of compressed-tensors, or of block_scaled."""
        is_block_scaled = self.scheme.method == "block_scaled"
        if tensor.dtype != "U8" and not is_block_scaled:
            return None  # integers of other bits
        parts = ("weight_scale", "weight_global_scale", "weight_shape")
        beside = {p: self.tensors[f"{stem}.{p}"] for p in parts if f"{stem}.{p}" in self.tensors}
        scale = beside.get("weight_scale")
        wanted = ["weight_scale", *(["weight_shape"] if is_block_scaled else ())]
        if scale is not None and scale.dtype == "F8_E4M3":
            wanted.append("weight_global_scale")
        lost = [f"{stem}.{part}" for part in wanted if part not in beside]
        if lost:
            message = f"{tensor.name}: codes without {', '.join(lost)}, so they are no values"
            self._refuse(message, tensor, *beside.values())
        if lost or scale is None:
            return None
        if is_block_scaled:
            return self._block_scaled(tensor, scale, stem)
        divisor = beside.get("weight_global_scale")
        if divisor is None:
            return self._mx_packed(f"{stem}.weight", tensor, scale)
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        wanted_scales = _scales(shape, (1, NVFP4_BLOCK))
        if not self._fits(tensor, scale, wanted_scales, "F8_E4M3", beside=[divisor]):
            return None
        return Coded(
            name=f"{stem}.weight",
            shape=shape,
            inputs={"codes": tensor, "scale": scale, "global": divisor},
            decode=lambda t: dequantise_nvfp4(Blocks(t["codes"], t["scale"]), t["global"].float()),
        )

    def _block_scaled(self, tensor: SourceTensor, scale: SourceTensor, stem: str) -> Coded | None:
        document = self.scheme.document
        names = document.get("quantized_weights") or ()
        name = f"{stem}.weight" if f"{stem}.weight" in names else stem
        axes = document.get("weight_axes") or {}
        dims = len(tensor.shape)
        axis = int(axes.get(name, document.get("contraction_axis", -1))) % dims
        stated = self.tensors[f"{stem}.weight_shape"]
        multiplier = self.tensors.get(f"{stem}.weight_global_scale")
        shape = list(tensor.shape)
        is_packed = tensor.dtype == "U8"
        shape[axis] *= 2 if is_packed else 1
        block = MX_BLOCK if multiplier is None else NVFP4_BLOCK
        scales = [*shape[:axis], shape[axis] // block, *shape[axis + 1 :]]
        dtypes = ("U8",) if multiplier is None else ("F8_E4M3",)
        beside = [stated, *([] if multiplier is None else [multiplier])]
        if not self._fits(tensor, scale, tuple(scales), *dtypes, beside=beside):
            return None
        element = Element.E2M1 if is_packed else Element.E4M3

        def decode(t: Mapping[str, Tensor]) -> Tensor:
            blocks = Blocks(t["codes"].movedim(axis, -1), t["scale"].movedim(axis, -1))
            if "global" in t:
                values = dequantise_e2m1(blocks.data, blocks.scale.float() * t["global"], block)
            else:
                values = dequantise_mx(blocks, element)
            return values.movedim(-1, axis)

        inputs = {"codes": tensor, "scale": scale, "shape": stated}
        if multiplier is not None:
            inputs["global"] = multiplier
        per_code = 2 if is_packed else 1
        rows = {"codes": per_code, "scale": block} if axis == 0 else {"codes": 1, "scale": 1}
        return Coded(name=name, shape=tuple(shape), inputs=inputs, decode=decode, rows=rows)

    def _gpt_oss(self, tensor: SourceTensor, stem: str) -> Coded | None:
        """Banks of gpt-oss: blocks of 16 bytes along the input dim, stored transposed."""
        scale = self.tensors.get(f"{stem}_scales")
        if scale is None or len(tensor.shape) != 4 or tensor.shape[-1] * 2 != MX_BLOCK:
            return None
        if not self._fits(tensor, scale, tensor.shape[:-1], "U8"):
            return None
        experts, rows, blocks, _ = tensor.shape
        step = max(1, _CHUNK // max(1, blocks * MX_BLOCK))

        def decode(t: Mapping[str, Tensor]) -> Tensor:
            codes, scales = t["codes"].flatten(-2), t["scale"]
            made = torch.empty(codes.shape[0], blocks * MX_BLOCK, rows)
            for first in range(0, rows, step):
                part = slice(first, first + step)
                values = dequantise_mx(Blocks(codes[:, part], scales[:, part]), Element.E2M1)
                made[..., part] = values.transpose(-1, -2)
            return made

        return Coded(
            name=stem,
            shape=(experts, blocks * MX_BLOCK, rows),
            inputs={"codes": tensor, "scale": scale},
            decode=decode,
            scratch=4,
        )

    def _fits(
        self,
        codes: SourceTensor,
        scale: SourceTensor,
        shape: tuple[int, ...],
        *dtypes: str,
        beside: Sequence[SourceTensor] = (),
    ) -> bool:
        if scale.shape == shape and scale.dtype in dtypes:
            return True
        self._refuse(
            f"{scale.name}: {scale.dtype} {scale.shape}, expected {' or '.join(dtypes)} {shape}",
            codes,
            scale,
            *beside,
        )
        return False

    def _refuse(self, message: str, *tensors: SourceTensor) -> None:
        """A problem of these tensors, which are not told about again."""
        self.problems.refuse(message)
        self.used |= {tensor.name for tensor in tensors}


def _scales(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of the scales of a weight, one for each block; the last ones may be partial."""
    if len(shape) < 2:
        return ()
    return (*shape[:-2], ceil(shape[-2] / block[0]), ceil(shape[-1] / block[1]))


def _factor(scale: Tensor, *, is_e8m0: bool) -> Tensor:
    return decode_e8m0(scale) if is_e8m0 else scale.float()
