"""Who holds what of a tensor: placement classes, replicas and peers, in closed form.

Parameters of one model live on two or three meshes at once, and a rank sees only the meshes it is
in, so a tensor has one or more *placement classes*: a mesh of global ranks and placements on it.
Everything here is arithmetic on coordinates; nothing enumerates all shards of all tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from milepost.geometry.blocks import Shape
from milepost.geometry.placement import (
    AnyShard,
    IndexSet,
    PackedShard,
    Placement,
    coordinate_of,
    index_set,
    owned_set,
)


@dataclass(frozen=True)
class PlacementClass:
    """A mesh and the placements on it.

    `ranks` are global ranks in row-major order of `mesh_shape`; both are `()` and one rank for a
    plain tensor that a rank holds whole.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh_shape, self.ranks, self.placements))

    def __hash__(self) -> int:  # asked for every tensor, and there may be thousands of ranks
        return self._hash

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: number for number, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where `rank` is on the mesh; None when it is not on it."""
        position = self._position.get(rank)
        return None if position is None else coordinate_of(position, self.mesh_shape)

    @cached_property
    def cut(self) -> tuple[tuple[int, int, AnyShard], ...]:
        """The mesh axes that cut the tensor: (axis, its length, the placement)."""
        return tuple(
            (axis, self.mesh_shape[axis], placement)
            for axis, placement in enumerate(self.placements)
            if isinstance(placement, AnyShard)
        )

    @cached_property
    def signature(self) -> tuple[tuple[int, AnyShard], ...]:
        """How the tensor is cut, without regard to which ranks do it."""
        return tuple((length, placement) for _, length, placement in self.cut)

    def shard_coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate on the axes that cut; equal ones hold the same index set."""
        coordinate = self.coordinate(rank)
        assert coordinate is not None, f"rank {rank} is not on this mesh"
        return tuple(coordinate[axis] for axis, _, _ in self.cut)


@dataclass(frozen=True)
class Holding:
    """All classes of one signature for a tensor, as one logical grid of shards and replicas."""

    classes: tuple[PlacementClass, ...]

    @cached_property
    def signature(self) -> tuple[tuple[int, AnyShard], ...]:
        """The axes that cut: how many shards each makes, and how."""
        return self.classes[0].signature

    @cached_property
    def shards(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The ranks at each coordinate of the grid, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for placement_class in self.classes:
            for rank in placement_class.ranks:
                found.setdefault(placement_class.shard_coordinate(rank), []).append(rank)
        return {coordinate: tuple(sorted(ranks)) for coordinate, ranks in found.items()}

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return {rank: c for c, ranks in self.shards.items() for rank in ranks}

    @property
    def ranks(self) -> Sequence[int]:
        """Every rank that holds a part, ascending."""
        return sorted(self._coordinates)

    def shard_coordinate(self, rank: int) -> tuple[int, ...] | None:
        return self._coordinates.get(rank)

    def replicas(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold the same index set, ascending."""
        return self.shards[coordinate]

    @cached_property
    def replica_count(self) -> int:
        """Replicas of each shard; those beyond the common number take no part in a save."""
        return min(len(ranks) for ranks in self.shards.values())

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Lengths of the axes that cut."""
        return tuple(length for length, _ in self.signature)

    def is_complete(self) -> bool:
        """Whether every shard coordinate has a holder."""
        return self._is_complete

    @cached_property
    def _is_complete(self) -> bool:
        return len(self.shards) == prod(self.grid)

    @cached_property
    def sole_holder(self) -> int | None:
        """The rank that holds everything, alone; None when there are several."""
        ranks = self.ranks
        return ranks[0] if len(ranks) == 1 and not self.signature else None

    def held(self, shape: Shape, coordinate: tuple[int, ...]) -> IndexSet:
        """The index set at a shard coordinate."""
        return index_set(shape, self.grid, coordinate, self._placements)

    @cached_property
    def is_shared(self) -> bool:
        """Whether shards have elements in common."""
        cuts = self._placements
        return any(
            isinstance(cut, PackedShard) and any(n > 1 for n in cut.replicas) for cut in cuts
        )

    def owned(self, shape: Shape, coordinate: tuple[int, ...]) -> IndexSet:
        """The part of it that belongs to this coordinate alone: what two share is the first's."""
        return owned_set(shape, self.grid, coordinate, self._placements)

    @cached_property
    def _placements(self) -> tuple[AnyShard, ...]:
        return tuple(placement for _, placement in self.signature)

    @cached_property
    def row_axes(self) -> tuple[int, ...]:
        """Positions in `grid` of the axes that cut dim 0."""
        return tuple(n for n, (_, placement) in enumerate(self.signature) if placement.dim == 0)

    @cached_property
    def inner_axes(self) -> tuple[int, ...]:
        """Positions in `grid` of the axes that cut any other dim."""
        return tuple(n for n, (_, placement) in enumerate(self.signature) if placement.dim != 0)

    @cached_property
    def peer_count(self) -> int:
        """Shards that hold the same rows and differ in the columns."""
        return prod(self.grid[axis] for axis in self.inner_axes)

    def peer_number(self, coordinate: tuple[int, ...]) -> int:
        """Which of the peers a shard is, by its coordinate on the inner axes."""
        number = 0
        for axis in self.inner_axes:
            number = number * self.grid[axis] + coordinate[axis]
        return number

    def peers(self, coordinate: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Coordinates of all shards with the same rows, in order of their peer number."""
        for number in range(self.peer_count):
            inner = coordinate_of(number, [self.grid[axis] for axis in self.inner_axes])
            changed = list(coordinate)
            for axis, index in zip(self.inner_axes, inner, strict=True):
                changed[axis] = index
            yield tuple(changed)


def group_holdings(classes: Sequence[PlacementClass]) -> list[Holding]:
    """Classes of one tensor grouped by how they cut it, the group of the lowest rank first."""
    groups: dict[tuple[tuple[int, AnyShard], ...], list[PlacementClass]] = {}
    for placement_class in sorted(classes, key=lambda c: min(c.ranks)):
        groups.setdefault(placement_class.signature, []).append(placement_class)
    return [Holding(tuple(group)) for group in groups.values()]
