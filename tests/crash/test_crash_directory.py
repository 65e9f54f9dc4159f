"""A fault at every file operation of everything that changes a run of checkpoint directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import ExistsError, RunInUseError
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.run import list_run
from milepost.manager.prune import PruneMode, prune_run
from milepost.manager.retention import KeepLast
from milepost.testing.faults import Ending, Fault, FaultPlan, Operation, lacking, record
from milepost.testing.forked import run_with_fault, standing_still
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.conftest import split
from tests.crash.proven import Proven, files_in

Committed: TypeAlias = dict[int, float]
"""What a run holds: by step, the value that its tensors were made from."""

Record: TypeAlias = tuple[Sequence[Operation], int]
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[[CrashMatrix, Iterable[Record], CheckDisk], None]
Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]

ONE_THREAD = mp.WriteOptions(threads=1)
LOCK = ".milepost.lock"
SHELF = "_incomplete_checkpoints"


class Small(nn.Module):
    """Three tensors, made from one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.arange(6.0) * value)
        self.frozen = nn.Parameter(torch.full((2, 3), value), requires_grad=False)
        self.register_buffer("counts", torch.arange(4) + int(value))


def state(value: float) -> dict[str, Any]:
    """A model and an optimizer that has moments for one of its tensors."""
    model = Small(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.wide.grad = torch.full((6,), value)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(root: Path, step: int, value: float, **options: Any) -> None:
    mp.save(
        root / f"checkpoint-{step}",
        state(value),
        step=step,
        metrics={"value": value},
        rng=mp.Rng.LEAVE_OUT,
        **{"options": ONE_THREAD, **options},
    )


def replace(root: Path, step: int, value: float) -> None:
    save(root, step, value, on_existing=mp.OnExisting.REPLACE)


def replace_without_exchange(root: Path, step: int, value: float) -> None:
    with lacking("exchange"):
        replace(root, step, value)


def tensors(value: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from value["model"].state_dict().items()
    for number, slots in value["optimizer"].state_dict()["state"].items():
        yield from ((f"{number}.{slot}", tensor) for slot, tensor in slots.items())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def committed(root: Path) -> Committed:
    """What `root` holds; each of it is proven by its digests and loads bit for bit."""
    found: Committed = {}
    for entry in list_run(root).committed:
        checkpoint = mp.Checkpoint.open(root / entry.name)
        assert checkpoint.info.checkpoint_id == entry.manifest.checkpoint_id
        prove = partial(proven_value, checkpoint, root / entry.name)
        value = _proven.of(files_in(entry.path), root, entry.name, prove)
        assert entry.manifest.metrics["value"] == value
        found[entry.step] = value
    return found


_proven: Proven[float] = Proven()


def proven_value(checkpoint: mp.Checkpoint, path: Path) -> float:
    report = checkpoint.verify()
    assert report.has_digests and not report.problems, report.problems
    value = checkpoint.info.metrics["value"]
    assert isinstance(value, float)
    live, wanted = state(0.5), state(value)
    mp.load(path, live)
    assert same(dict(tensors(live)), dict(tensors(wanted)))
    return value


def leftovers(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.startswith(".")} - {LOCK}


# ---- what is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`states` are what the run may hold at any instant, from before the action to after it."""

    prepare: Callable[[Path], object]
    action: Callable[[Path], object]
    states: tuple[Committed, ...]
    shelves: tuple[str, ...] = ()


def _first(root: Path) -> None:
    save(root, 1, 1.0)


def _beside_a_torn_one(root: Path) -> None:
    save(root, 1, 1.0)
    (root / "checkpoint-9").mkdir()
    (root / "checkpoint-9" / "model.safetensors").write_bytes(b"\x10")


def _after_a_killed_save(root: Path) -> None:
    save(root, 1, 1.0)
    killed = run_with_fault(lambda: save(root, 2, 8.0), FaultPlan(30, Fault.KILL_HALFWAY))
    assert killed.ending is Ending.KILLED


def _after_a_kill_amid_the_exchange_by_record(root: Path) -> None:
    save(root, 1, 1.0)
    names = [one.name for one in record(lambda: replace_without_exchange(root, 1, 8.0))]
    last_rename = len(names) - 1 - names[::-1].index("rename")
    plan = FaultPlan(last_rename, Fault.KILL_BEFORE)
    killed = run_with_fault(lambda: replace_without_exchange(root, 1, 2.0), plan)
    assert killed.ending is Ending.KILLED
    assert not (root / "checkpoint-1").exists(), "the old one was to be out of the way already"


def _three(root: Path) -> None:
    for step in (1, 2, 3):
        save(root, step, float(step))


def _without_reservation(root: Path) -> None:
    with lacking("reserve"):
        save(root, 2, 2.0)


SCENARIOS = {
    "a step alone": Scenario(
        prepare=_first,
        action=lambda root: save(root, 2, 2.0),
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    ),
    "a new step beside a torn one": Scenario(
        prepare=_beside_a_torn_one,
        action=lambda root: save(root, 2, 2.0),
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    ),
    "a step whose name a torn one has": Scenario(
        prepare=_beside_a_torn_one,
        action=lambda root: save(root, 9, 2.0),
        states=({1: 1.0}, {1: 1.0, 9: 2.0}),
        shelves=("checkpoint-9",),
    ),
    "in place of another": Scenario(
        prepare=_first,
        action=lambda root: replace(root, 1, 2.0),
        states=({1: 1.0}, {1: 2.0}),
    ),
    "in place of another, without an exchange of names": Scenario(
        prepare=_first,
        action=lambda root: replace_without_exchange(root, 1, 2.0),
        states=({1: 1.0}, {1: 2.0}),
    ),
    "the first save after a killed one": Scenario(
        prepare=_after_a_killed_save,
        action=lambda root: save(root, 2, 2.0),
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    ),
    "the first save after a kill amid an exchange by record": Scenario(
        prepare=_after_a_kill_amid_the_exchange_by_record,
        action=lambda root: save(root, 2, 3.0),
        states=({1: 2.0}, {1: 2.0, 2: 3.0}),
    ),
    "where space cannot be reserved": Scenario(
        prepare=_first,
        action=_without_reservation,
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    ),
    "retention": Scenario(
        prepare=_three,
        action=lambda root: prune_run(root, [KeepLast(1)]),
        states=({1: 1.0, 2: 2.0, 3: 3.0}, {2: 2.0, 3: 3.0}, {3: 3.0}),
    ),
}


# ---- what must hold at every point


def check_ending(attempt: Attempt, scenario: Scenario, found: Committed) -> None:
    outcome, fault = attempt.outcome, attempt.plan.fault
    assert found in scenario.states
    assert outcome.struck
    if fault.kills:
        assert outcome.ending is Ending.KILLED
    elif fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
        assert outcome.ending is Ending.FINISHED
    if outcome.ending is Ending.FINISHED:
        assert found == scenario.states[-1]


def check_error(attempt: Attempt, scenario: Scenario, found: Committed, before: set[str]) -> None:
    """An error is ours, says what is left, and leaves nothing else behind."""
    outcome, fault = attempt.outcome, attempt.plan.fault
    assert "StorageError" in outcome.classes
    if "untouched" not in outcome.message:
        assert found == scenario.states[-1]
        return
    if len(scenario.states) == 2:
        assert found == scenario.states[0]
        if fault in (Fault.ENOSPC, Fault.EDQUOT):
            assert outcome.error == "NoSpaceError"
        if fault is not Fault.READ_ONLY:
            assert leftovers(attempt.root) <= before


def check_retention(root: Path, found: Committed) -> None:
    """Only what is committed counts, and the newest of it stays."""
    report = prune_run(root, [KeepLast(1)], mode=PruneMode.DRY_RUN)
    assert sorted(report.kept) == [max(found)]
    assert [removal.entry.step for removal in report.removed] == sorted(set(found) - {max(found)})


def check_next_save(root: Path, found: Committed, shelves: tuple[str, ...]) -> None:
    """It works, tidies up, and retention then keeps what it should."""
    torn = {entry.name for entry in list_run(root).torn}
    save(root, 50, 5.0)
    assert committed(root) == found | {50: 5.0}
    assert not leftovers(root)
    assert {entry.name for entry in list_run(root).torn} == torn
    shelf = root / SHELF
    assert set(os.listdir(shelf) if shelf.exists() else []) <= set(shelves)
    prune_run(root, [KeepLast(2)])
    newest = max(found)
    assert committed(root) == {newest: found[newest], 50: 5.0}


def checked(scenario: Scenario, matrix: CrashMatrix) -> Callable[[Attempt], None]:
    before = {name.partition("/")[0] for name in matrix.before.files()}

    def check(attempt: Attempt) -> None:
        found = committed(attempt.root)
        newest = list_run(attempt.root).newest
        assert newest is not None and newest.step == max(found)
        check_ending(attempt, scenario, found)
        if attempt.outcome.ending is Ending.RAISED:
            check_error(attempt, scenario, found, before)
        check_retention(attempt.root, found)
        check_next_save(attempt.root, found, scenario.shelves)

    return check


@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.case("V20")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_fault_at_any_operation_costs_a_committed_checkpoint(
    name: str, scratch: Path, explore: Explore
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    explore(matrix, checked(scenario, matrix))


def test_the_scenarios_together_have_more_than_a_thousand_distinct_points(scratch: Path) -> None:
    points = set()
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        place = scratch / str(number)
        place.mkdir()
        matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=place)
        some, rest = split(matrix)
        assert not set(some) & set(rest) and {*some, *rest} == set(matrix.plans(Fault))
        points |= {(name, plan) for plan in (*some, *rest)}
    assert len(points) >= 1000


def test_a_step_that_a_record_puts_in_place_is_not_saved_again_unasked(scratch: Path) -> None:
    _after_a_kill_amid_the_exchange_by_record(scratch)
    with pytest.raises(ExistsError):
        save(scratch, 1, 3.0)
    save(scratch, 1, 3.0, on_existing=mp.OnExisting.KEEP)
    assert committed(scratch) == {1: 2.0}
    replace(scratch, 1, 3.0)
    assert committed(scratch) == {1: 3.0}
    assert not leftovers(scratch) and not (scratch / SHELF).exists()


# ---- power cuts


def checked_disk(states: tuple[Committed, ...]) -> CheckDisk:
    def check(loss: PowerLoss, root: Path) -> None:
        found = committed(root)
        assert found in (states[-1:] if loss.finished else states), found
        save(root, 50, 5.0)
        assert committed(root) == found | {50: 5.0}
        assert not leftovers(root)

    return check


@pytest.mark.case("V17")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_power_cut_costs_a_committed_checkpoint(
    name: str, scratch: Path, cut_power: CutPower
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    cut_power(matrix, [(matrix.operations, 0)], checked_disk(scenario.states))


@pytest.mark.case("V17")
@pytest.mark.parametrize(
    "name", ["in place of another", "in place of another, without an exchange of names"]
)
def test_no_power_cut_does_while_the_next_save_tidies_up_after_a_kill(
    name: str, scratch: Path, cut_power: CutPower
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    moves = [n for n, one in enumerate(matrix.operations) if one.name in ("rename", "exchange")]
    records = [
        (matrix.recovered(nth, lambda root: save(root, 3, 3.0)), nth)
        for nth in sorted({n + after for n in moves for after in (1, 2)})
    ]
    old, new = scenario.states
    check = checked_disk((old, new, old | {3: 3.0}, new | {3: 3.0}))

    def check_either(loss: PowerLoss, root: Path) -> None:
        if loss.finished:
            assert committed(root) in (old | {3: 3.0}, new | {3: 3.0})
        else:
            check(loss, root)

    cut_power(matrix, records, check_either)


# ---- the order of operations


def _recorded(scratch: Path, scenario: Scenario) -> list[Operation]:
    return list(CrashMatrix(scenario.prepare, scenario.action, scratch=scratch).operations)


@pytest.mark.case("V17")
def test_data_then_manifest_then_directories_then_the_name_reach_the_disk(scratch: Path) -> None:
    names = [(one.name, one.target) for one in _recorded(scratch, SCENARIOS["a step alone"])]
    run = str(scratch / "recorded")
    (rename,) = [(n, target) for n, (name, target) in enumerate(names) if name == "rename"]
    staging = rename[1].partition(" -> ")[0]
    manifest = f"{staging}/milepost.json"
    files = {t for name, t in names if name == "open" and t.startswith(f"{staging}/")}
    data = files - {manifest, f"{staging}/.owner.json"}
    assert len(data) == 8

    def first(name: str, target: str) -> int:
        return names.index((name, target))

    def last(name: str, target: str) -> int:
        return len(names) - 1 - names[::-1].index((name, target))

    for file in files:
        assert last("write", file) < first("fsync", file)
    assert max(first("fsync", file) for file in data) < first("open", manifest)
    directories = [f"{staging}/training", staging]
    assert all(first("fsync", manifest) < first("fsync-directory", d) for d in directories)
    assert all(last("fsync-directory", d) < rename[0] for d in directories)
    assert last("fsync-directory", run) > rename[0]


@pytest.mark.case("V18")
def test_all_space_is_reserved_before_the_first_byte_of_the_state(scratch: Path) -> None:
    operations = _recorded(scratch, SCENARIOS["a step alone"])
    reserved = {one.target: one.nbytes for one in operations if one.name == "reserve"}
    written = [
        n
        for n, one in enumerate(operations)
        if one.name == "write" and one.target.endswith(".safetensors")
    ]
    last_reserve = max(n for n, one in enumerate(operations) if one.name == "reserve")
    assert len(written) > 3 and last_reserve < written[0]
    for file, nbytes in reserved.items():
        assert nbytes == sum(
            one.nbytes for one in operations if one.name == "write" and one.target == file
        )


@pytest.mark.case("V18")
def test_a_disk_that_cannot_hold_the_save_is_found_before_its_first_byte(scratch: Path) -> None:
    scenario = SCENARIOS["a step alone"]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    reserve = next(n for n, one in enumerate(matrix.operations) if one.name == "reserve")
    for attempt in matrix.attempts([FaultPlan(reserve, Fault.ENOSPC)]):
        assert attempt.outcome.error == "NoSpaceError"
        assert "the save needs" in attempt.outcome.message
        assert committed(attempt.root) == {1: 1.0} and not leftovers(attempt.root)


# ---- several threads, several processes


def test_with_several_writing_threads_a_kill_anywhere_costs_nothing_either(
    scratch: Path, explore: Explore
) -> None:
    scenario = Scenario(
        prepare=_first,
        action=lambda root: save(root, 2, 2.0, options=mp.WriteOptions(threads=3)),
        states=({1: 1.0}, {1: 1.0, 2: 2.0}),
    )
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    explore(matrix, checked(scenario, matrix))


def test_a_second_process_is_refused_and_told_who_writes_here(scratch: Path) -> None:
    _first(scratch)
    with standing_still(lambda: save(scratch, 2, 2.0), nth=30) as pid:
        before = sorted(str(path) for path in scratch.rglob("*"))
        with pytest.raises(RunInUseError, match=f"process {pid} on .* is writing checkpoints"):
            save(scratch, 3, 3.0)
        with pytest.raises(RunInUseError, match=f"process {pid} "):
            prune_run(scratch, [KeepLast(1)])
        assert sorted(str(path) for path in scratch.rglob("*")) == before
        assert committed(scratch) == {1: 1.0}
    # It was killed, and its lease ended with it.
    save(scratch, 3, 3.0)
    assert committed(scratch) == {1: 1.0, 3: 3.0}
    assert not leftovers(scratch)


@pytest.mark.case("V03")
def test_a_tensor_mapped_from_the_checkpoint_that_is_saved_over_stays_what_it_was(
    scratch: Path,
) -> None:
    def mapped_state(root: Path) -> dict[str, Any]:
        live = state(8.0)
        live["model"].wide = nn.Parameter(DirectoryCheckpoint(root / "checkpoint-1").mapped("wide"))
        return {"model": live["model"]}

    def save_over(root: Path) -> None:
        live = mapped_state(root)
        path = root / "checkpoint-1"
        mp.save(path, live, step=1, on_existing=mp.OnExisting.REPLACE, options=ONE_THREAD)
        assert torch.equal(live["model"].wide, wanted)
        assert torch.equal(mp.Checkpoint.open(path).read("wide"), wanted)

    wanted = state(1.0)["model"].wide.detach()
    matrix = CrashMatrix(_first, save_over, scratch=scratch)
    for attempt in matrix.attempts(matrix.plans([Fault.KILL_HALFWAY])):
        assert attempt.outcome.ending is Ending.KILLED
        assert committed(attempt.root) == {1: 1.0}
        save_over(attempt.root)
