"""Values in the element types of GGUF, a band of a tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.gguf.package import gguf_package
from milepost.tools.gguf.tensors import QUANTISED_BLOCK, GgufTensor, Kind
from milepost.tools.rewrite.dtypes import refuse_overflow

_TYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_LARGEST_Q8_0 = 127 * torch.finfo(torch.float16).max
_LOST_IN_Q8_0 = 1e-30  # the scale of a block below it is 0 in float16, and its inverse overflows

BYTES_PER_ELEMENT = 20
"""What converting takes at most beside the input: Q8_0 with its temporaries in float32."""


def columns_of(tensor: GgufTensor) -> int:
    """Elements that lie together whatever is done with the rows."""
    return tensor.shape[-1] if len(tensor.shape) > 1 else 1


def unit_of(tensor: GgufTensor) -> int:
    """A band is a multiple of so many elements: a row, or a head of which rows change places."""
    return columns_of(tensor) * max(1, tensor.paired_rows)


def converted(values: Tensor, tensor: GgufTensor, where: str) -> Tensor:
    """The bytes of a band of `tensor`, as many elements as `values` has: contiguous, in any shape.

    `InvalidInputError`, naming `where`, for values that the type cannot hold.
    """
    if tensor.paired_rows:
        values = _paired(values, tensor.paired_rows, columns_of(tensor))
    if tensor.kind is Kind.Q8_0:
        return _quantised(values.reshape(-1, tensor.shape[-1]).float(), where)
    made = values.to(_TYPES[tensor.kind])
    refuse_overflow(values, made, where)
    return made.contiguous()


def _paired(values: Tensor, rows: int, columns: int) -> Tensor:
    """Row i of the first half of each head next to row i of its second half."""
    return values.reshape(-1, 2, rows // 2, columns).transpose(1, 2)


def _quantised(values: Tensor, where: str) -> Tensor:
    """Blocks of 32 int8 along the rows, each behind its float16 scale."""
    largest = values.reshape(-1, QUANTISED_BLOCK).abs().amax(dim=1)
    if not bool((largest <= _LARGEST_Q8_0).all()):
        raise InvalidInputError(
            f"{where}: has values that are not finite, or too large for the scales of Q8_0; "
            "nothing was written; look at the weights, or choose f32"
        )
    lost = largest < _LOST_IN_Q8_0
    if bool(lost.any()):
        kept = ~lost.repeat_interleave(QUANTISED_BLOCK).reshape(values.shape)
        values = torch.where(kept, values, 0.0)
    gguf = gguf_package()
    return torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0))
