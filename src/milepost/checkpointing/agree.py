"""What the ranks must agree on before a save is laid out: trees and the inventory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler

from milepost.checkpointing.agree_optimizer import (
    optimizer_digest,
    own_key,
    settle_optimizer,
    update_digest,
)
from milepost.checkpointing.capture import RNG_TENSOR, Captured, State
from milepost.checkpointing.files import SMALL_SET
from milepost.checkpointing.per_rank import settle_positions
from milepost.engine.rendezvous import Conversation
from milepost.errors import MismatchError
from milepost.format import strictjson
from milepost.format.tree import TAG_KEY
from milepost.geometry.placement import Replicate, Shard
from milepost.plan.holding import PlacementClass
from milepost.plan.hub_views import Views
from milepost.plan.inventory import Inventory, LeafInfo, merge_inventories
from milepost.state.model import ModelState
from milepost.state.other import Kind, capture_stateful
from milepost.state.placements import Held, axes_of, describe
from milepost.state.tree_blob import pack_tree

_merged: dict[bytes, Inventory] = {}
_kept_keys: dict[bytes, bytes] = {}


def settle_trees(talk: Conversation, captured: Captured, state: State) -> dict[str, Held]:
    """Agree on everything that is no weight and no moment; the small tensors as they will be held.

    A tree that is the same on all ranks is stored once, from the coordinator. Optimizers of which
    ranks have different parameters are joined; states that no whole tensor can be made of are kept
    per rank. Any other tree that differs is kept per rank, as a
    row of bytes of each; schedulers and model extras must not differ and are refused, naming two
    ranks.
    """
    world = talk.world_size
    if world > 1:
        settle_positions(talk, captured)
        _keep_per_rank(talk, captured, state)
    every = PlacementClass((world,), tuple(range(world)), (Shard(0),))
    first = PlacementClass((1,), (0,), (Replicate(),))
    held = {}
    for name, tensor in captured.tensors.items():
        is_row = name == RNG_TENSOR or name in captured.rows
        if not is_row and not talk.is_coordinator:
            continue
        info = describe(tensor, key=name).info
        shape = (world, *info.shape[1:]) if is_row else info.shape
        classes = (every if is_row else first,)
        leaf = LeafInfo(dtype=info.dtype, shape=shape, itemsize=info.itemsize, classes=classes)
        held[name] = Held(leaf, tensor)
    return held


def _keep_per_rank(talk: Conversation, captured: Captured, state: State) -> None:
    own = {key: _tree_digest(tree, captured.tensors) for key, tree in captured.trees.items()}
    for optimizer in captured.optimizers:
        own[optimizer.place] = optimizer_digest(optimizer.state, own[optimizer.place])
    reports = talk.gather("trees", json.dumps(own).encode())
    verdict = json.dumps(_differing(reports)).encode() if talk.is_coordinator else None
    differing: dict[str, int] = json.loads(talk.broadcast("trees-differ", verdict))
    optimizers = {o.place: o for o in captured.optimizers}
    blobs = {}
    for place in [key for key in differing if key in optimizers]:
        del differing[place]
        kept = settle_optimizer(talk, captured, optimizers[place])
        if kept is not None:
            blobs[own_key(place)] = pack_tree(kept, key=place)
    blobs |= {key: _own_blob(captured, state, key, differing[key]) for key in differing}
    lengths = {key: len(blob) for key, blob in blobs.items()}
    found = [json.loads(raw) for raw in talk.gather("lengths", json.dumps(lengths).encode())]
    told = {key: max(each[key] for each in found) for key in blobs} if found else None
    raw = talk.broadcast("longest", None if told is None else json.dumps(told).encode())
    longest: dict[str, int] = json.loads(raw)
    for key, blob in blobs.items():
        row = bytearray(blob.ljust(longest[key], b"\0"))
        captured.replace_by_row(key, torch.frombuffer(row, dtype=torch.uint8).reshape(1, -1))
    captured.keep_only({name for tree in captured.trees.values() for name in _references(tree)})


def _differing(reports: list[bytes]) -> dict[str, int]:
    """Keys whose trees are not the same everywhere, each with a rank that differs from rank 0."""
    trees = [json.loads(raw) for raw in reports]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {
        key: next(r for r, tree in enumerate(trees) if tree.get(key) != trees[0].get(key))
        for key in keys
        if any(tree.get(key) != trees[0].get(key) for tree in trees)
    }


def _own_blob(captured: Captured, state: State, key: str, other: int) -> bytes:
    kind = captured.kinds.get(key)
    if kind not in (Kind.STATEFUL, Kind.VALUE) or isinstance(state[key], LRScheduler):
        raise MismatchError(
            f"{key}: its state differs between rank 0 and rank {other}, though it must be the "
            "same on all ranks; the ranks have drifted apart"
        )
    value = capture_stateful(state[key]) if kind is Kind.STATEFUL else state[key]
    return pack_tree(value, key=key)


def _tree_digest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of a tree and of the bytes of every tensor that it refers to."""
    hasher = xxhash.xxh3_128(strictjson.dumps(tree))
    for name in _references(tree):
        update_digest(hasher, tensors[name])
    return hasher.hexdigest()


def _references(tree: Any) -> list[str]:
    """Names of tensors in a tree, in order."""
    if isinstance(tree, list):
        return [name for item in tree for name in _references(item)]
    if not isinstance(tree, dict):
        return []
    if tree.get(TAG_KEY) in ("torch.tensor", "torch.parameter"):
        return [tree["name"]]
    own = [tree["tensor"]] if tree.get(TAG_KEY) == "numpy.ndarray" and "tensor" in tree else []
    return own + [name for item in tree.values() for name in _references(item)]


def held_sets(captured: Captured, small: Mapping[str, Held]) -> dict[str, dict[str, Held]]:
    """What this rank holds, by set: models, optimizers, the small tensors."""
    sets = {
        key: {name: describe(tensor, key=f"{key}: {name}") for name, tensor in leaves.items()}
        for key, leaves in (
            *((key, model.leaves) for key, model in captured.models.items()),
            *((key, attached.leaves) for key, attached in captured.attached.items()),
            *((o.place, o.state.tensors) for o in captured.optimizers),
        )
    }
    return {**sets, SMALL_SET: dict(small)}


def mesh_of(
    live: Mapping[str, ModelState],
    inventory: Inventory,
    world_size: int,
    placed: Mapping[str, str],
) -> dict[str, Any]:
    """The manifest's `mesh`: axes by name and size, world size, and a digest of the topology.

    `live` are the models as they are; for `placed` see `topology_digest`.
    """
    axes: dict[str, int] = {}
    for model in live.values():
        for tensor in model.leaves.values():
            axes.update(axes_of(tensor))
    return {
        "axes": axes,
        "world_size": world_size,
        "topology": topology_digest(inventory, placed),
    }


def topology_digest(inventory: Inventory, placed: Mapping[str, str]) -> str:
    """A digest of how every weight is held by which ranks; equal digests mean equal topologies.

    `placed` has for each model the set whose tensors count: its own, or that of its adapter.
    """
    sets = {key: inventory.sets.get(name, {}) for key, name in placed.items()}
    return xxhash.xxh3_128(Inventory(sets=sets).to_bytes()).hexdigest()


def names_elsewhere(
    talk: Conversation, key: str, own: Iterable[str], among: Iterable[str]
) -> set[str]:
    """Those of the names `among` that other ranks want and this one does not: stages hold parts of
    a model. Collective; `among` is the same on all ranks, and costs one bit for each name."""
    names, mine = list(dict.fromkeys(among)), set(own)
    if talk.world_size == 1:
        return set()
    bits = int("0" + "".join("1" if name in mine else "0" for name in names), 2)
    nbytes = len(names) // 8 + 1
    wanted = 0
    for raw in talk.gather(f"names/{key}", bits.to_bytes(nbytes, "big")):
        wanted |= int.from_bytes(raw, "big")
    told = wanted.to_bytes(nbytes, "big") if talk.is_coordinator else None
    others = int.from_bytes(talk.broadcast(f"names-of-all/{key}", told), "big") & ~bits
    digits = f"{others:0{len(names)}b}"
    return {name for name, digit in zip(names, digits, strict=False) if digit == "1"}


def agree_inventory(
    talk: Conversation,
    sets: Mapping[str, Mapping[str, Held]],
    facts: Mapping[str, str] | None = None,
    views: Mapping[str, Views] | None = None,
    frozen: Mapping[str, frozenset[str]] | None = None,
) -> Inventory:
    """The merged inventory of all ranks, the same object of values everywhere; collective.

    Ranks exchange digests of 16 bytes: of their description, and of the merged inventory that they
    have for it. A description is fetched once however many ranks share it, and nothing is fetched
    while all have the inventory of an earlier save.
    """
    own = Inventory(
        sets={
            key: {fqn: held.info for fqn, held in leaves.items()} for key, leaves in sets.items()
        },
        facts=dict(facts or {}),
        views={key: dict(own_views) for key, own_views in (views or {}).items()},
        frozen={
            key: kept
            for key, found in (frozen or {}).items()
            if (kept := found.intersection(sets.get(key, ())))
        },
    )
    raw = own.to_bytes()
    digest = xxhash.xxh3_128(raw).digest()
    reports = talk.gather("inventory", digest + _kept_keys.get(digest, b""))
    digests = [report[: len(digest)] for report in reports]
    groups = _groups(digests)
    told = None
    if talk.is_coordinator:
        key = xxhash.xxh3_128(b"".join(digests)).digest()
        is_kept = all(report[len(digest) :] == key for report in reports)
        first = [] if is_kept else [group[0] for group in groups]
        told = json.dumps([key.hex(), first]).encode()
    named, first = json.loads(talk.broadcast("inventory-wanted", told))
    key = bytes.fromhex(named)
    if not first:
        return _merged[key]
    if talk.rank in first[1:]:
        talk.post(f"inventory-of/{talk.rank}", raw)
    if not talk.is_coordinator:
        return _remember(digest, key, Inventory.from_bytes(talk.broadcast("merged")))
    found: list[tuple[list[int], Inventory]] = [(groups[0], own)]
    for group in groups[1:]:
        fetched = talk.fetch(f"inventory-of/{group[0]}", group[0])
        found.append((group, Inventory.from_bytes(fetched)))
    merged = merge_inventories(found)
    talk.broadcast("merged", merged.to_bytes())
    return _remember(digest, key, merged)


def _groups(digests: list[bytes]) -> list[list[int]]:
    """Ranks that share a description, those of rank 0 first."""
    groups: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    return list(groups.values())


def _remember(digest: bytes, key: bytes, merged: Inventory) -> Inventory:
    """Keep a merged inventory, and say so in later saves: it is used again when all ranks do."""
    while len(_merged) > 4:
        _merged.pop(next(iter(_merged)))
    _merged[key] = merged
    for known in [known for known, kept in _kept_keys.items() if kept not in _merged]:
        del _kept_keys[known]
    _kept_keys[digest] = key
    return merged
