"""Quantising a weight, from its rows in the source to the tensors that a layout has for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from milepost.engine.source import memory_of
from milepost.errors import InvalidInputError
from milepost.tools.lowp.blocks import (
    FP8_BLOCK,
    MX_BLOCK,
    Blocks,
    nvfp4_divisor,
    nvfp4_power_divisor,
)
from milepost.tools.lowp.selection import module_of
from milepost.tools.lowp.targets import Format, Layout, Target
from milepost.tools.rewrite.groups import BAND_NBYTES, Computed, Group, TensorSpec
from milepost.tools.rewrite.sidecars import constant
from milepost.tools.rewrite.source import SourceTensor

_CHUNK = 2**18
"""Elements that are quantised at a time."""
_SCRATCH_PER_ELEMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight under its name in the output, the rows of the source that hold it, and the dim that
    is contracted."""

    spec: TensorSpec
    tensor: SourceTensor
    axis: int

    @property
    def module(self) -> str:
        return module_of(self.spec.name)

    @property
    def contracted(self) -> tuple[int, ...]:
        """The shape with the contracted dim last."""
        shape = list(self.spec.shape)
        shape.append(shape.pop(self.axis))
        return tuple(shape)


class SharedScale:
    """The one global scale of weights that readers fuse, found when it is first asked for.

    A pass over the weights before they are quantised: band by band, by whichever thread is first.
    """

    def __init__(self, weights: Sequence[Weight], layout: Layout) -> None:
        self._weights = weights
        self._is_power = layout is Layout.BLOCK_SCALED
        self._guard = threading.Lock()
        self._divisor: Tensor | None = None

    def divisor(self) -> Tensor:
        """What values are divided by to get products of codes and block scales: fp32, no dims."""
        with self._guard:
            if self._divisor is None:
                amax = max(_amax(weight) for weight in self._weights)
                make = nvfp4_power_divisor if self._is_power else nvfp4_divisor
                self._divisor = make(amax)
        return self._divisor


def _amax(weight: Weight) -> float:
    tensor = weight.tensor
    step = max(1, BAND_NBYTES // max(1, tensor.row_nbytes))
    largest, stream = 0.0, tensor.stream()
    for first in range(0, tensor.shape[0], step):
        rows = min(step, tensor.shape[0] - first)
        band = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.stored.torch_dtype())
        stream.read_into(memory_of(band))
        low, high = band.aminmax()
        largest = max(largest, -float(low), float(high))
        if not bool(low.isfinite() & high.isfinite()):
            raise InvalidInputError(
                f"{weight.tensor.source.path}: {weight.spec.name}: holds infinite values or NaN, "
                "which no block scale can express; find where they come from, or exclude the tensor"
            )
    return largest


@dataclass(slots=True)
class Errors:
    """Relative errors (Frobenius) of quantised weights by name, as they are made; `limit` is the
    most that is let through."""

    limit: float
    found: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, weight: Weight, values: Tensor, made: Tensor) -> None:
        """Count some elements of a weight; after the last, `InvalidInputError` above the limit."""
        difference = float((made.double() - values.double()).square().sum())
        norm = float(values.double().square().sum())
        name = weight.spec.name
        with self._guard:
            count, before, of = self._sums.get(name, (0, 0.0, 0.0))
            count, difference, norm = count + values.numel(), before + difference, of + norm
            self._sums[name] = count, difference, norm
            if count < prod(weight.spec.shape):
                return
            error = (difference / norm) ** 0.5 if norm else difference**0.5
            self.found[name] = error
        if not error <= self.limit:
            raise InvalidInputError(
                f"{name}: the relative error of the quantised weight is {error:.3f}, above "
                f"{self.limit}; nothing was written; exclude it, or choose a wider format"
            )


def groups_of(
    weight: Weight, target: Target, scale: SharedScale | None, errors: Errors | None
) -> list[Group]:
    """All tensors that a layout has for a weight. NVFP4 needs the global `scale`."""
    work = partial(_make, weight, target, scale, errors)
    specs = _specs(weight, target)
    is_banded = weight.axis != 0 or target.layout is Layout.BLOCK_SCALED
    row = weight.tensor.row_nbytes if len(weight.spec.shape) > 2 else 0
    groups: list[Group] = [
        Computed(
            inputs={"weight": weight.tensor},
            outputs=specs,
            make=lambda tensors: work(tensors["weight"]),
            banded=("weight",) if is_banded else (),
            rows_for=_rows_for(weight, target, specs),
            scratch_nbytes=_CHUNK * _SCRATCH_PER_ELEMENT + 2 * row,
        )
    ]
    if scale is not None:
        groups.append(_global(weight, target, scale))
    if target.layout is Layout.BLOCK_SCALED:
        groups.append(constant(f"{weight.module}.weight_shape", torch.tensor(weight.spec.shape)))
    return groups


def _rows_for(
    weight: Weight, target: Target, specs: tuple[TensorSpec, TensorSpec]
) -> dict[str, int]:
    """How many rows of a weight one row of its codes and of its scales is made of."""
    data, scales = (spec.name for spec in specs)
    if target.has_squares:
        return {} if len(weight.spec.shape) > 2 else {scales: FP8_BLOCK}
    if weight.axis != 0:
        return {}
    is_whole = target.format is Format.FP8  # one scale for all that is contracted
    block = max(1, weight.spec.shape[0]) if is_whole else target.format.multiple
    return {data: 2 if target.format.is_packed else 1, scales: block}


def _global(weight: Weight, target: Target, scale: SharedScale) -> Computed:
    """The global scale: a divisor `[1]`, or the multiplier without dims of `block_scaled`."""
    name = f"{weight.module}.weight_global_scale"
    is_multiplier = target.layout is Layout.BLOCK_SCALED
    spec = TensorSpec(name=name, dtype="F32", shape=() if is_multiplier else (1,))

    def make(_: dict[str, Tensor]) -> Mapping[str, Tensor]:
        divisor = scale.divisor()
        return {name: 1 / divisor if is_multiplier else divisor.reshape(1)}

    return Computed(inputs={}, outputs=(spec,), make=make, scratch_nbytes=2 * BAND_NBYTES)


def _names(weight: Weight, target: Target) -> tuple[str, str]:
    """Of the data and of the scales."""
    match target.layout:
        case Layout.GPT_OSS:
            return f"{weight.spec.name}_blocks", f"{weight.spec.name}_scales"
        case Layout.MXFP8_INV | Layout.DEEPSEEK_FP8:
            return f"{weight.module}.weight", f"{weight.module}.weight_scale_inv"
        case Layout.BLOCK_SCALED:
            return f"{weight.module}.weight_packed", f"{weight.module}.weight_scale"
        case Layout.COMPRESSED_TENSORS:
            packed = "_packed" if target.format.is_packed else ""
            return f"{weight.module}.weight{packed}", f"{weight.module}.weight_scale"


def _specs(weight: Weight, target: Target) -> tuple[TensorSpec, TensorSpec]:
    data, scale = target.shapes(weight.contracted)
    if target.layout is Layout.GPT_OSS:
        data = (*scale, MX_BLOCK // 2)
    elif target.layout is Layout.BLOCK_SCALED:
        data, scale = (_turned(shape, weight.axis) for shape in (data, scale))
    names = _names(weight, target)
    return (
        TensorSpec(name=names[0], dtype=target.data_dtype, shape=data),
        TensorSpec(name=names[1], dtype=target.scale_dtype, shape=scale),
    )


def _turned(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:-1][:axis], shape[-1], *shape[:-1][axis:])


def _make(
    weight: Weight,
    target: Target,
    scale: SharedScale | None,
    errors: Errors | None,
    rows: Tensor,
) -> Mapping[str, Tensor]:
    """The tensors of some rows (dim 0) of a weight."""
    values = rows.movedim(weight.axis, -1)
    divisor = None if scale is None else scale.divisor()
    made = _in_tiles(
        values.reshape(-1, values.shape[-1]),
        FP8_BLOCK if target.has_squares else 1,
        partial(_encoded, weight, target, divisor, errors),
    )
    data, scales = (
        part.reshape(*values.shape[:-1], part.shape[-1]) if not target.has_squares else part
        for part in made
    )
    if target.layout is Layout.GPT_OSS:
        data = data.reshape(*scales.shape, MX_BLOCK // 2)
    elif target.layout is Layout.BLOCK_SCALED:
        data, scales = data.movedim(-1, weight.axis), scales.movedim(-1, weight.axis)
    names = _names(weight, target)
    return {names[0]: data, names[1]: scales}


def _encoded(
    weight: Weight, target: Target, divisor: Tensor | None, errors: Errors | None, rows: Tensor
) -> Blocks:
    """Blocks of a few rows `[n, K]`, made where arithmetic is fastest: it is exact everywhere."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = rows.to(device)
    by = None if divisor is None else divisor.to(device)
    try:
        blocks = target.encode(values, by)
    except InvalidInputError as error:
        where = f"{weight.tensor.source.path}: {weight.spec.name}"
        raise InvalidInputError(f"{where}: {error}") from None
    if errors is not None:
        errors.add(weight, values, target.decode(blocks, by))
    return Blocks(blocks.data.cpu(), blocks.scale.cpu())


def _in_tiles(values: Tensor, side: int, encode: Callable[[Tensor], Blocks]) -> Blocks:
    """`encode` of `[n, K]`, a few rows at a time, and a few columns where blocks span rows."""
    if side == 1:
        return _in_chunks(values, 1, encode)
    tiles = [_in_chunks(tile, side, encode) for tile in torch.split(values, _CHUNK // side, dim=-1)]
    data, scales = zip(*tiles, strict=True)
    return Blocks(torch.cat(data, dim=-1), torch.cat(scales, dim=-1))


def _in_chunks(values: Tensor, step: int, encode: Callable[[Tensor], Blocks]) -> Blocks:
    """`encode` of `[n, K]`, a few rows at a time, a multiple of `step`."""
    columns = max(1, values.shape[-1])
    size = step * max(1, _CHUNK // (columns * step))
    count = values.shape[0]
    if count <= size:
        return encode(values)
    data, scales = None, []
    for first in range(0, count, size):
        part = encode(values[first : first + size])
        if data is None:
            data = part.data.new_empty((count, part.data.shape[-1]))
        data[first : first + size] = part.data
        scales.append(part.scale)
    assert data is not None
    return Blocks(data, torch.cat(scales))
