"""What a pickle of torch holds, as plain records: readable without torch, no tensor byte touched.

`LazyTensor` stands for a tensor, `StorageRef` for the record of the archive with its bytes,
`TorchValue` for a dtype, size, device or layout, and `Opaque` for an instance of a class that the
caller allowed by name: its data, never the class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

ITEM_NBYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by the name that torch gives the dtype."""


class TorchKind(StrEnum):
    """What a `TorchValue` stands for."""

    DTYPE = "dtype"
    SIZE = "size"
    DEVICE = "device"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchValue:
    """A small value of torch: `value` is its name (`"bfloat16"`, `"cuda:0"`) or, for a size, the
    lengths.
    """

    kind: TorchKind
    value: str | tuple[int, ...]

    def __str__(self) -> str:
        if self.kind is TorchKind.DTYPE:
            return f"torch.{self.value}"
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRef:
    """One storage of an archive: `key` is the record name after `data/`."""

    key: str
    dtype: str  # of its elements; "uint8" for an untyped one
    location: str  # the device it was saved from, "cpu" or "cuda:0"
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyTensor:
    """A tensor that was not read: its geometry and the storage its bytes are in.

    Two that are the same object were one tensor; two with one storage share memory. Offset and
    strides count elements.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage: StorageRef
    requires_grad: bool = False
    is_parameter: bool = False
    conjugated: bool = False
    negated: bool = False
    attributes: dict[str, object] = field(default_factory=dict)

    @property
    def storage_key(self) -> str:
        return self.storage.key

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements once contiguous; an expanded tensor's storage has fewer."""
        return self.numel * ITEM_NBYTES[self.dtype]

    @property
    def span(self) -> tuple[int, int]:
        """First element in the storage and one past the last that the tensor touches."""
        if self.numel == 0:
            return (self.storage_offset, self.storage_offset)
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (self.storage_offset, self.storage_offset + reach + 1)


@dataclass(slots=True, kw_only=True, eq=False)
class Opaque:
    """An inert stand-in for an instance of a class that the caller allowed by name.

    `args` and `kwargs` went to its constructor, `state` to its `__setstate__`; `items` and
    `entries` hold what a list or mapping of that class contained.
    """

    class_name: str
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    items: list[object] = field(default_factory=list)
    entries: list[tuple[object, object]] = field(default_factory=list)

    def fields(self) -> dict[str, object]:
        """The attributes by name, of the usual state: a dict, or a pair of dict and slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        found: dict[str, object] = {}
        for part in parts:
            if isinstance(part, dict):
                found.update({str(key): value for key, value in part.items()})
        return found


@dataclass(frozen=True, slots=True)
class StorageType:
    """A storage class of torch (`torch.FloatStorage`), which says the dtype of the elements."""

    dtype: str
