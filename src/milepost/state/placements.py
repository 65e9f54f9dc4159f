"""How a live tensor is held: its global shape, its class, and the memory this rank has of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.format.dtypes import by_torch_name
from milepost.geometry.placement import (
    IndexSet,
    Placement,
    Replicate,
    Shard,
    local_shape,
    whole,
)
from milepost.plan.holding import Holding, PlacementClass
from milepost.plan.inventory import SELF, LeafInfo
from milepost.state.tensors import is_dtensor


class Held(NamedTuple):
    """A leaf of this rank: what its inventory says, and the local tensor."""

    info: LeafInfo
    local: Tensor


def describe(tensor: Tensor, *, key: str) -> Held:
    """What this rank holds of `tensor`; `key` is its name in messages.

    A DTensor says it itself. A plain tensor is held whole. `Partial` placements have no value yet
    and are refused, as is a local shape that the placements do not give.
    """
    row = by_torch_name(str(tensor.dtype).removeprefix("torch."))
    dtype = str(tensor.dtype) if row is None else row.name
    shape = tuple(tensor.shape)
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
    mesh = tensor.device_mesh.mesh
    return PlacementClass(
        tuple(mesh.shape), tuple(mesh.flatten().tolist()), _placements(tensor.placements, key)
    )


def _placements(placements: Iterable[Any], key: str) -> tuple[Placement, ...]:
    found: list[Placement] = []
    for placement in placements:
        if placement.is_replicate():
            found.append(Replicate())
        elif placement.is_partial() or not hasattr(placement, "dim"):
            raise InvalidInputError(
                f"{key}: its placement is {placement}, a value that is not summed up yet; save "
                "after the optimizer step, when gradients and sums are reduced"
            )
        else:
            found.append(Shard(placement.dim, int(getattr(placement, "split_factor", 1))))
    return tuple(found)


def _check_local(
    placement_class: PlacementClass, shape: tuple[int, ...], local: Tensor, key: str
) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    if placement_class.coordinate(rank) is None:
        return
    holding = Holding((placement_class,))
    held = holding.held(shape, placement_class.shard_coordinate(rank))
    expected = local_shape(held)
    if tuple(local.shape) != expected:
        raise InvalidInputError(
            f"{key}: rank {rank} holds shape {tuple(local.shape)}; the placements "
            f"{placement_class.placements} of global shape {shape} give it {expected}"
        )


def local_part(tensor: Tensor) -> tuple[IndexSet, Tensor]:
    """What this rank holds of a live tensor, as an index set, and the memory to fill."""
    if not is_dtensor(tensor):
        return whole(tuple(tensor.shape)), tensor.detach()
    import torch.distributed as dist

    local = tensor._local_tensor.detach()  # type: ignore[attr-defined]
    placement_class = class_of(tensor, key="a live tensor")
    rank = dist.get_rank()
    if placement_class.coordinate(rank) is None:
        return tuple(() for _ in tensor.shape), local
    holding = Holding((placement_class,))
    held = holding.held(tuple(tensor.shape), placement_class.shard_coordinate(rank))
    return held, local
