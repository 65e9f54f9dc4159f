"""`dequantize`: codes and scales become the floats that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.carried import Carried, carried_files
from milepost.tools.lowp.coded import Coded, CodedTensors
from milepost.tools.lowp.schemes import KEY, scheme_of, without_scheme
from milepost.tools.rewrite.dtypes import float_type, refuse_overflow, torch_type
from milepost.tools.rewrite.groups import Computed, Group, TensorSpec, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, open_source

_CHUNK = 2**18
"""Elements that are computed at a time."""
_SCRATCH_PER_ELEMENT = 24
_DOCUMENTS = (f"{KEY}.json", "hf_quant_config.json")


def dequantize(
    source: PathLike,
    output: PathLike,
    *,
    dtype: str = "bfloat16",
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the quantised weights of `source` as floats of `dtype`, all others as they are.

    Values are codes times scales in fp32, rounded once. Understood are FP8 with a scale for a
    tensor, a row, or a block of the size that config.json states (the last ones may be partial);
    MXFP8, MXFP4 and NVFP4 of compressed-tensors, ModelOpt, GPT-OSS, DeepSeek and `block_scaled`.
    Scales may lie in any part. Refused, all at once: a weight without its scale, a scale without
    its weight, scales of another shape than they must have, float8 of the fnuz kind, and methods
    whose codes are no floats. config.json no longer says that weights are quantised. Other errors:
    see `run_rewrite`.
    """
    wanted = float_type(dtype)
    opened = open_source(source)
    rewrite = Rewrite(
        verb="dequantize",
        sources=[opened],
        groups=[],
        arguments={"dtype": wanted},
        edit_config=without_scheme,
    )
    found = CodedTensors(opened.tensors, scheme_of(opened), rewrite.problems)
    if not found.weights and not rewrite.problems:
        rewrite.problems.refuse(
            f"{opened.path}: holds no quantised weights; milepost cast changes the type of floats"
        )
    rewrite.groups = _groups(opened, found, wanted)
    rewrite.dropped = found.dropped
    rewrite.counts = {"dequantised": len(found.weights)}
    rewrite.aux = rewrite.problems.attempt(lambda: _carried(opened))
    return run_rewrite(rewrite, output, options)


def _carried(source: Source) -> Carried:
    """Files beside the weights but those that say how they were quantised."""
    carried = carried_files(source.checkpoint)
    for name in _DOCUMENTS:
        carried.paths.pop(name, None)
    return carried


def _groups(source: Source, found: CodedTensors, dtype: str) -> list[Group]:
    """In the order of the source: each weight where its codes were."""
    groups: list[Group] = []
    for tensor in source.tensors.values():
        coded = found.weights.get(tensor.name)
        if coded is not None:
            groups.append(_floats(coded, dtype, str(source.path)))
        elif tensor.name not in found.used and tensor.name not in found.dropped:
            groups.append(passed(tensor))
    return groups


def _floats(coded: Coded, dtype: str, where: str) -> Computed:
    """The weight as floats, in bands of rows where one row needs no other."""
    wanted = torch_type(dtype)

    def make(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {coded.name: _decoded(coded, tensors, wanted, f"{where}: {coded.name}")}

    in_bands = tuple(key for key in coded.inputs if key not in coded.whole)
    is_banded = coded.step == 1 and bool(in_bands) and all(coded.shape)
    rows = coded.shape[0] if len(coded.shape) > 2 else -(-prod(coded.shape) // _CHUNK)
    scratch = _SCRATCH_PER_ELEMENT * max(_CHUNK, prod(coded.shape) // max(1, rows))
    return Computed(
        inputs=coded.inputs,
        outputs=(TensorSpec(name=coded.name, dtype=dtype, shape=coded.shape),),
        make=make,
        banded=in_bands if is_banded else (),
        scratch_nbytes=scratch,
    )


def _decoded(coded: Coded, tensors: Mapping[str, Tensor], dtype: torch.dtype, where: str) -> Tensor:
    """The rows that the `tensors` are for, a chunk at a time."""
    if not all(coded.shape) or "codes" in coded.whole:
        return _cast(coded.decode(tensors), dtype, where)
    count = tensors["codes"].shape[0]
    row = max(1, prod(coded.shape[1:]))
    step = coded.step * max(1, _CHUNK // (row * coded.step))
    out = torch.empty((count, *coded.shape[1:]), dtype=dtype)
    for first in range(0, count, step):
        last = min(first + step, count)
        part = {
            key: tensor if key in coded.whole else _rows(coded, key, tensor, first, last)
            for key, tensor in tensors.items()
        }
        out[first:last] = _cast(coded.decode(part), dtype, where)
    return out


def _rows(coded: Coded, key: str, tensor: Tensor, first: int, last: int) -> Tensor:
    if key == "scale" and coded.step > 1:
        return tensor[first // coded.step : -(-last // coded.step)]
    return tensor[first:last]


def _cast(values: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """`InvalidInputError` for what is infinite or NaN, and for what is too large for the type."""
    if not bool(values.isfinite().all()):
        raise InvalidInputError(
            f"{where}: its codes or scales stand for infinite values or NaN; nothing was written; "
            "the checkpoint is damaged, or was quantised from weights that were"
        )
    made = values.to(dtype)
    refuse_overflow(values, made, where)
    return made
