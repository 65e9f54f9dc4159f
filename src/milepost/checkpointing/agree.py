"""What the ranks must agree on before a save is laid out: trees and the inventory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler

from milepost.checkpointing.capture import RNG_TENSOR, Captured, State
from milepost.checkpointing.files import SMALL_SET
from milepost.engine.rendezvous import Conversation
from milepost.engine.source import Scratch, TensorSource
from milepost.errors import MismatchError
from milepost.format import strictjson
from milepost.format.tree import TAG_KEY
from milepost.geometry.placement import Replicate, Shard
from milepost.plan.holding import PlacementClass
from milepost.plan.inventory import Inventory, LeafInfo, merge_inventories
from milepost.state.optimizer_merge import merge_records
from milepost.state.optimizer_record import OptimizerRecord
from milepost.state.other import Kind, capture_stateful
from milepost.state.placements import Held, describe
from milepost.state.tensors import is_dtensor
from milepost.state.tree_blob import pack_tree, unpack_tree

_SCRATCH_NBYTES = 1024 * 1024
_merged: dict[str, Inventory] = {}


def settle_trees(talk: Conversation, captured: Captured, state: State) -> dict[str, Held]:
    """Agree on everything that is no weight and no moment; the small tensors as they will be held.

    A tree that is the same on all ranks is stored once, from the coordinator. Optimizers of which
    ranks have different parameters are joined. Any other tree that differs is kept per rank, as a
    row of bytes of each; schedulers and model extras must not differ and are refused, naming two
    ranks.
    """
    world = talk.world_size
    if world > 1:
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
    reports = talk.gather("trees", json.dumps(own).encode())
    verdict = json.dumps(_differing(reports)).encode() if talk.is_coordinator else None
    differing: dict[str, int] = json.loads(talk.broadcast("trees-differ", verdict))
    optimizers = {o.place: o for o in captured.optimizers}
    for place in [key for key in differing if key in optimizers]:
        del differing[place]
        _merge_optimizer(talk, captured, place, optimizers[place].state.record)
    blobs = {key: _own_blob(captured, state, key, differing[key]) for key in differing}
    lengths = {key: len(blob) for key, blob in blobs.items()}
    found = [json.loads(raw) for raw in talk.gather("lengths", json.dumps(lengths).encode())]
    told = {key: max(each[key] for each in found) for key in differing} if found else None
    raw = talk.broadcast("longest", None if told is None else json.dumps(told).encode())
    longest: dict[str, int] = json.loads(raw)
    for key, blob in blobs.items():
        row = bytearray(blob.ljust(longest[key], b"\0"))
        captured.replace_by_row(key, torch.frombuffer(row, dtype=torch.uint8).reshape(1, -1))
    captured.keep_only({name for tree in captured.trees.values() for name in _references(tree)})


def _merge_optimizer(
    talk: Conversation, captured: Captured, place: str, record: OptimizerRecord
) -> None:
    """Join the records of all ranks into the one that is stored."""
    gathered = talk.gather(f"record/{place}", pack_tree(record.to_tree(), key=place))
    if not talk.is_coordinator:
        return
    ranked = []
    for rank, blob in enumerate(gathered):
        where = f"{place} of rank {rank}"
        tree = unpack_tree(blob, where=where)
        ranked.append((rank, OptimizerRecord.from_tree(tree, where=where)))
    captured.replace_tree(place, merge_records(ranked, key=place).to_tree())


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
    scratch = Scratch(_SCRATCH_NBYTES)
    for name in _references(tree):
        source = TensorSource(tensors[name])
        for piece in source.pieces(0, source.nbytes, scratch):
            hasher.update(piece)
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
            *((o.place, o.state.tensors) for o in captured.optimizers),
        )
    }
    return {**sets, SMALL_SET: dict(small)}


def mesh_of(captured: Captured, inventory: Inventory, world_size: int) -> dict[str, Any]:
    """The manifest's `mesh`: axes by name and size, world size, and a digest of the topology."""
    axes: dict[str, int] = {}
    for model in captured.models.values():
        for tensor in model.leaves.values():
            if is_dtensor(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                names = mesh.mesh_dim_names or [f"axis_{n}" for n in range(mesh.ndim)]
                axes.update(zip(names, mesh.shape, strict=True))
    return {
        "axes": axes,
        "world_size": world_size,
        "topology": topology_digest(inventory, captured.models),
    }


def topology_digest(inventory: Inventory, models: Iterable[str]) -> str:
    """A digest of how every weight is held by which ranks; equal digests mean equal topologies."""
    sets = {key: inventory.sets.get(key, {}) for key in models}
    return xxhash.xxh3_128(Inventory(sets=sets).to_bytes()).hexdigest()


def names_elsewhere(talk: Conversation, key: str, own: Iterable[str]) -> set[str]:
    """Names that other ranks have and this one lacks: stages hold parts of a model. Collective."""
    mine = set(own)
    if talk.world_size == 1:
        return set()
    digest = xxhash.xxh3_128("\0".join(sorted(mine)).encode()).digest()
    digests = talk.gather(f"names/{key}", digest)
    alike = b"1" if len(set(digests)) == 1 else b"0"
    if talk.broadcast(f"names-alike/{key}", alike if talk.is_coordinator else None) == b"1":
        return set()
    lists = talk.gather(f"names-of/{key}", json.dumps(sorted(mine)).encode())
    union = sorted({name for raw in lists for name in json.loads(raw)})
    told = talk.broadcast(
        f"all-names/{key}", json.dumps(union).encode() if talk.is_coordinator else None
    )
    return set(json.loads(told)) - mine


def agree_inventory(talk: Conversation, sets: Mapping[str, Mapping[str, Held]]) -> Inventory:
    """The merged inventory of all ranks, the same object of values everywhere; collective.

    Ranks exchange digests of 16 bytes. A description is fetched once however many ranks share it,
    and nothing is fetched while the descriptions are those of an earlier save.
    """
    own = Inventory(
        sets={key: {fqn: held.info for fqn, held in leaves.items()} for key, leaves in sets.items()}
    )
    raw = own.to_bytes()
    digests = talk.gather("inventory", xxhash.xxh3_128(raw).digest())
    request = _request(digests) if talk.is_coordinator else None
    wanted = json.loads(talk.broadcast("inventory-wanted", request))
    if wanted["key"] in _merged:
        return _merged[wanted["key"]]
    groups: list[list[int]] = wanted["groups"]
    if talk.rank in [group[0] for group in groups[1:]]:
        talk.post(f"inventory-of/{talk.rank}", raw)
    if not talk.is_coordinator:
        return _remember(wanted["key"], Inventory.from_bytes(talk.broadcast("merged")))
    found = [(groups[0], own)]
    for group in groups[1:]:
        found.append(
            (group, Inventory.from_bytes(talk.fetch(f"inventory-of/{group[0]}", group[0])))
        )
    merged = merge_inventories(found)
    talk.broadcast("merged", merged.to_bytes())
    return _remember(wanted["key"], merged)


def _request(digests: list[bytes]) -> bytes:
    """Which ranks share a description, that of rank 0 first, and a key for the whole."""
    groups: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    key = xxhash.xxh3_128(b"".join(digests)).hexdigest()
    return json.dumps({"key": key, "groups": list(groups.values())}).encode()


def _remember(key: str, merged: Inventory) -> Inventory:
    while len(_merged) > 4:
        _merged.pop(next(iter(_merged)))
    _merged[key] = merged
    return merged
