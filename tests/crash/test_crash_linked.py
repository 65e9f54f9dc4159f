"""A fault at every operation of a save that links the frozen part of the one before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.layouts.run import list_run
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast
from milepost.plan import parts
from milepost.testing.faults import Ending, Fault, Operation
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.proven import Proven, files_in

Committed: TypeAlias = dict[int, float]
"""What a run holds: by step, the value of its trained tensor."""
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[
    [CrashMatrix, Iterable[tuple[Sequence[Operation], int]], CheckDisk], None
]
Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]

FROZEN = "model-00001-of-00002.safetensors"
LOCK = ".milepost.lock"


class Adapted(nn.Module):
    """A frozen tensor, the same in every state, and a trained one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.trained = nn.Parameter(torch.full((4,), value))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)


def save(root: Path, step: int, value: float) -> mp.SaveReport:
    return mp.save(
        root / f"checkpoint-{step}",
        {"model": Adapted(value)},
        step=step,
        metrics={"value": value},
        rng=mp.Rng.LEAVE_OUT,
        options=mp.WriteOptions(threads=1),
    )


def committed(root: Path) -> Committed:
    """What `root` holds; each of it is proven by its digests and loads bit for bit."""
    found: Committed = {}
    for entry in list_run(root).committed:
        prove = partial(proven_value, root / entry.name)
        value = _proven.of(files_in(entry.path), root, entry.name, prove)
        assert entry.manifest.metrics["value"] == value
        found[entry.step] = value
    return found


_proven: Proven[float] = Proven()


def proven_value(path: Path) -> float:
    checkpoint = mp.Checkpoint.open(path)
    assert not checkpoint.verify().problems
    value = checkpoint.info.metrics["value"]
    assert isinstance(value, float)
    live, wanted = Adapted(0.5), Adapted(value)
    live.frozen.data.zero_()
    mp.load(path, {"model": live})
    assert torch.equal(live.frozen, wanted.frozen)
    assert torch.equal(live.trained, wanted.trained)
    return value


def leftovers(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.startswith(".")} - {LOCK}


def first(root: Path) -> None:
    save(root, 1, 1.0)


def linking(root: Path) -> None:
    assert save(root, 2, 2.0).linked == (FROZEN,)


def pruning_the_first(root: Path) -> None:
    prune_run(root, [KeepLast(1)])


def two(root: Path) -> None:
    first(root)
    linking(root)


def check_next_save(root: Path, found: Committed) -> None:
    assert save(root, 50, 5.0).linked == (FROZEN,)
    assert committed(root) == found | {50: 5.0}
    assert not leftovers(root)
    prune_run(root, [KeepLast(1)])
    assert committed(root) == {50: 5.0}


SCENARIOS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], list[Committed]]] = {
    "a save that links": (first, linking, [{1: 1.0}, {1: 1.0, 2: 2.0}]),
    "removing what is linked elsewhere": (two, pruning_the_first, [{1: 1.0, 2: 2.0}, {2: 2.0}]),
}


@pytest.mark.case("V16")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_fault_at_any_operation_costs_what_shares_a_file(
    name: str, scratch: Path, explore: Explore
) -> None:
    prepare, action, states = SCENARIOS[name]

    def check(attempt: Attempt) -> None:
        found = committed(attempt.root)
        assert found in states
        assert attempt.outcome.struck
        if attempt.plan.fault.kills:
            assert attempt.outcome.ending is Ending.KILLED
        elif attempt.plan.fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
            assert attempt.outcome.ending is Ending.FINISHED
        if attempt.outcome.ending is Ending.FINISHED:
            assert found == states[-1]
        check_next_save(attempt.root, found)

    matrix = CrashMatrix(prepare, action, scratch=scratch)
    if action is linking:
        assert {"link", "chmod"} <= {operation.name for operation in matrix.operations}
    explore(matrix, check)


@pytest.mark.case("V17")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_power_cut_costs_what_shares_a_file(
    name: str, scratch: Path, cut_power: CutPower
) -> None:
    prepare, action, states = SCENARIOS[name]

    def check(loss: PowerLoss, root: Path) -> None:
        found = committed(root)
        assert found in (states[-1:] if loss.finished else states), found
        check_next_save(root, found)

    matrix = CrashMatrix(prepare, action, scratch=scratch)
    cut_power(matrix, [(matrix.operations, 0)], check)


def test_a_link_to_what_was_saved_without_fsync_is_made_durable(scratch: Path) -> None:
    def careless(root: Path) -> None:
        mp.save(
            root / "checkpoint-1",
            {"model": Adapted(1.0)},
            step=1,
            options=mp.WriteOptions(durability=mp.Durability.PAGE_CACHE),
        )

    operations = CrashMatrix(careless, linking, scratch=scratch).operations
    synced = [one.target for one in operations if one.name == "fsync"]
    assert any(target.endswith(FROZEN) for target in synced)
