"""Float types by the names that people use, and casts that lose nothing without a word."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.format.dtypes import DTYPES
from milepost.tools.rewrite.groups import Computed, Copied, by_rows, passed
from milepost.tools.rewrite.source import SourceTensor

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types whose values are the weights. Narrower floats mean nothing without their scales."""

_NAMES = {
    "float64": "F64", "f64": "F64", "fp64": "F64", "double": "F64",
    "float32": "F32", "f32": "F32", "fp32": "F32", "float": "F32",
    "float16": "F16", "f16": "F16", "fp16": "F16", "half": "F16",
    "bfloat16": "BF16", "bf16": "BF16",
}  # fmt: skip


def float_type(name: str) -> str:
    """The safetensors name of a float type by any of its usual names.

    >>> float_type("torch.bfloat16"), float_type("fp32")
    ('BF16', 'F32')
    """
    found = _NAMES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise InvalidInputError(f"dtype {name!r}: expected bfloat16, float16, float32 or float64")
    return found


def torch_type(dtype: str) -> torch.dtype:
    """torch's type for a safetensors name that has one."""
    found = getattr(torch, str(DTYPES[dtype].torch_name))
    assert isinstance(found, torch.dtype)
    return found


def cast_group(tensor: SourceTensor, dtype: str, *, name: str | None = None) -> Copied | Computed:
    """The tensor in another float type, rounded to nearest even; as it is where it has it.

    A finite value that becomes infinite is refused, naming the tensor.
    """
    if tensor.dtype == dtype:
        return passed(tensor, name=name)
    wanted = torch_type(dtype)

    def make(values: Tensor) -> Tensor:
        made = values.to(wanted)
        if _narrower_range(tensor.dtype, dtype):
            refuse_overflow(values, made, f"{tensor.source.path}: {tensor.name}")
        return made

    return by_rows(tensor, make, dtype=dtype, name=name)


def _narrower_range(before: str, after: str) -> bool:
    return torch.finfo(torch_type(before)).max > torch.finfo(torch_type(after)).max


def refuse_overflow(values: Tensor, made: Tensor, where: str) -> None:
    """`InvalidInputError` when finite `values` became infinite in `made`."""
    if made.numel() == 0:
        return
    low, high = made.aminmax()
    if bool(low.isfinite() & high.isfinite()):
        return
    lost = int((values.isfinite() & ~made.isfinite()).sum())
    if lost:
        raise InvalidInputError(
            f"{where}: {lost} values are too large for {str(made.dtype).removeprefix('torch.')}; "
            "nothing was written; choose a type with more range"
        )
