"""Declared placements: what a plain local tensor is a slice of, for stacks that cut by hand.

A declaration is kept on the module that owns the tensor, by the tensor's own name, so it outlives
`to()`, `to_empty()`, `fully_shard`, a replaced parameter and a copied module. Whenever the leaves
of a model are collected it is written onto the live tensors too; from there it follows detached
views and moments, and everything that asks how a tensor is held finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import IndexSet, index_set, local_shape
from milepost.plan.holding import PlacementClass
from milepost.state.names import Model, places
from milepost.state.tensors import DECLARED_ATTRIBUTE, declared_of, local_of

_TABLE = "_milepost_placements"


@lru_cache(maxsize=65536)  # every save asks for every tensor
def held_by(placement: PlacementClass, shape: Shape, rank: int) -> IndexSet:
    """What `rank` holds of a tensor of global `shape`; nothing when it is not on the mesh."""
    coordinate = placement.coordinate(rank)
    if coordinate is None:
        return tuple(() for _ in shape)
    return index_set(shape, placement.mesh_shape, coordinate, placement.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A slice of a tensor of `global_shape`. `local_shape` is what this rank's tensor must have,
    padding included; `axes` names the axes of the mesh."""

    global_shape: Shape
    placement: PlacementClass
    axes: tuple[str, ...]
    local_shape: Shape

    def held(self, rank: int) -> IndexSet:
        """What `rank`, which is on the mesh, holds of the global tensor."""
        return held_by(self.placement, self.global_shape, rank)

    def part(self, tensor: Tensor, rank: int, *, key: str) -> tuple[IndexSet, Tensor]:
        """The index set of `rank` and the memory of it in `tensor`, without padding.

        `InvalidInputError` when the tensor is no longer of the declared local shape; `key` is its
        name in the message.
        """
        local = local_of(tensor).detach()
        if tuple(local.shape) != self.local_shape:
            raise InvalidInputError(
                f"{key}: declared as a slice of {self.global_shape} that has shape "
                f"{self.local_shape} on rank {rank}, it has {tuple(local.shape)} now; declare its "
                "placement again after changing how it is cut"
            )
        held = self.held(rank)
        return held, local[tuple(slice(0, length) for length in local_shape(held))]


def declaration(tensor: Tensor) -> Declared | None:
    """The declaration that a tensor of a collected model carries, if any."""
    found = declared_of(tensor)
    return found if isinstance(found, Declared) else None


def keep_declaration(module: nn.Module, name: str, declared: Declared) -> None:
    """Keep `declared` on `module` for its own parameter or buffer `name`."""
    table: dict[str, Declared] = {**vars(module).get(_TABLE, {}), name: declared}
    object.__setattr__(module, _TABLE, table)


def mark_declared(model: Model) -> None:
    """Write the declarations of all modules of `model` onto their live tensors.

    Two declarations of one tensor (a tied one) that differ are refused, naming both.
    """
    first: dict[int, tuple[str, Declared]] = {}
    for place in places(model):
        for name, declared in vars(place.module).get(_TABLE, {}).items():
            tensor = place.module._parameters.get(name, place.module._buffers.get(name))
            if tensor is None:
                continue
            full = place.canonical + name
            known, other = first.setdefault(id(tensor), (full, declared))
            if other != declared:
                raise InvalidInputError(
                    f"{known} and {full} are one tensor and are declared in two ways: "
                    f"{other.placement.placements} of {other.global_shape}, and "
                    f"{declared.placement.placements} of {declared.global_shape}"
                )
            setattr(tensor, DECLARED_ATTRIBUTE, declared)


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, still a slice of what `tensor` is a slice of."""
    view, declared = tensor.detach(), declaration(tensor)
    if declared is not None:
        setattr(view, DECLARED_ATTRIBUTE, declared)
    return view


def inherit(tensor: Tensor, param: Tensor) -> Tensor:
    """A detached view of `tensor` that is held as `param` is, when it has its local shape.

    For the moments of a declared parameter: they are plain tensors beside it.
    """
    view = tensor.detach()
    declared = declaration(param)
    if declared is not None and tuple(local_of(view).shape) == declared.local_shape:
        setattr(view, DECLARED_ATTRIBUTE, declared)
    return view
