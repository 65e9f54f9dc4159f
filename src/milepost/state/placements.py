"""How a live tensor is held: its global shape, its class, and the memory this rank has of it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.format.dtypes import by_torch_name
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import (
    AnyShard,
    IndexSet,
    Placement,
    Replicate,
    Shard,
    local_shape,
    whole,
)
from milepost.plan.holding import PlacementClass
from milepost.plan.inventory import SELF, LeafInfo
from milepost.state.declared import declaration, held_by
from milepost.state.tensors import global_shape, is_dtensor


class Held(NamedTuple):
    """A leaf of this rank: what its inventory says, and the local tensor."""

    info: LeafInfo
    local: Tensor


def describe(tensor: Tensor, *, key: str) -> Held:
    """What this rank holds of `tensor`; `key` is its name in messages.

    A DTensor says it itself, and a slice that was declared by its declaration. Another plain tensor
    is held whole. `Partial` placements have no value yet and are refused, as is a local shape that
    the placements do not give.
    """
    row = by_torch_name(str(tensor.dtype).removeprefix("torch."))
    dtype = str(tensor.dtype) if row is None else row.name
    shape = global_shape(tensor)
    declared = declaration(tensor)
    if declared is not None:
        _, local = declared.part(tensor, own_rank(), key=key)
        classes = (declared.placement,)
        return Held(
            LeafInfo(dtype=dtype, shape=shape, itemsize=local.element_size(), classes=classes),
            local,
        )
    if not is_dtensor(tensor):
        info = LeafInfo(dtype=dtype, shape=shape, itemsize=tensor.element_size(), classes=(SELF,))
        return Held(info, tensor.detach())
    placement_class = class_of(tensor, key=key)
    local = tensor._local_tensor.detach()  # type: ignore[attr-defined]
    _check_local(placement_class, shape, local, key)
    info = LeafInfo(
        dtype=dtype, shape=shape, itemsize=local.element_size(), classes=(placement_class,)
    )
    return Held(info, local)


def class_of(tensor: Any, *, key: str) -> PlacementClass:
    """The mesh and placements of a DTensor, by global rank."""
    return _class_on(tensor.device_mesh, placements_of(tensor.placements, key))


@lru_cache(maxsize=1024)  # a handful for all tensors of a model
def _class_on(device_mesh: Any, placements: tuple[Placement, ...]) -> PlacementClass:
    return PlacementClass(*_grid(device_mesh), placements)


@lru_cache(maxsize=32)
def _grid(device_mesh: Any) -> tuple[Shape, tuple[int, ...]]:
    """Shape and global ranks of a mesh; torch computes them anew whenever they are asked for."""
    mesh = device_mesh.mesh
    return tuple(mesh.shape), tuple(mesh.flatten().tolist())


def placements_of(placements: Iterable[Any], key: str) -> tuple[Placement, ...]:
    """torch's placements, or ours, as ours; `key` is the tensor's name in messages."""
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Replicate | AnyShard):
            found.append(placement)
        elif placement.is_replicate():
            found.append(Replicate())
        elif placement.is_partial() or not hasattr(placement, "dim"):
            raise InvalidInputError(
                f"{key}: its placement is {placement}, a value that is not summed up yet; save "
                "after the optimizer step, when gradients and sums are reduced"
            )
        else:
            found.append(_shard(placement.dim, int(getattr(placement, "split_factor", 1))))
    return tuple(found)


_shard = lru_cache(maxsize=256)(Shard)


def own_rank() -> int:
    """The global rank of this process; 0 when it is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def axes_of(tensor: Tensor) -> dict[str, int]:
    """Names and lengths of the mesh axes that `tensor` is placed on; empty when it is on none."""
    declared = declaration(tensor)
    if declared is not None:
        return dict(zip(declared.axes, declared.placement.mesh_shape, strict=True))
    if not is_dtensor(tensor):
        return {}
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"axis_{n}" for n in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))


def _check_local(
    placement_class: PlacementClass, shape: tuple[int, ...], local: Tensor, key: str
) -> None:
    rank = own_rank()
    if placement_class.coordinate(rank) is None:
        return
    expected = local_shape(held_by(placement_class, shape, rank))
    if tuple(local.shape) != expected:
        raise InvalidInputError(
            f"{key}: rank {rank} holds shape {tuple(local.shape)}; the placements "
            f"{placement_class.placements} of global shape {shape} give it {expected}"
        )


def local_part(tensor: Tensor) -> tuple[IndexSet, Tensor]:
    """What this rank holds of a live tensor, as an index set, and the memory to fill."""
    declared = declaration(tensor)
    if declared is not None:
        return declared.part(tensor, own_rank(), key="a live tensor")
    if not is_dtensor(tensor):
        return whole(tuple(tensor.shape)), tensor.detach()
    local = tensor._local_tensor.detach()  # type: ignore[attr-defined]
    placement_class = class_of(tensor, key="a live tensor")
    return held_by(placement_class, tuple(tensor.shape), own_rank()), local
