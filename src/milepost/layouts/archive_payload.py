"""What may be saved into a `.pt`: only what `torch.load(weights_only=True)` gives back.

`check_loadable` refuses the rest with its key, before a byte is written. `prepare` also makes the
tensors fit to be written: on the CPU, and without bytes of a base that they do not show.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeAlias

import torch

from milepost.errors import UnencodableError
from milepost.format.pickle_tree import MAX_DEPTH
from milepost.format.tree_advice import advice
from milepost.layouts.archive_names import join

_PLAIN = (type(None), bool, float, complex, str, bytearray, torch.Size, torch.device, torch.dtype)
_ATOMS = (type(None), bool, float, str)
_MAX_INT_BITS = 8 * 255 - 1
_SMALL = 2**63
_SHOWN = 10

Geometry: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def check_loadable(payload: Any) -> None:
    """Refuse values that torch's safe loading, or ours, would not give back.

    Raises `UnencodableError` that lists all such places with what to save instead.
    """
    checker = _Checker()
    checker.visit(payload, "", ())
    if checker.refused:
        places = [f"{key or 'the root'}: {why}" for key, why in checker.refused]
        more = f"; and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        raise UnencodableError(
            f"{len(places)} values could not be loaded back safely: "
            f"{'; '.join(places[:_SHOWN])}{more}",
            key=checker.refused[0][0],
        )


def prepare(payload: Any) -> Any:
    """The payload as it will be pickled, after `check_loadable`; what was shared stays shared."""
    check_loadable(payload)
    copier = _Copier()
    copier.find_bases(payload, set())
    return copier.value(payload)


@dataclass
class _Checker:
    refused: list[tuple[str, str]] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def visit(self, value: Any, key: str, above: tuple[int, ...]) -> None:
        """`above` holds the ids of the containers around the value."""
        if id(value) in above:
            self.refused.append((key, "it contains itself"))
            return
        if len(above) >= MAX_DEPTH - 2:
            self.refused.append((key, f"it is nested deeper than {MAX_DEPTH - 2} levels"))
            return
        if self.seen.get(id(value), -1) >= len(above):
            return
        inner = _inner(value)
        if inner is None:
            why = refusal(value)
            if why is not None:
                self.refused.append((key, why))
            return
        self.seen[id(value)] = len(above)
        for name, item in inner:
            if type(item) in _ATOMS or (type(item) is int and -_SMALL < item < _SMALL):
                continue  # long lists of numbers are common: token buffers, random states
            self.visit(item, join(key, name), (*above, id(value)))


def _inner(value: Any) -> list[tuple[object, Any]] | None:
    """Names and values inside a container that may be saved; None for anything else."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        keys = [(f"<key {join('', name)}>", name) for name in value]
        attributes = list(vars(value).items()) if kind is OrderedDict else []
        return [*keys, *value.items(), *attributes]
    if kind in (list, tuple):
        return list(enumerate(value))
    if kind is set:
        return [(f"<{join('', item)}>", item) for item in value]
    if kind in (torch.Tensor, torch.nn.Parameter) and refusal(value) is None:
        return list(vars(value).items())
    return None


def refusal(value: Any) -> str | None:
    """Why a value that is no container cannot be saved, and what to save instead."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _refused_tensor(value)
    if kind in _PLAIN:
        return None
    if kind is int:
        too_big = value.bit_length() > _MAX_INT_BITS
        return f"an integer of {value.bit_length()} bits; save str(value)" if too_big else None
    if kind is bytes:
        return None if value else "torch refuses empty bytes; save bytearray() or None"
    if kind is torch.layout and value is torch.strided:
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, PurePath):
        return f"{name} would be refused by torch.load; save str(value)"
    if isinstance(value, Enum):
        return f"{name} would be refused by torch.load; save value.value"
    if kind in (frozenset, range, slice):
        better = "set(value)" if kind is frozenset else "its bounds as a list"
        return f"a {kind.__name__} would be refused by torch.load; save {better}"
    if kind.__module__ == "numpy":
        better = "torch.from_numpy(value)" if kind.__name__ == "ndarray" else "value.item()"
        return f"{name} would be refused by torch.load; save {better}"
    return advice(value)


def _refused_tensor(value: torch.Tensor) -> str | None:
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        name = f"{kind.__module__}.{kind.__qualname__}"
        better = "value.full_tensor()" if kind.__name__ == "DTensor" else "a plain tensor"
        return f"{name} is a tensor subclass; save {better}"
    if value.is_meta:
        return "a meta tensor has no data; save it after it got some"
    if value.is_nested or value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}; save value.to_dense()"
    if value.is_quantized:
        return "a quantized tensor; save value.dequantize()"
    if any(name is not None for name in getattr(value, "names", ())):  # older torch only
        return "a tensor with named dims; save value.rename(None)"
    return None


class _Copier:
    """One walk that rebuilds containers around tensors that may have to be copied."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}
        self.whole: dict[int, torch.dtype] = {}
        self.on_cpu: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[Geometry, torch.Tensor] = {}

    def find_bases(self, value: Any, seen: set[int]) -> None:
        """Note the storages that some tensor shows whole: views of them hide nothing."""
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if _core_nbytes(value) >= storage.nbytes():
                self.whole.setdefault(storage._cdata, value.dtype)
        inner = _inner(value)
        if inner is not None:
            seen.add(id(value))
            for _, item in inner:
                self.find_bases(item, seen)

    def value(self, value: Any) -> Any:
        if type(value) in _ATOMS or type(value) is int:
            return value
        known = self.made.get(id(value))
        if known is not None:
            return known[1]
        result = self._rebuild(value)
        self.made[id(value)] = (value, result)
        return result

    def _rebuild(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind in (dict, OrderedDict, Counter):
            result: Any = kind()
            for key, item in value.items():
                result[self.value(key)] = self.value(item)
            if kind is OrderedDict:
                vars(result).update({n: self.value(v) for n, v in vars(value).items()})
            return result
        if kind in (list, tuple, set):
            return kind([self.value(item) for item in value])
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        storage = source.untyped_storage()
        shown = self.whole.get(storage._cdata) == tensor.dtype
        data = source if shown else self._copy(source)
        if data.device.type != "cpu":
            data = self._to_cpu(data.resolve_conj().resolve_neg())
        if type(tensor) is torch.nn.Parameter:
            data = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
        else:
            data.requires_grad_(tensor.requires_grad)
        vars(data).update({name: self.value(item) for name, item in vars(tensor).items()})
        return data

    def _copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of what the tensor shows; the same view met again shares it."""
        shape, stride = tuple(source.shape), tuple(source.stride())
        storage = source.untyped_storage()._cdata
        geometry = (storage, int(source.storage_offset()), shape, stride, source.dtype)
        if geometry not in self.copies:
            self.copies[geometry] = _core(source).cpu().clone().expand(shape)
        return self.copies[geometry].detach()

    def _to_cpu(self, source: torch.Tensor) -> torch.Tensor:
        """The tensor on a host copy of its whole storage, one copy for each storage."""
        storage = source.untyped_storage()
        if storage._cdata not in self.on_cpu:
            self.on_cpu[storage._cdata] = storage.cpu()  # type: ignore[no-untyped-call]
        host = torch.empty(0, dtype=source.dtype)
        whole, offset = self.on_cpu[storage._cdata], source.storage_offset()
        host.set_(whole, offset, source.shape, source.stride())
        return host


def _core(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its expanded dims cut to one element."""
    for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and length > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _core_nbytes(tensor: torch.Tensor) -> int:
    core = _core(tensor)
    return core.numel() * core.element_size()
