"""A fault at every file operation of two ranks whose manager saves behind training.

The run resumes, saves twice, links the frozen part each time and removes what it does not keep: in
the thread behind training, on both ranks.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import milepost as mp
from milepost.errors import CheckpointError, CheckpointWarning
from milepost.layouts.run import list_run
from milepost.plan import parts
from milepost.testing.faults import Ending, Fault
from milepost.testing.world_matrix import WorldAttempt, WorldCrashMatrix
from tests.crash.sharded import EVERY_RANK_WRITES, mesh_of_world
from tests.crash.test_crash_ranks import LOST_TOUCH, explore, leftovers, one_of_each_kind

FROZEN = "model-00001-of-00002.safetensors"
BASE = torch.arange(24.0).reshape(6, 4)
KEPT = 2


class Adapted(nn.Module):
    """A frozen tensor that never changes, and a trained one: whole, or rows of them on a mesh."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(_rows(BASE), requires_grad=False)
        self.trained = nn.Parameter(_rows(torch.full((4, 2), value)))


def _rows(whole: torch.Tensor) -> torch.Tensor:
    mesh = mesh_of_world()
    if mesh is None:
        return whole.clone()
    part = whole.chunk(mesh.size(), 0)[mesh.get_local_rank()].clone()
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)


def manager_of(root: Path, **options: Any) -> mp.CheckpointManager[mp.SaveHandle]:
    return mp.CheckpointManager(
        root, saving=mp.Saving.ASYNC, keep=mp.KeepLast(KEPT), best=None, grace_s=5, **options
    )


def save(manager: mp.CheckpointManager[mp.SaveHandle], step: int) -> mp.SaveHandle:
    """The value of a checkpoint is its step."""
    return manager.save(step, {"model": Adapted(float(step))}, rng=mp.Rng.LEAVE_OUT)


def begin(rank: int, world_size: int, root: Path) -> None:
    with manager_of(root) as manager:
        for step in (1, 2):
            save(manager, step)


def go_on(rank: int, world_size: int, root: Path) -> None:
    with manager_of(root) as manager:
        live = {"model": Adapted(0.5)}
        report = manager.resume(live, rng=mp.RngRestore.LATER)
        assert report is not None and report.step == 2
        for step in (3, 4):
            assert save(manager, step).wait().linked == (FROZEN,)


def committed(root: Path) -> list[int]:
    """The steps that `root` holds; each is proven by its digests and loads bit for bit."""
    found = []
    for entry in list_run(root).committed:
        assert not mp.Checkpoint.open(entry.path).verify().problems
        live = Adapted(0.5)
        live.frozen.data.zero_()
        mp.load(entry.path, {"model": live}, rng=mp.RngRestore.LATER)
        assert torch.equal(live.frozen, BASE)
        assert torch.equal(live.trained, torch.full((4, 2), float(entry.step)))
        found.append(entry.step)
    return found


def check_next_run(root: Path, newest: int) -> None:
    """Another process, alone, resumes from the newest and goes on; what was left over goes."""
    with manager_of(root) as manager:
        live = {"model": Adapted(0.5)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # a save that was cut off is named
            report = manager.resume(live, rng=mp.RngRestore.LATER)
        assert report is not None and report.step == newest
        assert all("its save was cut off" in text for text in report.passed_over)
        assert save(manager, 50).wait().linked == (FROZEN,)
    assert committed(root) == [newest, 50]
    assert leftovers(root) == set() and list_run(root).torn == ()


def check(attempt: WorldAttempt) -> None:
    assert list_run(attempt.root).torn == ()
    found = committed(attempt.root)
    newest = found[-1]
    assert newest in (2, 3, 4)
    assert found == list(range(found[0], newest + 1)) and len(found) >= KEPT
    fault, survivors = attempt.plan.fault, attempt.survivors
    assert attempt.struck.struck
    assert all(one.ending is not Ending.HUNG for one in attempt.outcomes)
    if fault.kills:
        assert attempt.struck.ending is Ending.KILLED
        assert {one.error for one in survivors} <= LOST_TOUCH | {None}
    elif fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
        assert all(one.ending is Ending.FINISHED for one in survivors)
    else:
        assert len({(one.ending, one.error) for one in survivors}) == 1
    if not fault.kills and all(one.ending is Ending.FINISHED for one in survivors):
        assert newest == 4
    check_next_run(attempt.root, newest)


def matrix_of(scratch: Path) -> WorldCrashMatrix:
    matrix = WorldCrashMatrix(
        begin, go_on, world_size=2, scratch=scratch, limit_s=20, environment=EVERY_RANK_WRITES
    )
    names = [{operation.name for operation in of_rank} for of_rank in matrix.operations]
    assert {"link", "rename", "write"} <= names[0] and "write" in names[1]
    return matrix


@pytest.mark.case("V16")
def test_a_fault_of_any_kind_in_a_managed_run_of_two_ranks_costs_no_checkpoint(
    scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(scratch)
    kinds = [Fault.EIO, Fault.KILL_BEFORE, Fault.ENOSPC, Fault.KILL_AFTER]
    explore(request, matrix, one_of_each_kind(matrix, kinds), check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.case("V16")
@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.EIO], ids=lambda fault: fault.name)
def test_two_ranks_of_a_managed_run_lose_nothing_at_any_operation(
    fault: Fault, scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(scratch)
    explore(request, matrix, matrix.plans([fault]), check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.case("V18")
def test_nor_by_any_other_fault_at_a_sample_of_them(
    scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(scratch)
    others = [fault for fault in Fault if fault not in (Fault.KILL_BEFORE, Fault.EIO)]
    plans = matrix.plans(others)
    explore(request, matrix, random.Random(4).sample(plans, min(40, len(plans))), check)


def test_an_error_while_links_are_compared_is_raised_on_both_ranks(
    scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(scratch)
    plans = [
        plan
        for plan in matrix.plans([Fault.EIO], ranks=[0])
        if matrix.operations[0][plan.nth].target.endswith("/.records")
    ]
    unlinks = [plan for plan in plans if matrix.operations[0][plan.nth].name == "unlink"]
    explore(request, matrix, unlinks[:2], check)


def test_a_rank_whose_save_fails_behind_training_is_told_of_by_both_and_the_run_goes_on(
    scratch: Path,
) -> None:
    def fail_and_go_on(rank: int, world_size: int, root: Path) -> None:
        with manager_of(root) as manager:
            manager.resume({"model": Adapted(0.5)}, rng=mp.RngRestore.LATER)
            save(manager, 3)
            mp.wait_for_saves()
            with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
                save(manager, 4)
            save(manager, 5)

    matrix = matrix_of(scratch)
    plan = next(
        plan
        for plan in matrix.plans([Fault.EIO], ranks=[1])
        if matrix.operations[1][plan.nth].name == "write"
    )
    matrix.action = fail_and_go_on
    for attempt in matrix.attempts([plan]):
        assert all(one.ending is Ending.FINISHED for one in attempt.outcomes), attempt
        assert committed(attempt.root) == [2, 5]
