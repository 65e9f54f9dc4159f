"""The inventory: what every rank holds, merged into one table that all ranks plan from.

Ranks lack each other's names (pipeline stages) and see only the meshes they are in, so the layout
is not assumed but agreed: each rank describes its leaves, distinct descriptions are merged, and
layout and ownership are pure functions of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from milepost.errors import InvalidInputError, MismatchError
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import Placement, Replicate, Shard
from milepost.plan.holding import Holding, PlacementClass, group_holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """A tensor as its holders see it: safetensors dtype, global shape as torch counts it, bytes of
    one of torch's elements, and how it is held."""

    dtype: str
    shape: Shape
    itemsize: int
    classes: tuple[PlacementClass, ...]


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Leaves by set (a model, an optimizer, the small tensors) and name.

    `facts` are texts that must be equal on all ranks that state them, by key.
    """

    sets: dict[str, dict[str, LeafInfo]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

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
        return msgspec.json.encode({"sets": sets, "classes": classes, "facts": self.facts})

    @staticmethod
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
        return Inventory(sets=sets, facts=data["facts"])


def _class_to_list(c: PlacementClass) -> list[Any]:
    placements = [[p.dim, p.split_factor] if isinstance(p, Shard) else [] for p in c.placements]
    return [c.mesh_shape, c.ranks, placements]


def _class_from_list(entry: Sequence[Any]) -> PlacementClass:
    mesh_shape, ranks, placements = entry
    decoded: tuple[Placement, ...] = tuple(Shard(*p) if p else Replicate() for p in placements)
    return PlacementClass(tuple(mesh_shape), tuple(ranks), decoded)


SELF = PlacementClass((), (), ())
"""The class of a plain tensor in one rank's own inventory: held whole by whoever states it. It
names no rank, so that ranks which hold the same say the same."""


def merge_inventories(found: Iterable[tuple[Sequence[int], Inventory]]) -> Inventory:
    """One inventory out of distinct ones, each with the ranks that stated it.

    Names keep the order in which the lowest ranks list them. A leaf whose dtype or shape differs
    between ranks, or a fact that does, is refused and names both ranks.
    """
    merged = Inventory()
    origin: dict[tuple[str, str], int] = {}
    for ranks, inventory in sorted(found, key=lambda item: min(item[0])):
        first = min(ranks)
        whole = PlacementClass((len(ranks),), tuple(sorted(ranks)), (Replicate(),))
        for key, text in inventory.facts.items():
            _merge_fact(merged, origin, key, text, first)
        for name, leaves in inventory.sets.items():
            target = merged.sets.setdefault(name, {})
            for fqn, leaf in leaves.items():
                named = _with_ranks(leaf, whole)
                target[fqn] = _merge_leaf(target.get(fqn), named, f"{name}: {fqn}", origin, first)
    return merged


def _with_ranks(leaf: LeafInfo, whole: PlacementClass) -> LeafInfo:
    if SELF not in leaf.classes:
        return leaf
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
                "tensor that is really a shard needs a declared placement"
            )
    classes = tuple(dict.fromkeys((*known.classes, *leaf.classes)))
    return LeafInfo(dtype=known.dtype, shape=known.shape, itemsize=known.itemsize, classes=classes)


def holding_of(leaf: LeafInfo, name: str) -> Holding:
    """The holding that writes a leaf: the first, by rank, that covers all of it.

    Refused when no group of ranks holds the whole tensor.
    """
    groups = _groups_of(leaf.classes)
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
