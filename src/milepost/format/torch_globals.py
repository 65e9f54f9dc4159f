"""The names of torch that a pickle may use, each mapped to a record of `lazy`; torch stays out.

`storage_reference` is the `persistent_load` of a torch archive. `REFUSED` says why some names that
people do meet are not plain data, for the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from milepost.format.lazy import (
    ITEM_NBYTES,
    LazyTensor,
    StorageRef,
    StorageType,
    TorchKind,
    TorchValue,
)
from milepost.format.pickle_globals import Global

MAX_DIMS = 64

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}

_QUANTIZED = "a quantized tensor, which has no plain form; save it dequantized"
_NESTED = "another pickle inside this one; save with torch.save alone"
_DTENSOR = "a DTensor, bound to one process group; save its full_tensor()"
REFUSED = {
    "torch._utils._rebuild_qtensor": _QUANTIZED,
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor; save its to_dense()",
    "torch._utils._rebuild_nested_tensor": "a nested tensor; save its unbind()",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass; save the plain tensor",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device without storages",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storages",
    "torch.storage._load_from_bytes": _NESTED,
    "torch.distributed.tensor.DTensor": _DTENSOR,
    "torch.distributed._tensor.api.DTensor": _DTENSOR,
    "torch.jit._pickle.build_tensor_from_id": "a TorchScript tensor",
}


def why_refused(name: str) -> str:
    """Why this name is not plain data, and what to save instead if that is known."""
    if name.startswith(("torch.nn.modules.", "torch.optim.", "torch.fx.")):
        return "a whole object with its code; save its state_dict()"
    return REFUSED.get(name, "not on the list of harmless names")


def storage_reference(identity: object) -> StorageRef:
    """The persistent id of a storage: `("storage", type, key, location, elements)`."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("a persistent id is not that of a storage")
    _, kind, key, location, numel = identity
    if not isinstance(kind, StorageType):
        raise ValueError("the type of a storage is unknown")
    if type(key) is not str or type(location) is not str:
        raise ValueError("the key or location of a storage is no text")
    nbytes = _integer(numel, "the length of a storage") * ITEM_NBYTES[kind.dtype]
    return StorageRef(key=key, dtype=kind.dtype, location=location, numel=numel, nbytes=nbytes)


def _integer(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is no number of elements")
    return value


def _lengths(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, TorchValue) and value.kind is TorchKind.SIZE:
        value = value.value
    if not isinstance(value, tuple):
        raise ValueError(f"{what} is no tuple")
    return tuple(_integer(n, what) for n in value)


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("requires_grad is neither true nor false")
    return value


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    dtype: object = None,
    metadata: object = None,
) -> LazyTensor:
    """A tensor within the bounds of its storage."""
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor has no storage")
    name = storage.dtype if dtype is None else _dtype_name(dtype)
    flags = {} if metadata is None else metadata
    if hooks or not isinstance(flags, dict) or not set(flags) <= {"conj", "neg"}:
        raise ValueError("a tensor has hooks or unknown metadata")
    tensor = LazyTensor(
        dtype=name,
        shape=_lengths(shape, "the shape of a tensor"),
        stride=_lengths(stride, "the strides of a tensor"),
        storage_offset=_integer(offset, "the offset of a tensor"),
        storage=storage,
        requires_grad=_flag(requires_grad),
        conjugated=bool(flags.get("conj", False)),
        negated=bool(flags.get("neg", False)),
    )
    if len(tensor.shape) != len(tensor.stride) or len(tensor.shape) > MAX_DIMS:
        raise ValueError("a tensor has not one stride for each dim, or too many dims")
    _check_floating(name, needed=tensor.requires_grad or tensor.negated)
    longest = math.prod(max(n, 1) for n in tensor.shape) * ITEM_NBYTES[name]
    if longest >= 2**63 or tensor.span[1] * ITEM_NBYTES[name] > storage.nbytes:
        raise ValueError(f"a tensor reaches beyond its storage {storage.key[:40]!r}")
    return tensor


def _check_floating(dtype: str, *, needed: bool) -> None:
    if needed and not dtype.startswith(("float", "bfloat", "complex")):
        raise ValueError(f"a tensor of {dtype} cannot have a gradient or be negated")


def _dtype_name(value: object) -> str:
    if not isinstance(value, TorchValue) or value.kind is not TorchKind.DTYPE:
        raise ValueError("the dtype of a tensor is no dtype")
    return str(value.value)


def _tensor_v2(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> LazyTensor:
    return _tensor(storage, offset, shape, stride, requires_grad, hooks, None, metadata)


def _tensor_v1(storage: object, offset: object, shape: object, stride: object) -> LazyTensor:
    return _tensor(storage, offset, shape, stride)


def _changed(
    tensor: object, *, requires_grad: bool, is_parameter: bool, state: object
) -> LazyTensor:
    if not isinstance(tensor, LazyTensor):
        raise ValueError("a parameter has no tensor")
    _check_floating(tensor.dtype, needed=requires_grad)
    return LazyTensor(
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        storage_offset=tensor.storage_offset,
        storage=tensor.storage,
        requires_grad=requires_grad,
        is_parameter=is_parameter,
        conjugated=tensor.conjugated,
        negated=tensor.negated,
        attributes=_attributes(state),
    )


def _attributes(state: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if part is None:
            continue
        if not isinstance(part, dict) or not all(type(key) is str for key in part):
            raise ValueError("the attributes of a tensor are no mapping of names")
        found.update(part)
    return found


def _parameter(data: object, requires_grad: object, hooks: object) -> LazyTensor:
    return _parameter_with_state(data, requires_grad, hooks, None)


def _parameter_with_state(
    data: object, requires_grad: object, hooks: object, state: object
) -> LazyTensor:
    if hooks:
        raise ValueError("a parameter has hooks")
    flag = _flag(requires_grad)
    return _changed(data, requires_grad=flag, is_parameter=True, state=state)


def _from_type(function: object, cls: object, args: object, state: object) -> LazyTensor:
    """A tensor with Python attributes."""
    known = isinstance(function, Global) and function.name in _REBUILD
    if not known or not isinstance(function, Global) or function.call is None:
        raise ValueError("a tensor is rebuilt by an unknown function")
    if not isinstance(cls, Global) or cls.name not in ("torch.Tensor", _PARAMETER):
        raise ValueError("a tensor subclass; save the plain tensor")
    if not isinstance(args, tuple):
        raise ValueError("a tensor is rebuilt without arguments")
    tensor = function.call(*args)
    assert isinstance(tensor, LazyTensor), "rebuild functions return tensors"
    parameter = tensor.is_parameter or cls.name == _PARAMETER
    return _changed(tensor, requires_grad=tensor.requires_grad, is_parameter=parameter, state=state)


def _size(lengths: object = ()) -> TorchValue:
    plain = tuple(lengths) if isinstance(lengths, list) else lengths
    return TorchValue(kind=TorchKind.SIZE, value=_lengths(plain, "a size"))


def _device(kind: object, index: object = None) -> TorchValue:
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,31}(:\d{1,4})?", kind):
        raise ValueError("a device has no name")
    name = kind if index is None else f"{kind}:{_integer(index, 'the index of a device')}"
    return TorchValue(kind=TorchKind.DEVICE, value=name)


def _layout(name: object) -> TorchValue:
    if name != "torch.strided":
        raise ValueError("a layout other than torch.strided")
    return TorchValue(kind=TorchKind.LAYOUT, value="strided")


_PARAMETER = "torch.nn.parameter.Parameter"
_REBUILD: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
}


def _table() -> dict[str, object]:
    calls: dict[str, Callable[..., object]] = {
        **_REBUILD,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": _layout,
    }
    table: dict[str, object] = {name: Global(name=name, call=f) for name, f in calls.items()}
    for name in ("torch.Tensor", _PARAMETER):
        table[name] = Global(name=name)
    for name in ITEM_NBYTES:
        table[f"torch.{name}"] = TorchValue(kind=TorchKind.DTYPE, value=name)
    for name, dtype in STORAGE_DTYPES.items():
        table[f"torch.{name}"] = StorageType(dtype)
    for name in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        table[name] = StorageType("uint8")
    return table


GLOBALS: dict[str, object] = _table()
