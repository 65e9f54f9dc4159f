"""A fault at every file operation of a save of one `.pt`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost.testing.faults import Ending, Fault, FaultPlan, Operation
from milepost.testing.forked import run_with_fault
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.proven import Proven

Found: TypeAlias = dict[str, int]
"""What a directory holds: by path, the number that its tensors were made from."""

Record: TypeAlias = tuple[Sequence[Operation], int]
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[[CrashMatrix, Iterable[Record], CheckDisk], None]
Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]


def weights(number: int) -> dict[str, torch.Tensor]:
    return {
        "wide": torch.arange(6.0) * number,
        "frozen": torch.full((2, 3), float(number)),
        "counts": torch.arange(4) + number,
    }


def moments(number: int) -> dict[str, Any]:
    slots = {"step": torch.tensor(1.0), "exp_avg": torch.full((6,), 0.1 * number)}
    return {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def save(root: Path, name: str, number: int) -> None:
    mp.save_checkpoint(root / name, weights(number), moments(number), step=number)


def found(root: Path) -> Found:
    """Every `.pt`; each is proven by its digest and is bit for bit one save."""
    numbers: Found = {}
    for path in sorted(root.rglob("*.pt")):
        if path.name.startswith("."):
            continue
        name = path.relative_to(root).as_posix()
        numbers[name] = _proven.of([path], root, name, partial(proven_number, path))
    return numbers


_proven: Proven[int] = Proven()


def proven_number(path: Path) -> int:
    report = mp.Checkpoint.open(path).verify()
    assert report.has_digests and not report.problems, report.problems
    loaded = mp.load_checkpoint(path)
    number = loaded["step"]
    assert isinstance(number, int)
    wanted = weights(number)
    assert wanted.keys() == loaded["model_state"].keys()
    assert all(torch.equal(wanted[name], loaded["model_state"][name]) for name in wanted)
    exp_avg = loaded["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(exp_avg, moments(number)["state"][0]["exp_avg"])
    return number


def leftovers(root: Path) -> set[str]:
    return {name for _, _, names in os.walk(root) for name in names if name.startswith(".")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`name` is the file that the action writes."""

    prepare: Callable[[Path], object]
    name: str
    before: Found
    after: Found


def _first(root: Path) -> None:
    save(root, "x.pt", 1)


def _after_a_killed_save(root: Path) -> None:
    save(root, "x.pt", 1)
    killed = run_with_fault(lambda: save(root, "x.pt", 3), FaultPlan(4, Fault.KILL_HALFWAY))
    assert killed.ending is Ending.KILLED and leftovers(root)


SCENARIOS = {
    "over an older file": Scenario(
        prepare=_first, name="x.pt", before={"x.pt": 1}, after={"x.pt": 2}
    ),
    "into directories that it makes": Scenario(
        prepare=_first,
        name="new/er/y.pt",
        before={"x.pt": 1},
        after={"x.pt": 1, "new/er/y.pt": 2},
    ),
    "after a killed save": Scenario(
        prepare=_after_a_killed_save, name="x.pt", before={"x.pt": 1}, after={"x.pt": 2}
    ),
}


def checked(scenario: Scenario, matrix: CrashMatrix) -> Callable[[Attempt], None]:
    before = set(matrix.before.files())

    def check(attempt: Attempt) -> None:
        outcome, fault, now = attempt.outcome, attempt.plan.fault, found(attempt.root)
        assert outcome.struck
        assert now in (scenario.before, scenario.after)
        if fault.kills:
            assert outcome.ending is Ending.KILLED
        elif fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
            assert outcome.ending is Ending.FINISHED
        if outcome.ending is Ending.FINISHED:
            assert now == scenario.after
        if outcome.ending is Ending.RAISED:
            check_error(attempt, scenario, now, before)
        save(attempt.root, scenario.name, 7)
        assert found(attempt.root) == now | {scenario.name: 7}
        assert not leftovers(attempt.root)

    return check


def check_error(attempt: Attempt, scenario: Scenario, now: Found, before: set[str]) -> None:
    outcome, fault = attempt.outcome, attempt.plan.fault
    assert "StorageError" in outcome.classes
    assert ("untouched" in outcome.message) == (now == scenario.before)
    if now == scenario.before:
        if fault in (Fault.ENOSPC, Fault.EDQUOT):
            assert outcome.error == "NoSpaceError"
        if fault is not Fault.READ_ONLY:
            assert leftovers(attempt.root) <= before


@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.case("V20")
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_every_fault_the_file_is_the_old_one_or_the_new(
    name: str, scratch: Path, explore: Explore
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(
        scenario.prepare, lambda root: save(root, scenario.name, 2), scratch=scratch
    )
    explore(matrix, checked(scenario, matrix))


@pytest.mark.case("V17")
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_power_cut_the_file_is_the_old_one_or_the_new(
    name: str, scratch: Path, cut_power: CutPower
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(
        scenario.prepare, lambda root: save(root, scenario.name, 2), scratch=scratch
    )

    def check(loss: PowerLoss, root: Path) -> None:
        now = found(root)
        assert now == scenario.after or (now == scenario.before and not loss.finished), now
        save(root, scenario.name, 7)
        assert found(root) == now | {scenario.name: 7}

    cut_power(matrix, [(matrix.operations, 0)], check)


@pytest.mark.case("V17")
def test_the_bytes_then_the_name_then_the_directory_reach_the_disk(scratch: Path) -> None:
    matrix = CrashMatrix(_first, lambda root: save(root, "x.pt", 2), scratch=scratch)
    names = [one.name for one in matrix.operations]
    writes = names.count("write")
    assert names == ["open", *["write"] * writes, "fsync", "rename", "fsync-directory"]
    assert writes > 3
    assert matrix.operations[-1].target == str(scratch / "recorded")
