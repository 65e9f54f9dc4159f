"""The torch half of the typed tree: tensors by name, dtypes and the like by their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from milepost.errors import MismatchError, UnencodableError
from milepost.format.tree import Reference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RESERVED = "__metadata__"  # what a safetensors header keeps beside its tensors
_WORDS: Mapping[str, type] = {
    "torch.dtype": torch.dtype,
    "torch.layout": torch.layout,
    "torch.memory_format": torch.memory_format,
}


class StateTensors:
    """A `TensorSink`: collects the tensors of a state in `tensors`, by reference.

    Names are key paths (`scheduler.base_lrs.0`), made unique. Tensors and long arrays are not
    copied: whoever writes them later sees later changes, so stage them before training goes on.
    A tensor that is the same memory in the same view as an earlier one is stored once. Tensors
    come back on the device that the source has them on; `requires_grad` of leaves is kept, the
    autograd graph is not.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[object, ...], str] = {}

    def add(self, key: str, value: Any) -> Reference | None:
        if isinstance(value, torch.Tensor):
            return self.add_tensor(key, value)
        if type(value) is torch.Size:
            return Reference("torch.Size", {"lengths": list(value)})
        if type(value) is torch.device:
            return Reference("torch.device", {"name": str(value)})
        if type(value) is torch.torch_version.TorchVersion:
            return Reference("torch.version", {"text": str.__str__(value)})
        for tag, cls in _WORDS.items():
            if type(value) is cls:
                return Reference(tag, {"name": str(value).removeprefix("torch.")})
        return None

    def add_tensor(self, key: str, value: torch.Tensor) -> Reference:
        """The seam for distributed tensors: a subclass takes those it can store in pieces."""
        problem = _problem(value)
        if problem is not None:
            raise UnencodableError(f"{key}: {problem}", key=key)
        fields: dict[str, Any] = {"name": self._name(key, value.detach())}
        if isinstance(value, torch.nn.Parameter):
            return Reference("torch.parameter", {**fields, "requires_grad": value.requires_grad})
        if value.requires_grad and value.is_leaf:
            fields["requires_grad"] = True
        return Reference("torch.tensor", fields)

    def add_array(self, key: str, raw: NDArray[np.uint8]) -> str:
        # from_numpy warns about read-only memory, which it cannot protect.
        return self._name(key, torch.from_numpy(raw if raw.flags.writeable else raw.copy()))

    def _name(self, key: str, tensor: torch.Tensor) -> str:
        view = _view(tensor)
        if view is not None and view in self._views:
            return self._views[view]
        name = self._unique(key)
        self.tensors[name] = tensor.resolve_conj().resolve_neg()
        if view is not None:
            self._views[view] = name
        return name

    def _unique(self, key: str) -> str:
        name = stem = key or "value"
        count = 1
        while name in self.tensors or name == _RESERVED:
            count += 1
            name = f"{stem}~{count}"
        return name


def _view(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What two tensors have in common when they are the same memory seen in the same way.

    None for empty ones: they have no memory to share. `StateTensors` keeps the tensors alive,
    so that no address is used twice.
    """
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _problem(tensor: torch.Tensor) -> str | None:
    """Why the tensor cannot be stored, and what to do; None when it can."""
    kind = type(tensor)
    if tensor.is_nested:
        return "a nested tensor cannot be stored; save tensor.unbind()"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout} cannot be stored; save its parts or to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor cannot be stored; save int_repr(), the scale and the zero point"
    if kind not in (torch.Tensor, torch.nn.Parameter):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"a tensor of class {name} cannot be stored here; save plain tensors that make it up"
    if tensor.is_meta:
        return "a meta tensor has no data; materialise it or leave it out"
    return None


class MappingSource:
    """A `TensorSource`: reads from a mapping of names to tensors, lazily.

    One name gives one object however often it is asked for, so what was tied is tied again.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._loaded: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[str, str, bool], torch.Tensor] = {}

    def get(self, reference: Reference) -> Any:
        fields = dict(reference.fields)
        match reference.tag:
            case "torch.tensor" | "torch.parameter":
                return self._tensor(reference.tag, **_only(fields, "name", "requires_grad"))
            case "torch.Size":
                return torch.Size(_only(fields, "lengths")["lengths"])
            case "torch.device":
                return _device(_only(fields, "name")["name"])
            case "torch.version":
                return torch.torch_version.TorchVersion(_text(_only(fields, "text")["text"]))
            case tag if tag in _WORDS:
                return _word(tag, _only(fields, "name")["name"])
        raise ValueError("unknown; a newer Milepost may know it")

    def get_array(self, name: str) -> NDArray[np.uint8]:
        tensor = self._stored(name)
        if tensor.dtype != torch.uint8:
            raise TypeError(f"the bytes of an array are uint8, {name!r:.80} is {tensor.dtype}")
        array: NDArray[np.uint8] = tensor.cpu().numpy()
        return array

    def _stored(self, name: Any) -> torch.Tensor:
        if _text(name) not in self._tensors:
            raise LookupError(f"tensor {name!r:.80} is not stored")
        return self._tensors[name]

    def _tensor(self, tag: str, name: Any, requires_grad: Any = False) -> torch.Tensor:
        if type(requires_grad) is not bool:
            raise TypeError("requires_grad must be bool")
        made = self._made.get((tag, _text(name), requires_grad))
        if made is None:
            if name not in self._loaded:
                self._loaded[name] = self._stored(name)
            stored = self._loaded[name].detach()
            if requires_grad and not (stored.is_floating_point() or stored.is_complex()):
                raise TypeError(f"requires_grad, but {name!r:.80} is {stored.dtype}")
            if tag == "torch.parameter":
                made = torch.nn.Parameter(stored, requires_grad)
            else:
                made = stored.requires_grad_(requires_grad)
            self._made[tag, name, requires_grad] = made
        return made


def _only(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    unknown = fields.keys() - set(names)
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r:.80}")
    if names[0] not in fields:
        raise ValueError(f"the field {names[0]} is missing")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _device(name: Any) -> torch.device:
    try:
        return torch.device(_text(name))
    except RuntimeError as e:
        raise MismatchError(f"this torch knows no device {name!r:.80}") from e


def _word(tag: str, name: Any) -> Any:
    """`torch.<name>`, if that is of the class that the tag says."""
    # Not getattr: torch imports some of its modules when they are asked for.
    found = vars(torch).get(_text(name))
    if type(found) is not _WORDS[tag]:
        word = tag.removeprefix("torch.")
        raise MismatchError(f"torch {torch.__version__} has no {word} {name!r:.80}")
    return found
