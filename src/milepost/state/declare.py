"""`declare_placement`: say once what a plain local tensor is a slice of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from milepost.errors import InvalidInputError
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import (
    AnyShard,
    PackedShard,
    Placement,
    Shard,
    index_set,
    local_shape,
)
from milepost.plan.holding import PlacementClass
from milepost.state.declared import Declared, keep_declaration
from milepost.state.names import places
from milepost.state.placements import own_rank, placements_of
from milepost.state.tensors import local_of


def declare_placement(
    module: nn.Module,
    name: str,
    *,
    global_shape: Sequence[int],
    mesh: Any,
    placements: Sequence[Any],
    padded_shape: Sequence[int] | None = None,
) -> None:
    """Say that the parameter or buffer `name` of `module` is this rank's slice of a larger tensor.

    `name` is a dotted path inside `module`, without the names of wrappers. `mesh` is a
    `DeviceMesh`, or global ranks as a (nested) list; this rank is on it. `placements[i]` belongs to
    mesh axis i: torch's `Shard`, `Replicate` or `_StridedShard`, or `PackedShard`, applied from
    left to right by the rule of `torch.chunk`. A packed projection (gate and up in one tensor, each
    cut by itself) is `_StridedShard(dim, split_factor=2)`, and `PackedShard` where its blocks
    differ in length or ranks share a block. Where the tensor is padded so that it divides (a
    vocabulary), `padded_shape` is the global shape with the padding: the rows past `global_shape`
    are neither saved nor loaded, and are zero in new moments and in tensors that come from meta.

    From then on saves and loads treat it, and moments of its local shape, as they do a DTensor. The
    declaration is kept on the submodule that owns the tensor, by name: it outlives optimizers,
    `to()`, `to_empty()` and a replaced parameter. Declare again after cutting in another way. A
    parameter that is a DTensor as well, because `fully_shard` was applied to the slice, is declared
    after that, with the mesh of both and the placements of the slice before those of FSDP.

    Not collective. `InvalidInputError` when the local shape is not what the placements give.
    """
    owner, tensor = _find(module, name)
    shape = tuple(global_shape)
    padded = shape if padded_shape is None else tuple(padded_shape)
    mesh_shape, ranks, axes = _mesh(mesh, name)
    cuts = _normalised(placements_of(placements, name), mesh_shape, shape, name)
    _check_padding(shape, padded, cuts, name)
    placement = PlacementClass(mesh_shape, ranks, _padded(cuts, mesh_shape, shape, padded, name))
    rank = own_rank()
    coordinate = placement.coordinate(rank)
    if coordinate is None:
        raise InvalidInputError(
            f"{name}: rank {rank} declares it on the mesh of ranks {list(ranks)[:8]}, which it is "
            "not on; pass the mesh that this rank is in"
        )
    expected = local_shape(index_set(padded, mesh_shape, coordinate, cuts))
    found = tuple(local_of(tensor).shape)
    if found != expected:
        raise InvalidInputError(
            f"{name}: rank {rank} holds shape {found}; {cuts} of shape {padded} on a mesh of "
            f"{mesh_shape} gives it {expected}; correct global_shape or placements, and pass "
            "padded_shape if the tensor is padded"
        )
    declared = Declared(global_shape=shape, placement=placement, axes=axes, local_shape=expected)
    keep_declaration(owner, name.rpartition(".")[2], declared)


def _find(module: nn.Module, name: str) -> tuple[nn.Module, torch.Tensor]:
    path, _, last = name.rpartition(".")
    for place in places(module):
        if place.canonical.rstrip(".") == path:
            tensor = place.module._parameters.get(last, place.module._buffers.get(last))
            if tensor is not None:
                return place.module, tensor
    raise InvalidInputError(
        f"{name}: no parameter or buffer of {type(module).__name__} has this name; give the dotted "
        "name that named_parameters() shows, without the names of wrappers"
    )


def _mesh(mesh: Any, name: str) -> tuple[Shape, tuple[int, ...], tuple[str, ...]]:
    """Shape, global ranks in row-major order, and names of the axes."""
    grid = torch.as_tensor(getattr(mesh, "mesh", mesh))
    ranks = [int(rank) for rank in grid.flatten()]
    if grid.ndim == 0 or not ranks or len(set(ranks)) != len(ranks):
        raise InvalidInputError(
            f"{name}: mesh: expected a DeviceMesh or distinct global ranks, found {mesh!r:.100}"
        )
    axes = getattr(mesh, "mesh_dim_names", None) or [f"axis_{n}" for n in range(grid.ndim)]
    return tuple(grid.shape), tuple(ranks), tuple(axes)


def _normalised(
    placements: Sequence[Placement], mesh_shape: Shape, shape: Shape, name: str
) -> tuple[Placement, ...]:
    if len(placements) != len(mesh_shape):
        raise InvalidInputError(
            f"{name}: {len(placements)} placements for a mesh of {len(mesh_shape)} axes; give one "
            "for each axis"
        )
    found: list[Placement] = []
    for placement, count in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, AnyShard):
            if not -len(shape) <= placement.dim < len(shape):
                raise InvalidInputError(f"{name}: {placement} of a tensor of {len(shape)} dims")
            placement = replace(placement, dim=placement.dim % len(shape))
        if isinstance(placement, PackedShard):
            sizes = tuple(placement.sizes)
            replicas = tuple(placement.replicas) or (1,) * len(sizes)
            placement = PackedShard(placement.dim, sizes, replicas)
            _check_packed(placement, found, count, shape, name)
        found.append(placement)
    return tuple(found)


def _check_packed(
    packed: PackedShard, before: Sequence[Placement], count: int, shape: Shape, name: str
) -> None:
    """Refuse blocks that are not those of the dim, or that the `count` ranks cannot share."""
    length = shape[packed.dim]
    wrong = None
    if any(isinstance(cut, AnyShard) and cut.dim == packed.dim for cut in before):
        wrong = f"dim {packed.dim} is cut before; the blocks must be cut first, as a whole"
    elif any(size < 0 for size in packed.sizes):
        wrong = "a size is negative; give the length of each block in the global tensor"
    elif sum(packed.sizes) != length:
        wrong = (
            f"the sizes add up to {sum(packed.sizes)}, dim {packed.dim} of {shape} has {length}; "
            "give the length of each block in the global tensor"
        )
    elif len(packed.replicas) != len(packed.sizes):
        wrong = (
            f"{len(packed.replicas)} replicas for {len(packed.sizes)} blocks; give one for each "
            "block, 1 where no ranks share a chunk"
        )
    elif any(shared < 1 or count % shared for shared in packed.replicas):
        wrong = (
            f"its axis has {count} ranks, which each of the replicas must divide; give the number "
            "of neighbouring ranks that hold the same chunk of a block"
        )
    if wrong is not None:
        raise InvalidInputError(f"{name}: {packed}: {wrong}")


def _check_padding(shape: Shape, padded: Shape, cuts: Sequence[Placement], name: str) -> None:
    if len(padded) != len(shape) or any(p < s for p, s in zip(padded, shape, strict=True)):
        raise InvalidInputError(
            f"{name}: padded_shape {padded} must have the dims of global_shape {shape}, each at "
            "least as long"
        )
    for cut in cuts:
        if isinstance(cut, AnyShard) and _is_packed(cut) and padded[cut.dim] != shape[cut.dim]:
            raise InvalidInputError(
                f"{name}: dim {cut.dim} is packed and padded; the padding would lie between its "
                "parts; keep the parts in tensors of their own"
            )


def _is_packed(cut: AnyShard) -> bool:
    return isinstance(cut, PackedShard) or cut.split_factor > 1


def _padded(
    cuts: Sequence[Placement], mesh_shape: Shape, shape: Shape, padded: Shape, name: str
) -> tuple[Placement, ...]:
    """The placements as cuts of the padded tensor: each knows the length that it divides."""
    lengths = list(padded)
    found: list[Placement] = []
    for cut, count in zip(cuts, mesh_shape, strict=True):
        if not isinstance(cut, Shard) or padded[cut.dim] == shape[cut.dim]:
            found.append(cut)
            continue
        length = lengths[cut.dim]
        if length % count:
            raise InvalidInputError(
                f"{name}: the padded length {length} of dim {cut.dim} does not divide by {count}"
            )
        lengths[cut.dim] = length // count
        found.append(Shard(cut.dim, padded_length=length))
    return tuple(found)
