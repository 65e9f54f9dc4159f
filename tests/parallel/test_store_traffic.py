"""What ranks say to each other through the store: counted, and bounded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost as mp
from milepost.checkpointing import agree
from milepost.checkpointing import world as worlds
from milepost.engine.connections import KeyValueStore
from tests.worlds import run_world


class CountingStore:
    """The real store; counts bytes of keys and values. Heartbeats, and looks at the outcome while a
    rank waits, follow the time that it takes and are left out."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._guard = threading.Lock()
        self.sent = self.received = 0

    def set(self, key: str, value: bytes, /) -> None:
        if _is_counted(key):
            with self._guard:
                self.sent += len(key) + len(value)
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        value = self._store.get(key)
        if _is_counted(key):
            with self._guard:
                self.received += len(value)
        return value

    def check(self, keys: list[str], /) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self.sent += len(key) + len(desired)
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str, /) -> bool:
        return self._store.delete_key(key)


def _is_counted(key: str) -> bool:
    return "/beat/" not in key and not key.endswith("/outcome")


def model_of(count: int, mesh: Any) -> torch.nn.Module:
    model = torch.nn.Module()
    for number in range(count):
        model.register_buffer(
            f"b{number}", DTensor.from_local(torch.ones(8, 5), mesh, [Shard(number % 2)])
        )
    return model


def traffic_of_saves(rank: int, world_size: int, run: Path, below: int) -> list[tuple[int, int]]:
    """Bytes (sent, received) of the second save of a model, for a few and for many tensors."""
    mesh = init_device_mesh("cpu", (world_size,))
    store = CountingStore(worlds._world().store)
    worlds._world().store = store
    options = mp.WriteOptions(aggregate_below=below)
    found = []
    for number, count in enumerate((4, 400)):
        model = model_of(count, mesh)
        for save in (1, 2):
            store.sent = store.received = 0
            step = 10 * number + save
            mp.save(run / f"checkpoint-{step}", {"model": model}, step=step, options=options)
        found.append((store.sent, store.received))
    return found


@pytest.mark.parametrize("below", [1, 2**40], ids=["direct", "aggregated"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_a_save_says_does_not_grow_with_the_number_of_tensors(
    world_size: int, below: int, tmp_path: Path
) -> None:
    results = run_world(world_size, traffic_of_saves, tmp_path, below)
    for few, many in results:
        for one, other in zip(few, many, strict=True):
            assert abs(other - one) <= 64, results  # a digit more here and there
            assert one < 20_000


def lose_what_is_kept(rank: int, world_size: int, run: Path) -> list[str]:
    state = {"model": whole_layer()}
    for step in (1, 2):
        mp.save(run / f"checkpoint-{step}", state, step=step)
        if rank == 1:  # as a process that joined later
            agree._merged.clear()
            agree._kept_keys.clear()
    return [entry.name for entry in mp.list_run(run).committed]


def whole_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def test_a_rank_that_does_not_have_the_plan_of_an_earlier_save_is_told_it_again(
    tmp_path: Path,
) -> None:
    for names in run_world(2, lose_what_is_kept, tmp_path):
        assert names == ["checkpoint-1", "checkpoint-2"]
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().ok
