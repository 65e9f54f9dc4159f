"""Tensor subclasses that consist of plain tensors: which are known, and how their parts are cut.

A quantised moment is a tensor subclass around codes, scales and a table. It is stored as these
parts. Only classes of the table here, and those that the program registers, are taken apart and
put together; nothing is imported by a name that stands in a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from milepost.errors import InvalidInputError, MismatchError, UnencodableError
from milepost.state.tensors import is_dtensor, local_of


class PartRole(Enum):
    """How an inner tensor follows when its outer tensor is cut."""

    ELEMENTS = "elements"
    """It has the shape of the outer tensor."""
    RUNS = "runs"
    """It has one dim: an entry for every run of consecutive elements, in row-major order."""
    TABLE = "table"
    """It is the same for every shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClass:
    """A known subclass: `name` is what a checkpoint calls it, `attributes` names the entries of
    its flatten context in order; the one called "shape" is the shape of the local tensor."""

    name: str
    parts: Mapping[str, PartRole]
    attributes: tuple[str, ...]


_CODES = {"codes": PartRole.ELEMENTS, "scale": PartRole.RUNS}
_TABLE = {"qmap": PartRole.TABLE}
# By qualified name, so that nothing of torchao is imported.
_known: dict[str, TensorClass] = {
    "torchao.optim.subclass_8bit.OptimState8bit": TensorClass(
        name="torchao.OptimState8bit", parts=_CODES | _TABLE, attributes=("signed", "dtype")
    ),
    "torchao.optim.subclass_4bit.OptimState4bit": TensorClass(
        name="torchao.OptimState4bit",
        parts={"codes": PartRole.RUNS, "scale": PartRole.RUNS} | _TABLE,
        attributes=("signed", "shape", "dtype"),
    ),
    "torchao.optim.subclass_fp8.OptimStateFp8": TensorClass(
        name="torchao.OptimStateFp8", parts=_CODES, attributes=("dtype",)
    ),
}

_registered: dict[str, type[Tensor]] = {}


def register_tensor_class(
    tensor_class: type[Tensor],
    *,
    name: str,
    parts: Mapping[str, PartRole],
    attributes: Sequence[str] = (),
) -> None:
    """Make a tensor subclass storable as optimizer state; register it before saving and loading.

    The class has `__tensor_flatten__` and `__tensor_unflatten__`. `name` is what checkpoints call
    it. `parts` says for every inner tensor how it follows a cut, and `attributes` names the entries
    of the flatten context, in order; they are stored, except one called "shape", which is made from
    the local shape. Re-quantising (`BlockPolicy.REQUANTISE`) also needs `dequantize()` and `copy_`
    from a plain tensor. `InvalidInputError` for parts or a name that cannot be stored.
    """
    if not hasattr(tensor_class, "__tensor_flatten__") or not parts:
        raise InvalidInputError(
            f"{tensor_class.__qualname__}: expected a class with __tensor_flatten__ and the names "
            f"of its inner tensors, got parts {list(parts)}"
        )
    bad = [part for part in parts if not part.isidentifier()]
    path = qualified_name(tensor_class)
    taken = [other for other, known in _known.items() if known.name == name and other != path]
    if bad or taken:
        problem = f"the part {bad[0]!r} is no identifier" if bad else f"{name!r} is {taken[0]}"
        raise InvalidInputError(f"{path} cannot be registered: {problem}")
    _known[path] = TensorClass(name=name, parts=dict(parts), attributes=tuple(attributes))
    _registered[path] = tensor_class


def qualified_name(tensor_class: type) -> str:
    return f"{tensor_class.__module__}.{tensor_class.__qualname__}"


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the local tensor is a subclass that consists of others."""
    return hasattr(type(local_of(tensor)), "__tensor_flatten__")


def class_of_wrapper(tensor: Tensor, *, key: str) -> TensorClass:
    """The table's entry for a local tensor; `UnencodableError` when there is none."""
    path = qualified_name(type(tensor))
    if path not in _known:
        raise UnencodableError(
            f"{key}: a tensor of class {path} cannot be stored losslessly; tell how it is made up "
            f"with milepost.register_tensor_class, or save its inner tensors instead",
            key=key,
        )
    return _known[path]


def class_by_name(name: str, *, key: str) -> tuple[TensorClass, Any]:
    """The entry and the Python class for a stored name; `MismatchError` when this program has not
    registered it, or has not imported the module that it is in."""
    for path, known in _known.items():
        if known.name == name:
            module, _, attribute = path.rpartition(".")
            found = _registered.get(path) or getattr(sys.modules.get(module), attribute, None)
            if found is not None:
                return known, found
            raise MismatchError(
                f"{key}: is stored as {name}; import {module} before loading, as the optimizer "
                f"that was saved does"
            )
    raise MismatchError(
        f"{key}: is stored as {name}, which is not known here; register it with "
        f"milepost.register_tensor_class, or load without this optimizer"
    )


def attributes_of(known: TensorClass, tensor: Tensor, *, key: str) -> dict[str, Any]:
    """The flatten context of a local tensor by name, without its shape."""
    inner, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    entries = list(context) if isinstance(context, list | tuple) else None
    if set(inner) != set(known.parts) or entries is None or len(entries) != len(known.attributes):
        raise UnencodableError(
            f"{key}: {known.name} is made up of {sorted(inner)} with the context {context!r:.100}; "
            f"expected {sorted(known.parts)} with {known.attributes}; this version of the class is "
            f"not known",
            key=key,
        )
    named = dict(zip(known.attributes, entries, strict=True))
    named.pop("shape", None)
    return named


def put_together(
    name: str,
    attributes: Mapping[str, Any],
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    *,
    key: str,
) -> Tensor:
    """The local tensor of `shape` that consists of `parts`, which are not copied."""
    known, tensor_class = class_by_name(name, key=key)
    size = torch.Size(shape)
    context = [size if word == "shape" else attributes[word] for word in known.attributes]
    stride = torch.empty(shape, device="meta").stride()
    found: Tensor = tensor_class.__tensor_unflatten__(dict(parts), context, size, stride)
    return found


def placed_like(like: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`local` as the shard of a tensor of global `shape`, on the mesh and placements of `like`;
    `local` itself where `like` is no DTensor. Nothing is copied, moved or communicated."""
    if not is_dtensor(like):
        return local
    return placed(like, local, shape, like.placements)  # type: ignore[attr-defined]


def placed(like: Any, local: Tensor, shape: tuple[int, ...], placements: Any) -> Tensor:
    """`local` as a shard of a DTensor on the mesh of `like`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    # from_local would move a moment that is kept on the CPU to the device of the mesh.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
