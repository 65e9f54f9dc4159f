"""What the rest of `state` asks of one tensor: where it lives, how it is stored, what it is."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from milepost.errors import UnencodableError
from milepost.format.dtypes import DTYPES, Dtype, by_torch_name

DECLARED_ATTRIBUTE = "_milepost_placement"


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; asks without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The tensor that this process holds: the local shard of a DTensor, else `tensor` itself."""
    return getattr(tensor, "_local_tensor", tensor)


def declared_of(tensor: Tensor) -> Any:
    """What `milepost.state.declared` wrote onto `tensor`; None for a tensor of no declaration."""
    return getattr(tensor, DECLARED_ATTRIBUTE, None)


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the tensor that `tensor` is a shard or a declared slice of, else its own."""
    declared = declared_of(tensor)
    return tuple(tensor.shape) if declared is None else tuple(declared.global_shape)


def stored_dtype(tensor: Tensor) -> str:
    """The safetensors word for the dtype of `tensor`, or torch's where there is none."""
    known = _known(tensor.dtype)
    return str(tensor.dtype).removeprefix("torch.") if known is None else known.name


@lru_cache(maxsize=256)  # a few dtypes, asked for every tensor
def _known(dtype: torch.dtype) -> Dtype | None:
    return by_torch_name(str(dtype).removeprefix("torch."))


def stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """Global shape as a header states it: the two elements in an F4 byte count as two."""
    shape = global_shape(tensor)
    known = _known(tensor.dtype)
    if known is None or known.elements_per_torch == 1 or not shape:
        return shape
    return (*shape[:-1], shape[-1] * known.elements_per_torch)


def region(tensor: Tensor) -> Hashable | None:
    """A key that two tensors share when they are one region of one storage; None when empty.

    Views that overlap without being equal have different keys. A tensor without memory of its
    own (on meta, or a wrapper subclass) equals only itself.
    """
    if tensor.numel() == 0:
        return None
    local = local_of(tensor)
    device = local.device
    try:
        address = 0 if device.type == "meta" else local.data_ptr()
    except (RuntimeError, NotImplementedError):
        address = 0
    if address == 0:
        return ("object", id(tensor))
    return device, address, local.dtype, local.shape, local.stride(), tensor.shape


def refuse_unstorable(tensor: Tensor, *, key: str) -> None:
    """Raise `UnencodableError` for a tensor whose values are not one strided block of elements."""
    if tensor.device.type == "meta":
        raise UnencodableError(
            f"{key}: the tensor is on the meta device and has no values to save", key=key
        )
    if tensor.layout is not torch.strided:
        raise UnencodableError(
            f"{key}: a tensor of layout {tensor.layout} cannot be stored; "
            f"convert it with .to_dense() before saving",
            key=key,
        )
    if tensor.is_quantized or (
        hasattr(type(tensor), "__tensor_flatten__") and not is_dtensor(tensor)
    ):
        raise UnencodableError(
            f"{key}: a tensor of class {type(tensor).__qualname__} and dtype {tensor.dtype} "
            f"cannot be stored losslessly; save its inner tensors instead",
            key=key,
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors agree in dtype, shape and every bit, NaN payloads included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (flat_bytes(t.detach().contiguous()) for t in (a, b))
    return torch.equal(left, right.to(left.device))


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as one dim of uint8, not a copy.

    torch calls a tensor of one element contiguous whatever its strides say, so they are set here.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def torch_dtype(word: str) -> torch.dtype | None:
    """The torch dtype of a stored dtype word, or None where torch has none.

    >>> torch_dtype("BF16")
    torch.bfloat16
    """
    known = DTYPES.get(word)
    found = getattr(torch, (known.torch_name or "") if known else word, None)
    return found if isinstance(found, torch.dtype) else None


def allocate(word: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An uninitialised tensor that holds what is stored as `word` and `shape`."""
    dtype = torch_dtype(word)
    assert dtype is not None, f"the dtype {word} was not checked before it is allocated"
    packed = DTYPES[word].elements_per_torch if word in DTYPES else 1
    if packed > 1 and shape:
        shape = (*shape[:-1], shape[-1] // packed)
    return torch.empty(shape, dtype=dtype, device=device)
