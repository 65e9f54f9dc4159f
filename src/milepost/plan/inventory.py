"""The inventory: what every rank holds, merged into one table that all ranks plan from.

Ranks lack each other's names (pipeline stages) and see only the meshes they are in, so the layout
is not assumed but agreed: each rank describes its leaves, distinct descriptions are merged, and
layout and ownership are pure functions of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from milepost._collector import collector_paused
from milepost.errors import InvalidInputError, MismatchError
from milepost.geometry.axis_view import AxisKind, Fixed
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import PackedShard, Placement, Replicate, Shard
from milepost.plan.holding import Holding, PlacementClass, group_holdings
from milepost.plan.hub_views import (
    ViewRun,
    decode_kind,
    decode_views,
    encode_kind,
    encode_views,
)
from milepost.plan.view_holding import view_holding


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """A tensor as its holders see it: safetensors dtype, global shape as torch counts it, bytes of
    one of torch's elements, and how it is held. A tensor on disk that is a view of a held one has
    the shape of the view and the classes of the held one."""

    dtype: str
    shape: Shape
    itemsize: int
    classes: tuple[PlacementClass, ...]
    view: tuple[AxisKind, Fixed] | None = None


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Leaves by set (a model, an optimizer, the small tensors) and name.

    `facts` are texts that must be equal on all ranks that state them, by key. `views` says by set
    which leaves lie on disk as something else: under other names, or one by one. It has a row for
    the further names of tied leaves too. `frozen` has by set the leaves that are not trained, as
    far as all ranks that hold them say so.
    """

    sets: dict[str, dict[str, LeafInfo]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    views: dict[str, dict[str, tuple[ViewRun, ...]]] = field(default_factory=dict)
    frozen: dict[str, frozenset[str]] = field(default_factory=dict)
    _on_disk: dict[str, dict[str, LeafInfo]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def on_disk(self, key: str) -> dict[str, LeafInfo]:
        """The tensors of one set by the names that they have on disk; empty for a set that is not
        there. Asked for when the inventory is complete, and kept."""
        if key not in self._on_disk:
            views = self.views.get(key, {})
            found: dict[str, LeafInfo] = {}
            for fqn, leaf in self.sets.get(key, {}).items():
                if fqn not in views:
                    found[fqn] = leaf
                    continue
                for name, viewed in leaf_views(leaf, views[fqn]):
                    found[name] = viewed
            self._on_disk[key] = found
        return self._on_disk[key]

    def frozen_on_disk(self, key: str) -> frozenset[str]:
        """The frozen tensors of one set, by the names that they have on disk."""
        views = self.views.get(key, {})
        found: set[str] = set()
        for fqn in self.frozen.get(key, ()):
            runs = views.get(fqn)
            found.update([fqn] if runs is None else (v.name for run in runs for v in run.views()))
        return frozenset(found)

    def ties_on_disk(self, key: str, ties: Mapping[str, str]) -> dict[str, str]:
        """`ties`, alias to kept name, in the names that tensors have on disk."""
        views = self.views.get(key, {})
        found: dict[str, str] = {}
        for alias, kept in ties.items():
            names = (
                [view.name for run in views[name] for view in run.views()]
                if name in views
                else [name]
                for name in (alias, kept)
            )
            found.update(zip(*names, strict=False))
        return {alias: kept for alias, kept in found.items() if alias != kept}

    def to_bytes(self) -> bytes:
        """A compact form; equal inventories give equal bytes."""
        table: dict[PlacementClass, int] = {}
        sets = {
            name: [
                [fqn, leaf.dtype, leaf.shape, leaf.itemsize]
                + [table.setdefault(c, len(table)) for c in leaf.classes]
                for fqn, leaf in leaves.items()
            ]
            for name, leaves in self.sets.items()
        }
        classes = [_class_to_list(placement_class) for placement_class in table]
        document = {"sets": sets, "classes": classes, "facts": self.facts}
        if self.frozen:
            document["frozen"] = {
                key: f"{_bits(self.sets[key], names):x}" for key, names in self.frozen.items()
            }
        if self.views:
            kinds: dict[AxisKind, int] = {}
            document["views"] = encode_views(self.views, kinds)
            document["kinds"] = [encode_kind(kind) for kind in kinds]
        return msgspec.json.encode(document)

    @staticmethod
    @collector_paused()
    def from_bytes(raw: bytes) -> Inventory:
        data = msgspec.json.decode(raw)
        classes = [_class_from_list(entry) for entry in data["classes"]]
        sets = {
            name: {
                fqn: LeafInfo(
                    dtype=dtype,
                    shape=tuple(shape),
                    itemsize=itemsize,
                    classes=tuple(classes[number] for number in numbers),
                )
                for fqn, dtype, shape, itemsize, *numbers in rows
            }
            for name, rows in data["sets"].items()
        }
        kinds = [decode_kind(entry) for entry in data.get("kinds", ())]
        views = decode_views(data.get("views", {}), kinds)
        frozen = {
            key: _of_bits(sets[key], int(digits, 16))
            for key, digits in data.get("frozen", {}).items()
        }
        return Inventory(sets=sets, facts=data["facts"], views=views, frozen=frozen)


def _bits(names: Iterable[str], wanted: Collection[str]) -> int:
    """One bit for each name, the first name's the lowest."""
    digits = "".join("1" if name in wanted else "0" for name in names)
    return int(digits[::-1] or "0", 2)


def _of_bits(names: Iterable[str], bits: int) -> frozenset[str]:
    digits = f"{bits:b}"[::-1]
    return frozenset(name for name, digit in zip(names, digits, strict=False) if digit == "1")


def _class_to_list(c: PlacementClass) -> list[Any]:
    return [c.mesh_shape, c.ranks, [_placement_to_list(p) for p in c.placements]]


def _placement_to_list(placement: Placement) -> list[Any]:
    if isinstance(placement, Replicate):
        return []
    if isinstance(placement, PackedShard):
        return [placement.dim, placement.sizes, placement.replicas]
    padding = [placement.padded_length] if placement.padded_length else []
    return [placement.dim, placement.split_factor, *padding]


def _class_from_list(entry: Sequence[Any]) -> PlacementClass:
    mesh_shape, ranks, placements = entry
    decoded = tuple(_placement_from_list(p) for p in placements)
    return PlacementClass(tuple(mesh_shape), tuple(ranks), decoded)


def _placement_from_list(entry: Sequence[Any]) -> Placement:
    if not entry:
        return Replicate()
    dim, split, *rest = entry
    if isinstance(split, list):
        return PackedShard(dim, tuple(split), tuple(rest[0]))
    return Shard(dim, split, *rest)


SELF = PlacementClass((), (), ())
"""The class of a plain tensor in one rank's own inventory: held whole by whoever states it. It
names no rank, so that ranks which hold the same say the same."""


@collector_paused()
def merge_inventories(found: Iterable[tuple[Sequence[int], Inventory]]) -> Inventory:
    """One inventory out of distinct ones, each with the ranks that stated it.

    Names keep the order in which the lowest ranks list them. A leaf whose dtype or shape differs
    between ranks, or a fact that does, is refused and names both ranks.
    """
    found = list(found)
    merged = Inventory(frozen=_merge_frozen(inventory for _, inventory in found))
    origin: dict[tuple[str, str], int] = {}
    holders = _holders(found)
    for ranks, inventory in sorted(found, key=lambda item: min(item[0])):
        first = min(ranks)
        for key, text in inventory.facts.items():
            _merge_fact(merged, origin, key, text, first)
        for name, leaves in inventory.sets.items():
            target = merged.sets.setdefault(name, {})
            for fqn, leaf in leaves.items():
                named = _with_ranks(leaf, holders.get((name, fqn), ()))
                target[fqn] = _merge_leaf(target.get(fqn), named, f"{name}: {fqn}", origin, first)
        _merge_views(merged, inventory, origin, first)
    return merged


def _merge_frozen(found: Iterable[Inventory]) -> dict[str, frozenset[str]]:
    """What some rank holds as frozen and no rank trains."""
    frozen: dict[str, set[str]] = {}
    trained: dict[str, set[str]] = {}
    for inventory in found:
        for key, leaves in inventory.sets.items():
            own = inventory.frozen.get(key, frozenset())
            frozen.setdefault(key, set()).update(own)
            trained.setdefault(key, set()).update(leaves.keys() - own)
    kept = {key: frozenset(names - trained[key]) for key, names in frozen.items()}
    return {key: names for key, names in kept.items() if names}


def _merge_views(
    merged: Inventory, inventory: Inventory, origin: dict[tuple[str, str], int], rank: int
) -> None:
    for key, views in inventory.views.items():
        target = merged.views.setdefault(key, {})
        for fqn, runs in views.items():
            first = origin.setdefault(("views", f"{key}: {fqn}"), rank)
            if target.setdefault(fqn, runs) != runs:
                raise MismatchError(
                    f"{key}: {fqn}: ranks {first} and {rank} would store it under other names or "
                    "in other shapes; build the model from the same class and configuration on "
                    "all ranks"
                )


def _holders(
    found: Sequence[tuple[Sequence[int], Inventory]],
) -> dict[tuple[str, str], tuple[int, ...]]:
    """The ranks that hold a leaf whole and plain, whatever else their inventories differ in."""
    holders: dict[tuple[str, str], list[int]] = {}
    for ranks, inventory in found:
        for name, leaves in inventory.sets.items():
            for fqn, leaf in leaves.items():
                if SELF in leaf.classes:
                    holders.setdefault((name, fqn), []).extend(ranks)
    return {place: tuple(sorted(ranks)) for place, ranks in holders.items()}


def _with_ranks(leaf: LeafInfo, holders: Sequence[int]) -> LeafInfo:
    if SELF not in leaf.classes:
        return leaf
    whole = PlacementClass((len(holders),), tuple(holders), (Replicate(),))
    classes = tuple(whole if c == SELF else c for c in leaf.classes)
    return LeafInfo(dtype=leaf.dtype, shape=leaf.shape, itemsize=leaf.itemsize, classes=classes)


def _merge_fact(
    merged: Inventory, origin: dict[tuple[str, str], int], key: str, text: str, rank: int
) -> None:
    known = merged.facts.setdefault(key, text)
    first = origin.setdefault(("fact", key), rank)
    if known != text:
        raise MismatchError(
            f"{key}: rank {first} has {known[:200]}, rank {rank} has {text[:200]}; it must be the "
            "same on all ranks"
        )


def _merge_leaf(
    known: LeafInfo | None,
    leaf: LeafInfo,
    name: str,
    origin: dict[tuple[str, str], int],
    rank: int,
) -> LeafInfo:
    first = origin.setdefault(("leaf", name), rank)
    if known is None:
        return leaf
    for what, ours, theirs in (
        ("dtype", known.dtype, leaf.dtype),
        ("global shape", known.shape, leaf.shape),
    ):
        if ours != theirs:
            raise MismatchError(
                f"{name}: {what} is {ours} on rank {first} and {theirs} on rank {rank}; a plain "
                "tensor that is a slice of it must be declared with milepost.declare_placement"
            )
    classes = tuple(dict.fromkeys((*known.classes, *leaf.classes)))
    return LeafInfo(dtype=known.dtype, shape=known.shape, itemsize=known.itemsize, classes=classes)


def holding_of(leaf: LeafInfo, name: str) -> Holding:
    """The holding that writes a leaf: the first, by rank, that covers all of it.

    Refused when no group of ranks holds the whole tensor.
    """
    groups = _groups_of(leaf.classes)
    if leaf.view is not None:
        groups = [view_holding(group, *leaf.view) for group in groups]
    for holding in groups:
        if holding.is_complete():
            return holding
    raise InvalidInputError(
        f"{name}: ranks {', '.join(str(list(g.ranks)[:8]) for g in groups)} hold parts of it, but "
        "no group holds all of it"
    )


@lru_cache(maxsize=1024)
def _groups_of(classes: tuple[PlacementClass, ...]) -> list[Holding]:
    """The holdings of a set of classes: thousands of tensors share a few of them."""
    return group_holdings(classes)


def leaf_views(leaf: LeafInfo, runs: Iterable[ViewRun]) -> Iterator[tuple[str, LeafInfo]]:
    """The tensors on disk that views of a leaf are, by name."""
    for run in runs:
        for name, kind, fixed in run.views():
            viewed = LeafInfo(
                dtype=leaf.dtype,
                shape=kind.shape,
                itemsize=leaf.itemsize,
                classes=leaf.classes,
                view=(kind, fixed),
            )
            yield name, viewed


def items_of(
    leaves: Mapping[str, LeafInfo], pack: Mapping[str, int]
) -> list[tuple[str, str, Shape]]:
    """Names, dtypes and header shapes for the layout; `pack` is elements per torch element."""
    return [
        (fqn, leaf.dtype, _header_shape(leaf.shape, pack.get(leaf.dtype, 1)))
        for fqn, leaf in leaves.items()
    ]


def _header_shape(shape: Shape, pack: int) -> Shape:
    return shape if pack == 1 or not shape else (*shape[:-1], shape[-1] * pack)
