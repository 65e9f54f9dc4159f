"""Weights that bitsandbytes quantised: NF4 and FP4 (`Linear4bit`) and LLM.int8() (`Linear8bitLt`).

The format is that of bitsandbytes 0.50: `QuantState.as_dict(packed=True)`, `quantize_4bit` and
`get_4bit_type` in its functional.py, and `Linear8bitLt._save_to_state_dict` in nn/modules.py.
Arithmetic follows its kernels operation by operation, so that values have the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.format.dtypes import DTYPES
from milepost.hf.conv1d import CONV1D_FAMILIES
from milepost.tools.lowp.coded import Coded, CodedTensors
from milepost.tools.lowp.schemes import (
    BITSANDBYTES,
    BITSANDBYTES_STATE,
    Scheme,
    is_of_bitsandbytes,
)
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source, SourceTensor

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_SIZES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""Of the codes without a sign; the largest stands for 1."""
_SAME_MAP = 1e-6
"""How far a stored table may be from ours: what `QuantState.__eq__` calls the same."""
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INT8_STEP = 7.874015718698502e-3
"""1/127, as `int8_vectorwise_dequant` has it."""
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_ENDS = (*(f".{part}" for part in _PARTS), ".SCB", ".weight_format")


def tables() -> dict[str, Tensor]:
    """The values of the 16 codes of each type of 4 bits, in fp32."""
    sizes = torch.tensor(_FP4_SIZES)
    fp4 = torch.cat((sizes, -sizes))
    return {"nf4": torch.tensor(_NF4), "fp4": fp4.div_(fp4.max())}


def bitsandbytes_tensors(source: Source, scheme: Scheme, problems: Problems) -> CodedTensors | None:
    """What is quantised in a checkpoint of bitsandbytes; None for any other.

    Problems: a part of a quantised weight that is missing or has another size, states that cannot
    be read, unknown types, codes in an order other than by rows, and families whose weights
    transformers stores transposed.
    """
    if scheme.method != BITSANDBYTES and not any(map(is_of_bitsandbytes, source.tensors)):
        return None
    found = _BitsAndBytesTensors(source.tensors, scheme, problems)
    turned = CONV1D_FAMILIES.intersection(source.model_types)
    if turned and found.weights:
        problems.refuse(
            f"{source.path}: {min(turned)} has its linear layers stored transposed once they are "
            "quantised by bitsandbytes, and loaders of the model without it would read them "
            "wrongly; take the model that they were made of"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What is not a tensor in a `QuantState`. `nested` are the elements that share a scale of
    absmax, and the offset of all; None where absmax is not quantised."""

    kind: str
    block: int
    dtype: str
    shape: tuple[int, ...]
    nested: tuple[int, float] | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


class _BitsAndBytesTensors(CodedTensors):
    __slots__ = ("_states",)

    def __init__(
        self, tensors: Mapping[str, SourceTensor], scheme: Scheme, problems: Problems
    ) -> None:
        self._states: dict[str, list[str]] = {}
        for name in tensors:
            stem, mark, _ = name.partition(BITSANDBYTES_STATE)
            if mark:
                self._states.setdefault(stem, []).append(name)
        super().__init__(tensors, scheme, problems)

    def _coded(self, tensor: SourceTensor) -> Coded | None:
        name = tensor.name
        if name in self._states:
            beside = {part: self.tensors.get(f"{name}.{part}") for part in _PARTS}
            held = {part: found for part, found in beside.items() if found is not None}
            own = [tensor, *held.values(), *(self.tensors[n] for n in self._states[name])]
            self.used |= {each.name for each in own}
            return self.problems.attempt(lambda: self._four_bits(tensor, held))
        scale = self.tensors.get(f"{name.removesuffix('.weight')}.SCB")
        if tensor.dtype != "I8" or not name.endswith(".weight") or scale is None:
            return None
        order = self.tensors.get(f"{name}_format")
        self.used |= {each.name for each in (tensor, scale, order) if each is not None}
        return self.problems.attempt(lambda: _eight_bits(tensor, scale, order))

    def _four_bits(self, codes: SourceTensor, held: Mapping[str, SourceTensor]) -> Coded:
        state = _read_state(codes.name, [self.tensors[n] for n in self._states[codes.name]])
        wanted = _PARTS if state.nested is not None else _PARTS[:2]
        missing = [f"{codes.name}.{part}" for part in wanted if part not in held]
        if missing:
            raise InvalidInputError(
                f"{codes.name}: {state.kind} codes of bitsandbytes, without {', '.join(missing)}; "
                "they were lost when the checkpoint was written or split"
            )
        _check_parts(codes, held, state)
        size = DTYPES[codes.dtype].nbits // 8
        inputs = {"codes": codes, "scale": held["absmax"]}
        rows = {"codes": 2 * size, "scale": state.block}
        if state.nested is not None:
            inputs |= {"nested": held["nested_absmax"], "map": held["nested_quant_map"]}
            rows["nested"] = state.block * state.nested[0]
        pairs = _pairs(state.kind)
        rounded: torch.dtype = getattr(torch, state.dtype)

        def decode(given: Mapping[str, Tensor]) -> Tensor:
            data = given["codes"].flatten().view(torch.uint8)
            values = pairs.index_select(0, data.int()).flatten()
            _scale_blocks(values, _scales(given, state), state.block)
            return values.to(rounded).float()

        return Coded(
            name=codes.name,
            shape=state.shape,
            inputs=inputs,
            decode=decode,
            rows=rows,
            scratch=16,
            is_flat=True,
            dtype=_DTYPES[state.dtype],
        )

    def _refuse_the_rest(self) -> None:
        rest = [t for t in self.tensors.values() if t.name not in self.used]
        parts = [t.name for t in rest if _is_part(t.name)]
        stems = {name.rpartition(".")[0] for name in parts}
        is_code = [t.dtype in ("U8", "I8") and t.name.endswith(".weight") for t in rest]
        codes = [t.name for t, found in zip(rest, is_code, strict=True) if found or t.name in stems]
        if codes:
            self.problems.refuse(
                f"{len(codes)} weights quantised by bitsandbytes have no state (quant_state, SCB), "
                f"and codes are no values: {', '.join(codes)}"
            )
        if parts:
            self.problems.refuse(
                f"{len(parts)} parts of quantised weights belong to no weight that is understood: "
                f"{', '.join(parts)}"
            )


def _is_part(name: str) -> bool:
    return BITSANDBYTES_STATE in name or name.endswith(_ENDS)


# ---- 4 bits


def _read_state(name: str, stored: list[SourceTensor]) -> _State:
    """`InvalidInputError` for a state that bitsandbytes would not read."""
    kinds = [tensor.name.partition(BITSANDBYTES_STATE)[2] for tensor in stored]
    if len(kinds) != 1 or kinds[0] not in ("nf4", "fp4"):
        raise InvalidInputError(
            f"{name}: quantised by bitsandbytes as {' and '.join(sorted(kinds))}; expected one of "
            "nf4 and fp4; dequantise it with the library that made it"
        )
    where = stored[0].name
    try:
        document: Mapping[str, Any] = json.loads(bytes(stored[0].read().tolist()))
        has_nested = document.get("nested_offset") is not None
        state = _State(
            kind=str(document["quant_type"]),
            block=int(document["blocksize"]),
            dtype=str(document["dtype"]),
            shape=tuple(int(size) for size in document["shape"]),
            nested=(int(document["nested_blocksize"]), float(document["nested_offset"]))
            if has_nested
            else None,
        )
        nested_dtype = document.get("nested_dtype", "float32")
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise InvalidInputError(
            f"{where}: is no quant_state of bitsandbytes ({type(error).__name__}: {error}); "
            "expected JSON with quant_type, blocksize, dtype and shape; use another copy of the "
            "checkpoint"
        ) from error
    is_known = state.kind == kinds[0] and state.block in _BLOCKS and state.dtype in _DTYPES
    is_nested_known = state.nested is None or (state.nested[0] > 0 and nested_dtype == "float32")
    if not is_known or not is_nested_known or not state.shape or min(state.shape) < 0:
        raise InvalidInputError(
            f"{where}: states {dict(document)}; expected quant_type {kinds[0]}, a blocksize of "
            f"{', '.join(map(str, _BLOCKS))}, a dtype of {', '.join(_DTYPES)}, a shape, and "
            "absmax quantised from float32"
        )
    return state


def _check_parts(codes: SourceTensor, held: Mapping[str, SourceTensor], state: _State) -> None:
    """`InvalidInputError` naming the first part that has another size or type than it must."""
    scales = -(-state.numel // state.block)
    nested = -(-scales // state.nested[0]) if state.nested is not None else 0
    scale_dtypes = ("F32",) if state.nested is None else ("U8",)
    wanted = {
        "absmax": (scale_dtypes, scales),
        "quant_map": (("F32",), 16),
        "nested_absmax": (("F32",), nested),
        "nested_quant_map": (("F32",), 256),
    }
    if state.nested is None and "nested_absmax" in held:
        raise InvalidInputError(
            f"{held['nested_absmax'].name}: is there, and the quant_state says nothing of it "
            "(nested_blocksize, nested_offset); use another copy of the checkpoint"
        )
    for part, tensor in held.items():
        dtypes, count = wanted[part]
        if tensor.dtype not in dtypes or tensor.shape != (count,):
            raise InvalidInputError(
                f"{tensor.name}: {tensor.dtype} {tensor.shape}, expected {dtypes[0]} {(count,)} "
                f"for a weight {state.shape} in blocks of {state.block}"
            )
    nbytes = -(-state.numel // 2)
    if codes.nbytes != nbytes or codes.shape[1:] not in ((), (1,)):
        raise InvalidInputError(
            f"{codes.name}: {codes.dtype} {codes.shape}, expected a column of {nbytes} bytes for a "
            f"weight {state.shape} of 4 bits"
        )
    known, found = tables()[state.kind], held["quant_map"].read()
    if not torch.allclose(found, known, rtol=0, atol=_SAME_MAP):
        raise InvalidInputError(
            f"{held['quant_map'].name}: other values than those of {state.kind}, which "
            "bitsandbytes would not use; the checkpoint is damaged, or of another type"
        )


@cache
def _pairs(kind: str) -> Tensor:
    """The two values that each byte stands for, the high half first: [256, 2]."""
    table, data = tables()[kind], torch.arange(256)
    return torch.stack((table[data >> 4], table[data & 15]), dim=-1)


def _scales(given: Mapping[str, Tensor], state: _State) -> Tensor:
    """The largest value of each block, in fp32."""
    if state.nested is None:
        return given["scale"]
    block, offset = state.nested
    scales = given["map"].index_select(0, given["scale"].int())
    _scale_blocks(scales, given["nested"], block)
    return scales.add_(torch.tensor(offset))


def _scale_blocks(values: Tensor, scales: Tensor, block: int) -> None:
    """Multiply each block of a row of values by its scale, in place; the last may be partial."""
    full = values.numel() // block
    values[: full * block].view(-1, block).mul_(scales[:full, None])
    if values.numel() > full * block:
        values[full * block :].mul_(scales[full])


# ---- 8 bits


def _eight_bits(codes: SourceTensor, scale: SourceTensor, order: SourceTensor | None) -> Coded:
    """`InvalidInputError` for codes in tiles of a GPU, and scales that are not one for each row."""
    stated = [0] if order is None else order.read().flatten().tolist()
    if order is not None and stated != [0]:
        raise InvalidInputError(
            f"{order.name}: is {stated}, codes in tiles of a GPU; bitsandbytes reads [0] alone, by "
            "rows: save the model again with the version that made it"
        )
    rows = codes.shape[:1]
    if len(codes.shape) != 2 or scale.dtype != "F32" or scale.shape != rows:
        raise InvalidInputError(
            f"{scale.name}: {scale.dtype} {scale.shape}, expected F32 {rows} for a weight "
            f"{codes.shape}"
        )
    return Coded(
        name=codes.name,
        shape=codes.shape,
        inputs={"codes": codes, "scale": scale},
        decode=lambda given: given["codes"] * given["scale"].view(-1, 1) * _INT8_STEP,
        scratch=8,
    )
