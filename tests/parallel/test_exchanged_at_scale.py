"""What ranks say to each other about a save, counted for as many of them as nobody can start here.

The agreement of rank 0 is the real one; the words of the others, which are as many bytes on every
rank, are put into a store in memory for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
import xxhash

from milepost.checkpointing import agree
from milepost.engine.rendezvous import Rendezvous
from milepost.geometry.placement import Replicate, Shard
from milepost.plan.holding import PlacementClass
from milepost.plan.inventory import Inventory, LeafInfo
from milepost.state.placements import Held

TENSOR_PARALLEL = 8
WORLDS = [64, 512, 8192]

Sets = Mapping[str, Mapping[str, Held]]


class CountingStore:
    """A key-value store in memory that counts what is sent to it and read from it."""

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


@pytest.fixture(autouse=True)
def _knows_nothing() -> Iterator[None]:
    """A process that has saved nothing yet, and leaves nothing behind."""
    agree._merged.clear()
    agree._kept_keys.clear()
    yield
    agree._merged.clear()
    agree._kept_keys.clear()


def described(world: int, count: int, line: int) -> Sets:
    """What a rank on a `line` of the data axis holds under FSDP2 x TP: of each layer a matrix that
    all ranks cut, one whose cut a part of them repeats, and a norm that only its line sees."""
    data = world // TENSOR_PARALLEL
    mesh, ranks = (data, TENSOR_PARALLEL), tuple(range(world))
    own_line = tuple(range(line, world, TENSOR_PARALLEL))
    kinds = {
        "up.weight": ((4 * world, 16), PlacementClass(mesh, ranks, (Shard(0), Shard(0)))),
        "gate.weight": ((4 * data, 16), PlacementClass(mesh, ranks, (Shard(0), Replicate()))),
        "norm.weight": ((4 * data,), PlacementClass((data,), own_line, (Shard(0),))),
    }
    held = {}
    for layer in range(count):
        for name, (shape, placement_class) in kinds.items():
            local = torch.empty((4, 16)[: len(shape)], device="meta")
            info = LeafInfo(dtype="F32", shape=shape, itemsize=4, classes=(placement_class,))
            held[f"layers.{layer}.{name}"] = Held(info, local)
    return {"model": held, "exp_avg": held, "exp_avg_sq": held}


class Job:
    """Saves of one model on a world; what rank 0 and what another rank exchanges in each."""

    def __init__(self, world: int, count: int) -> None:
        self.world = world
        self.sets = described(world, count, 0)
        self.raws = [self._raw(described(world, count, line)) for line in range(TENSOR_PARALLEL)]
        self.saves = 0

    @staticmethod
    def _raw(sets: Sets) -> bytes:
        infos = {k: {n: held.info for n, held in own.items()} for k, own in sets.items()}
        return Inventory(sets=infos).to_bytes()

    def _talk(self, store: CountingStore, rank: int) -> Rendezvous:
        topic = f"save/{self.saves}"
        return Rendezvous(store, rank=rank, world_size=self.world, topic=topic)

    def save(self) -> tuple[int, int]:
        """Bytes that rank 0, and that another rank, sends and reads to agree on the inventory."""
        store = CountingStore()
        digests = [xxhash.xxh3_128(raw).digest() for raw in self.raws]
        every = b"".join(digests[rank % TENSOR_PARALLEL] for rank in range(self.world))
        kept = xxhash.xxh3_128(every).digest() if self.saves else b""
        for rank in range(1, self.world):
            line = rank % TENSOR_PARALLEL
            self._talk(store, rank).gather("inventory", digests[line] + kept)
            if rank < TENSOR_PARALLEL and not self.saves:
                self._talk(store, rank).post(f"inventory-of/{rank}", self.raws[line])
        others = store.nbytes
        inventory = agree.agree_inventory(self._talk(store, 0), self.sets)
        assert inventory.sets.keys() == self.sets.keys()
        own = store.nbytes - others
        reader = store.nbytes
        asked = self._talk(store, 1)
        asked.broadcast("inventory-wanted")
        if not self.saves:
            asked.broadcast("merged")
        self.saves += 1
        return own, others // (self.world - 1) + store.nbytes - reader


@pytest.mark.parametrize("world", WORLDS)
def test_once_the_plan_is_known_no_rank_says_more_for_more_tensors(world: int) -> None:
    few, many = Job(world, 4), Job(world, 200)
    first_few, first_many = few.save(), many.save()
    assert all(more > less + 10_000 for less, more in zip(first_few, first_many, strict=True))
    for less, more in zip(few.save(), many.save(), strict=True):
        assert less == more
    own, other = many.save()
    assert own <= 100 * world, "a few words from each rank"
    assert other <= 250, "and no more than that to each, however many there are"


def test_what_a_rank_other_than_0_says_does_not_grow_with_the_number_of_ranks() -> None:
    found = []
    for world in WORLDS:
        job = Job(world, 20)
        job.save()
        found.append(job.save()[1])
    assert max(found) - min(found) <= 8, "a digit more in its own number"
