"""Planning a save of one rank for 64 to 8,192 ranks: seconds, and bytes that ranks exchange.

Pure code, no ranks: the names and shapes of Llama-3-70B (723 tensors) and of Qwen3-30B-A3B (18,867
on disk), each with two AdamW moments, held by FSDP2 x TP (x EP) on a simulated mesh. What one rank
does at its first save and at a later one is timed: describe, agree (the coordinator's side of it,
with a store in memory), lay out, bind to tensors. Bars: under 2 s the first time, under 50 ms
later; bytes of a later save do not grow with the number of tensors.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from _common import Report, parse_options, progress
from milepost.checkpointing import agree
from milepost.checkpointing.files import TensorSetPlace, plan_files
from milepost.checkpointing.names_on_disk import derive, held_on_disk
from milepost.engine.rendezvous import Rendezvous
from milepost.geometry.placement import Replicate, Shard, index_set, local_shape
from milepost.plan.holding import PlacementClass
from milepost.plan.hub_views import Views
from milepost.plan.inventory import Inventory, LeafInfo
from milepost.plan.shares import WriteRules
from milepost.state.placements import Held

WORLDS = (64, 512, 1024, 8192)
TENSOR_PARALLEL = 8
SETS = ("model", "optimizer_m", "optimizer_v")


class Family(NamedTuple):
    name: str
    shapes: dict[str, tuple[int, ...]]
    views: Views


class MemoryStore:
    """The key-value store of a process group, in memory, that counts what is sent and read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.nbytes = 0

    def set(self, key: str, value: bytes, /) -> None:
        self.nbytes += len(key) + len(value)
        self.values[key] = bytes(value)

    def get(self, key: str, /) -> bytes:
        self.nbytes += len(key) + len(self.values[key])
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self.values.setdefault(key, desired.encode())

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None


def families() -> list[Family]:
    llama = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    qwen = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    found = []
    for name, config in (("Llama-3-70B", llama), ("Qwen3-30B-A3B", qwen)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        leaves: dict[str, Tensor] = dict(model.named_parameters())
        start = time.perf_counter()
        views = derive(model, leaves).views
        print(
            f"{name}: names on disk derived in {time.perf_counter() - start:.2f} s", file=sys.stderr
        )
        found.append(Family(name, {n: tuple(t.shape) for n, t in leaves.items()}, views))
    return found


def classes_of(name: str, shape: tuple[int, ...], world: int) -> list[PlacementClass]:
    """How a tensor is held: FSDP2 x TP, experts FSDP2 x EP, norms on the data axis alone."""
    ranks, data = tuple(range(world)), world // TENSOR_PARALLEL
    mesh = (data, TENSOR_PARALLEL)
    if len(shape) == 1:
        lines = [tuple(range(t, world, TENSOR_PARALLEL)) for t in range(TENSOR_PARALLEL)]
        return [PlacementClass((data,), line, (Shard(0),)) for line in lines]
    if ".experts." in name:
        return [PlacementClass(mesh, ranks, (Shard(1), Shard(0)))]
    if "o_proj" in name or "down_proj" in name:
        return [PlacementClass(mesh, ranks, (Shard(0), Shard(1)))]
    if name.endswith("mlp.gate.weight"):
        return [PlacementClass(mesh, ranks, (Shard(0), Replicate()))]
    split = Shard(0, split_factor=TENSOR_PARALLEL)
    return [PlacementClass(mesh, ranks, (split, Shard(0)))]


def described(family: Family, world: int, rank: int) -> dict[str, dict[str, Held]]:
    """What `rank` says of its tensors; the memory of local ones is never touched."""
    held: dict[str, Held] = {}
    cache: dict[tuple[str, int, tuple[int, ...]], PlacementClass] = {}
    for name, shape in family.shapes.items():
        key = (name.rpartition(".layers.")[2].partition(".")[2], len(shape), shape)
        if key not in cache:
            found = classes_of(name, shape, world)
            cache[key] = next(each for each in found if each.coordinate(rank) is not None)
        own = cache[key]
        coordinate = own.coordinate(rank)
        assert coordinate is not None
        local = local_shape(index_set(shape, own.mesh_shape, coordinate, own.placements))
        info = LeafInfo(dtype="BF16", shape=shape, itemsize=2, classes=(own,))
        held[name] = Held(info, torch.empty(local, dtype=torch.bfloat16))
    return dict.fromkeys(SETS, held)


def agreed(
    family: Family,
    world: int,
    sets: Mapping[str, Mapping[str, Held]],
    store: MemoryStore,
    turn: int,
) -> tuple[Inventory, float, float]:
    """Rank 0's agreement; the inventory, and bytes sent and read by rank 0 and by another rank."""
    views = {"model": family.views}
    raws = [
        Inventory(
            sets={
                key: {n: held.info for n, held in leaves.items()} for key, leaves in each.items()
            },
            views={key: dict(found) for key, found in views.items()},
        ).to_bytes()
        for each in (sets, *(_others(family, world)))
    ]

    topic = f"save/{turn}"
    before = store.nbytes
    digests = [xxhash.xxh3_128(raw).digest() for raw in raws]
    every = b"".join(digests[rank % TENSOR_PARALLEL] for rank in range(world))
    kept = xxhash.xxh3_128(every).digest() if turn else b""
    for rank in range(1, world):
        line = rank % TENSOR_PARALLEL
        talk = Rendezvous(store, rank=rank, world_size=world, topic=topic)
        talk.gather("inventory", digests[line] + kept)
        if rank < TENSOR_PARALLEL and turn == 0:
            talk.post(f"inventory-of/{rank}", raws[line])
    others = store.nbytes - before
    inventory = agree.agree_inventory(
        Rendezvous(store, rank=0, world_size=world, topic=topic), sets, None, views
    )
    own = store.nbytes - before - others
    reader = store.nbytes
    Rendezvous(store, rank=1, world_size=world, topic=topic).broadcast("inventory-wanted")
    return inventory, own, others / (world - 1) + store.nbytes - reader


_lines: dict[tuple[str, int], list[dict[str, dict[str, Held]]]] = {}


def _others(family: Family, world: int) -> list[dict[str, dict[str, Held]]]:
    """The other distinct descriptions: ranks see the mesh line of the norms that they are on."""
    key = (family.name, world)
    if key not in _lines:
        _lines[key] = [described(family, world, rank) for rank in range(1, TENSOR_PARALLEL)]
    return _lines[key]


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def forget() -> None:
    """Be a process that has saved nothing yet."""
    agree._merged.clear()
    agree._kept_keys.clear()


def measure(family: Family, world: int, rounds: int) -> dict[str, Any]:
    places = {
        key: TensorSetPlace(
            stem=key,
            prefix="",
            role="weights" if key == "model" else "state",
            max_part_nbytes=5 * 10**9,
        )
        for key in SETS
    }
    rules = WriteRules(
        writers=tuple(range(world)),
        hosts=tuple(rank // 8 for rank in range(world)),
        aggregate_below=2**20,
    )
    forget()
    sets = described(family, world, 0)
    _others(family, world)
    store = MemoryStore()
    inventory, _, _ = agreed(family, world, sets, store, 0)
    forget()
    rank = world // 3 - world // 3 % TENSOR_PARALLEL

    def plan(inventory: Inventory) -> None:
        held = held_on_disk(mine, inventory, rank)
        plan_files(places, inventory, held, rules, rank=rank)

    describe_s, mine = timed(lambda: described(family, world, rank))
    raw = inventory.to_bytes()
    parse_s, fresh = timed(lambda: Inventory.from_bytes(raw))
    first_s, _ = timed(lambda: plan(fresh))
    later = [timed(lambda: plan(fresh))[0] for _ in range(rounds)]
    forget()
    agreed(family, world, sets, store, 0)
    _, own, other = agreed(family, world, sets, store, 1)
    later_s = statistics.median(later)
    progress(f"{family.name}, {world} ranks: described in {describe_s:.2f} s")
    return {
        "model": family.name,
        "ranks": world,
        "tensors on disk": len(inventory.on_disk("model")),
        "first plan, s": round(parse_s + first_s, 2),
        "later, ms": round(later_s * 1e3),
        "inventory once, KB": round(len(raw) / 1e3),
        "rank 0 exchanges, KB": round(own / 1e3, 1),
        "another rank, bytes": round(other),
    }


def main() -> int:
    options = parse_options(__doc__ or "", nbytes="1MiB")
    report = Report(title="planning for thousands of ranks", options=options)
    found = families()
    rows = [measure(family, world, options.rounds) for family in found for world in WORLDS]
    report.rows("one rank, weights and two moments", rows)
    for row in rows:
        if row["ranks"] != WORLDS[-1]:
            continue
        of = f"{row['model']}, {row['ranks']} ranks"
        report.bar(
            f"{of}: first plan, s", found=row["first plan, s"], limit=2, higher_is_better=False
        )
        report.bar(
            f"{of}: later plan, ms", found=row["later, ms"], limit=50, higher_is_better=False
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
