"""Who holds what of a view: the ranks that have its fixed indices, as a grid of their own.

A fixed index of a dim that is cut (an expert of a fused weight under expert parallelism) pins the
axes that cut it: only the shards at those coordinates hold anything of the view. The axes that are
left cut the view's own dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import TypeAlias

from milepost.geometry.axis_view import AxisKind, Fixed, view_held
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import AnyShard, IndexSet, index_set
from milepost.plan.holding import Holding

Coordinate: TypeAlias = tuple[int, ...]
Pins: TypeAlias = tuple[tuple[int, int], ...]
"""(axis of the base's grid, coordinate on it), for the axes that cut fixed dims."""
Replicas: TypeAlias = dict[Coordinate, tuple[int, ...]]


def view_holding(base: Holding, kind: AxisKind, fixed: Fixed) -> Holding:
    """The holding of a view of a tensor that `base` holds; views with the same holders share it."""
    pins: list[tuple[int, int]] = []
    for dim, index in zip(kind.fixed_dims, fixed, strict=True):
        axes = tuple(n for n, (_, cut) in enumerate(base.signature) if cut.dim == dim)
        if axes:
            cuts = tuple(base.signature[axis] for axis in axes)
            coordinate = _coordinate_of_index(cuts, kind.source_shape[dim])[index]
            pins += zip(axes, coordinate, strict=True)
    return _view_holding(base, kind, tuple(sorted(pins)))


@lru_cache(maxsize=8192)
def _view_holding(base: Holding, kind: AxisKind, pins: Pins) -> Holding:
    return ViewHolding(base.classes, base, kind, pins)


@dataclass(frozen=True)
class ViewHolding(Holding):
    """The shards of `base` that have the fixed indices of a view, without the pinned axes."""

    base: Holding
    kind: AxisKind
    pins: Pins

    @cached_property
    def _hash(self) -> int:
        return hash((self.base, self.kind, self.pins))

    def __hash__(self) -> int:  # asked for every tensor of a model
        return self._hash

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        """The axes of the base's grid that are left."""
        pinned = dict(self.pins)
        return tuple(n for n in range(len(self.base.signature)) if n not in pinned)

    @cached_property
    def signature(self) -> tuple[tuple[int, AnyShard], ...]:
        """The axes that are left. The dims they name are those of the base."""
        return tuple(self.base.signature[axis] for axis in self._axes)

    @cached_property
    def shards(self) -> Replicas:
        """The ranks at each coordinate of the axes that are left."""
        axes = tuple(axis for axis, _ in self.pins)
        found = _by_pins(self.base, axes).get(tuple(index for _, index in self.pins), {})
        return dict(found)

    @cached_property
    def _held(self) -> dict[Coordinate, IndexSet]:
        return {}

    def held(self, shape: Shape, coordinate: Coordinate) -> IndexSet:
        """The index set of the view at a shard coordinate; `shape` is that of the view."""
        if coordinate not in self._held:
            held = self.base.held(self.kind.source_shape, self._in_base(coordinate))
            self._held[coordinate] = view_held(self.kind, held)
        return self._held[coordinate]

    def owned(self, shape: Shape, coordinate: Coordinate) -> IndexSet:
        """The part of it that belongs to this coordinate alone: what two share is the first's."""
        owned = self.base.owned(self.kind.source_shape, self._in_base(coordinate))
        return view_held(self.kind, owned)

    def _in_base(self, coordinate: Coordinate) -> Coordinate:
        full = dict([*self.pins, *zip(self._axes, coordinate, strict=True)])
        return tuple(full[axis] for axis in range(len(self.base.signature)))

    @cached_property
    def row_axes(self) -> tuple[int, ...]:
        """Positions in `grid` of the axes that cut dim 0 of the view."""
        if not self.kind.dims:
            return ()
        rows = self.kind.dims[0].source
        return tuple(n for n, (_, cut) in enumerate(self.signature) if cut.dim == rows)

    @cached_property
    def inner_axes(self) -> tuple[int, ...]:
        """Positions in `grid` of the axes that cut any other dim of the view."""
        return tuple(n for n in range(len(self.signature)) if n not in self.row_axes)


@lru_cache(maxsize=256)
def _coordinate_of_index(
    cuts: tuple[tuple[int, AnyShard], ...], length: int
) -> Mapping[int, Coordinate]:
    """For each index of a dim of `length`, the coordinate on the axes that cut the dim."""
    found: dict[int, Coordinate] = {}
    grid = tuple(count for count, _ in cuts)
    placements = tuple(replace(cut, dim=0) for _, cut in cuts)
    for coordinate in product(*map(range, grid)):
        (spans,) = index_set((length,), grid, coordinate, placements)
        for index in (index for span in spans for index in range(*span)):
            found.setdefault(index, coordinate)
    return found


@lru_cache(maxsize=256)
def _by_pins(base: Holding, axes: Sequence[int]) -> Mapping[Coordinate, Replicas]:
    """The shards of `base` by their coordinates on `axes`; each named by the other axes."""
    found: dict[Coordinate, Replicas] = {}
    left = [axis for axis in range(len(base.signature)) if axis not in axes]
    for coordinate, ranks in base.shards.items():
        pins = tuple(coordinate[axis] for axis in axes)
        rest = tuple(coordinate[axis] for axis in left)
        found.setdefault(pins, {})[rest] = ranks
    return found
