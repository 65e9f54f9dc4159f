"""One process that saves behind training: a fault at every operation of the thread that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import milepost as mp
from milepost.testing.faults import Ending, Fault, Operation
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.test_crash_directory import Scenario, check_next_save, committed, leftovers, state
from tests.crash.test_crash_directory import save as save_and_wait

Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[
    [CrashMatrix, Iterable[tuple[Sequence[Operation], int]], CheckDisk], None
]


def save_behind(root: Path, step: int, value: float, **options: Any) -> None:
    """The live state changes as soon as the call has returned."""
    live = state(value)
    handle = mp.save_async(
        root / f"checkpoint-{step}",
        live,
        step=step,
        metrics={"value": value},
        rng=mp.Rng.LEAVE_OUT,
        options=mp.WriteOptions(threads=1),
        **options,
    )
    for parameter in live["model"].parameters():
        parameter.data.fill_(-1.0)
    handle.wait()


def two_behind(root: Path) -> None:
    save_behind(root, 2, 2.0)
    save_behind(root, 3, 3.0)


def first(root: Path) -> None:
    save_and_wait(root, 1, 1.0)


SCENARIOS = {
    "a step alone": Scenario(
        prepare=first,
        action=lambda root: save_behind(root, 2, 2.0),
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    ),
    "in place of another": Scenario(
        prepare=first,
        action=lambda root: save_behind(root, 1, 2.0, on_existing=mp.OnExisting.REPLACE),
        states=({1: 1.0}, {1: 2.0}),
    ),
    "one after the other": Scenario(
        prepare=first,
        action=two_behind,
        states=({1: 1.0}, {1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0, 3: 3.0}),
    ),
}

QUICK = "a step alone"
NAMES = [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SCENARIOS if n != QUICK)]


@pytest.mark.timeout(900)
@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.case("V32")
@pytest.mark.parametrize("name", NAMES)
def test_no_fault_behind_training_costs_a_committed_checkpoint(
    name: str, scratch: Path, explore: Explore
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)

    def check(attempt: Attempt) -> None:
        found, outcome, fault = committed(attempt.root), attempt.outcome, attempt.plan.fault
        assert found in scenario.states, "each is whole, with the state at its call"
        assert outcome.struck
        if fault.kills:
            assert outcome.ending is Ending.KILLED
        elif fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
            assert outcome.ending is Ending.FINISHED
        if outcome.ending is Ending.FINISHED:
            assert found == scenario.states[-1]
        if outcome.ending is Ending.RAISED:
            assert "StorageError" in outcome.classes
            assert "was not saved behind training" in outcome.message or len(found) > 1
        check_next_save(attempt.root, found, scenario.shelves)

    explore(matrix, check)


@pytest.mark.slow
@pytest.mark.case("V17")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_power_cut_behind_training_does(name: str, scratch: Path, cut_power: CutPower) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)

    def check(loss: PowerLoss, root: Path) -> None:
        found = committed(root)
        assert found in (scenario.states[-1:] if loss.finished else scenario.states), found
        save_and_wait(root, 50, 5.0)
        assert committed(root) == found | {50: 5.0}
        assert not leftovers(root)

    cut_power(matrix, [(matrix.operations, 0)], check)


def test_it_does_what_a_save_does_that_waits(scratch: Path) -> None:
    """The same operations in the same order, so that what is shown of one holds for the other."""
    places = scratch / "waits", scratch / "behind"
    actions: list[Callable[[Path], object]] = [
        lambda root: save_and_wait(root, 2, 2.0),
        lambda root: save_behind(root, 2, 2.0),
    ]
    names = []
    for place, action in zip(places, actions, strict=True):
        place.mkdir()
        operations = CrashMatrix(first, action, scratch=place).operations
        names.append([one.name for one in operations])
    assert names[0] == names[1]
