"""The shapes that the factors of a live adapter have, as the layers say that they adapt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from milepost.adapters.live import LiveAdapter
from milepost.state.declared import declaration
from milepost.state.tensors import global_shape, is_dtensor

Wanted: TypeAlias = tuple[int | None, ...]
"""A shape; None where nobody can say."""


def misfits(adapter: LiveAdapter) -> Iterator[str]:
    """Plain factors of a shape that their layer cannot have: a rank's part of a tensor in the place
    of the whole, which nothing says to be one."""
    for layer in adapter.layers.values():
        for tensor, wanted in _of_layer(layer, adapter.name):
            yield from _compared(adapter, tensor, wanted)
    for module, lora in adapter.experts.values():
        for projection, (name_a, name_b) in lora.factors.items():
            experts, *_ = _told(module.get_parameter(projection), 3)
            yield from _compared(adapter, module.get_parameter(name_a), (experts, None, lora.r))
            yield from _compared(adapter, module.get_parameter(name_b), (experts, lora.r, None))


def _compared(adapter: LiveAdapter, tensor: Tensor, wanted: Wanted) -> Iterator[str]:
    found = global_shape(tensor)
    told = tuple(f if w is None else w for f, w in zip(found, wanted, strict=False))
    if not _tells_shape(tensor) and found != told:
        names = adapter.names_of(tensor)
        yield f"{names[0] if names else 'a factor'} has shape {found}, and its layer one of {told}"


def _of_layer(layer: Any, name: str | None) -> Iterator[tuple[Tensor, Wanted]]:
    """Factors of a matrix, with the shapes that its rank and the weight give them; nothing for
    variants of LoRA and for layers that are known otherwise."""
    a, b = (_factor(layer, each, name) for each in ("lora_A", "lora_B"))
    variant = getattr(layer, "lora_variant", {}).get(name)
    is_known = variant is None or type(variant).__name__.startswith("Dora")
    if a is None or b is None or not is_known or hasattr(layer, "parameter_name"):
        return
    if a.dim() != 2 or b.dim() != 2:
        return
    shape = _told(getattr(layer.get_base_layer(), "weight", None), 2)
    if {*shape} != {layer.in_features, layer.out_features}:
        shape = (None, None)  # packed into few bits
    outer, inner = reversed(shape) if getattr(layer, "fan_in_fan_out", False) else shape
    rank = int(layer.r[name])
    yield a, (rank, inner)
    yield b, (outer, rank)


def _factor(layer: Any, attribute: str, name: str | None) -> Tensor | None:
    container = getattr(layer, attribute, None)
    if name is None or not isinstance(container, nn.ModuleDict) or name not in container:
        return None
    weight = getattr(container[name], "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _told(weight: object, dims: int) -> Wanted:
    """The shape of a weight that says of what it is a part; a plain one may be a part or not."""
    if not isinstance(weight, Tensor) or not _tells_shape(weight) or weight.dim() != dims:
        return (None,) * dims
    return global_shape(weight)


def _tells_shape(tensor: Tensor) -> bool:
    return is_dtensor(tensor) or declaration(tensor) is not None
