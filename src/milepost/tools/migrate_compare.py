"""Whether two saved structures are the same in every bit, and where they differ.

Tensors may not have been read yet: whoever compares says how a leaf is read. They are compared by
their bits. Of single floats NaN equals NaN, and 0.0 is not -0.0; a value of another type is another
value.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

from milepost.format.lazy import LazyTensor, TorchKind, TorchValue
from milepost.layouts.archive_names import join

Read: TypeAlias = Callable[[Any], torch.Tensor]

_KINDS: Mapping[type, TorchKind] = {
    torch.dtype: TorchKind.DTYPE,
    torch.Size: TorchKind.SIZE,
    torch.device: TorchKind.DEVICE,
    torch.layout: TorchKind.LAYOUT,
}


def as_it_is(leaf: Any) -> torch.Tensor:
    """The reader of a structure whose tensors were all read."""
    raise AssertionError(f"{type(leaf).__name__}: a tensor that was not read needs its reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares structures whose tensors `left` and `right` read."""

    left: Read = as_it_is
    right: Read = as_it_is

    def same(self, a: Any, b: Any) -> bool:
        return next(self.differences(a, b, ""), None) is None

    def differences(self, a: Any, b: Any, key: str) -> Iterator[str]:
        """A sentence for each place that differs, beginning with its key below `key`."""
        if _is_tensor(a) and _is_tensor(b):
            yield from self._tensors(a, b, key)
            return
        a, b = _plain(a), _plain(b)
        if type(a) is not type(b):
            yield f"{key}: {type(a).__name__} became {type(b).__name__}"
        elif isinstance(a, dict):
            yield from self._mappings(a, b, key)
        elif isinstance(a, list | tuple | deque):
            yield from self._sequences(a, b, key)
        elif isinstance(a, SimpleNamespace):
            yield from self._mappings(vars(a), vars(b), key)
        elif not _equal(a, b):
            yield f"{key}: {a!r:.60} became {b!r:.60}"

    def tensors_differ(self, a: Any, b: Any, key: str) -> Iterator[str]:
        """As `differences` for two tensors, without what a weight does not keep."""
        first, second = _loaded(a, self.left), _loaded(b, self.right)
        if first.dtype != second.dtype:
            yield f"{key}: dtype {first.dtype} became {second.dtype}"
        elif first.shape != second.shape:
            yield f"{key}: shape {tuple(first.shape)} became {tuple(second.shape)}"
        elif not torch.equal(_bits(first), _bits(second)):
            wrong = int((_bits(first) != _bits(second)).sum())
            yield f"{key}: {wrong} of {_bits(first).numel()} bytes differ"

    def _tensors(self, a: Any, b: Any, key: str) -> Iterator[str]:
        yield from self.tensors_differ(a, b, key)
        if _kept(a) != _kept(b):
            yield f"{key}: (is_parameter, requires_grad) {_kept(a)} became {_kept(b)}"
        yield from self._mappings(_attributes(a), _attributes(b), key)

    def _mappings(self, a: dict[Any, Any], b: dict[Any, Any], key: str) -> Iterator[str]:
        for name in a:
            if name not in b:
                yield f"{join(key, name)}: is missing"
            else:
                yield from self.differences(a[name], b[name], join(key, name))
        for name in b:
            if name not in a:
                yield f"{join(key, name)}: was not there"
        if _factory(a) is not _factory(b):
            yield f"{key}: its default is another"
        if isinstance(a, OrderedDict) and isinstance(b, OrderedDict):
            yield from self._mappings(vars(a), vars(b), key)

    def _sequences(self, a: Any, b: Any, key: str) -> Iterator[str]:
        if len(a) != len(b):
            yield f"{key}: {len(a)} items became {len(b)}"
            return
        if isinstance(a, deque) and a.maxlen != b.maxlen:
            yield f"{key}: maxlen {a.maxlen} became {b.maxlen}"
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            if x is not y or isinstance(x, float):
                yield from self.differences(x, y, join(key, number))


def _loaded(leaf: Any, read: Read) -> torch.Tensor:
    return (leaf if isinstance(leaf, torch.Tensor) else read(leaf)).detach()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, LazyTensor | torch.Tensor)


def _plain(value: Any) -> Any:
    """Small values of torch in the one form that needs no torch to read."""
    kind = _KINDS.get(type(value))
    if kind is None:
        return value
    if kind is TorchKind.SIZE:
        return TorchValue(kind=kind, value=tuple(value))
    return TorchValue(kind=kind, value=str(value).removeprefix("torch."))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (a != a and b != b)
    if isinstance(a, complex):
        return _equal(a.real, b.real) and _equal(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        same = a.dtype == b.dtype and a.shape == b.shape
        return bool(same and a.tobytes() == b.tobytes())
    return bool(a == b)


def _factory(value: Any) -> Any:
    return value.default_factory if isinstance(value, defaultdict) else None


def _kept(value: Any) -> tuple[bool, bool]:
    """What is kept of a tensor besides its elements."""
    if isinstance(value, LazyTensor):
        return value.is_parameter, value.requires_grad
    return isinstance(value, torch.nn.Parameter), bool(value.requires_grad)


def _attributes(value: Any) -> dict[str, Any]:
    return dict(value.attributes) if isinstance(value, LazyTensor) else dict(vars(value))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
