"""A fault at every file operation of a migration: nothing is lost, and the next call finishes."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.layouts.trio_names import look, trio_names
from milepost.testing.faults import Ending, Fault, FaultPlan
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.tools.migrate import (
    Backup,
    Existing,
    MigrateTarget,
    MigrationReport,
    Original,
    Outcome,
    migrate,
)
from tests.tools.legacy_files import ONE_THREAD, hidden, visible, weights, write

# These meet every operation in each run of the tests; of the others, a sample.
ALWAYS = (Fault.ENOSPC, Fault.KILL_BEFORE)
SAMPLE = 12


def chosen(matrix: CrashMatrix) -> list[FaultPlan]:
    """Of the writes of a file, which are many, the first and the last."""
    writes: dict[str, list[int]] = {}
    for number, operation in enumerate(matrix.operations):
        if operation.name == "write":
            writes.setdefault(operation.target, []).append(number)
    inner = {number for numbers in writes.values() for number in numbers[1:-1]}
    plans = matrix.plans(Fault)
    always = [plan for plan in plans if plan.fault in ALWAYS and plan.nth not in inner]
    others = [plan for plan in plans if plan not in always]
    return always + random.Random(1).sample(others, SAMPLE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tests fork, and a pool of threads does not survive that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    place = Path(
        tempfile.mkdtemp(prefix="milepost-migrate-", dir=memory if memory.is_dir() else tmp_path)
    )
    yield place
    shutil.rmtree(place)


def legacy_file(root: Path, epoch: int = 3) -> None:
    write(root / "run.v2.pt", epoch=epoch, extra_state={"dir": Path("/data"), "n": epoch})


def run(root: Path, **request: Any) -> MigrationReport:
    return migrate([root / "run.v2.pt"], options=ONE_THREAD, **request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`prepare` makes the directory, `request` is what is asked for; `files` is what is left."""

    request: dict[str, Any]
    files: list[str]
    prepare: Callable[[Path], object] = legacy_file
    before_epoch: int = 3


def _over_an_older_trio(root: Path) -> None:
    legacy_file(root, epoch=1)
    run(root)
    legacy_file(root, epoch=3)


TRIO = list(trio_names("run.v2"))
SCENARIOS = {
    "beside": Scenario(request={}, files=["run.v2.pt", *TRIO]),
    "in place": Scenario(request={"original": Original.REMOVE}, files=TRIO),
    "in place with a backup": Scenario(
        request={"original": Original.REMOVE, "backup": Backup.KEEP},
        files=["run.v2.pt.bak", *TRIO],
    ),
    "over an older trio": Scenario(
        request={"existing": Existing.OVERWRITE, "original": Original.REMOVE},
        prepare=_over_an_older_trio,
        files=TRIO,
        before_epoch=1,
    ),
}


def epoch_of(root: Path) -> int:
    """The epoch of what a load finds, after every byte of it was compared."""
    loaded = mp.load_checkpoint(root / "run.v2")
    assert all(torch.equal(loaded["model_state"][n], t) for n, t in weights().items())
    epoch = loaded["epoch"]
    assert loaded["extra_state"] == {"dir": Path("/data"), "n": epoch}
    assert isinstance(epoch, int)
    return epoch


def checked(scenario: Scenario, matrix: CrashMatrix) -> Callable[[Attempt], None]:
    original = matrix.before.files()["run.v2.pt"]

    def check(attempt: Attempt) -> None:
        root, outcome = attempt.root, attempt.outcome
        trio = look(root, trio_names("run.v2"))
        assert len(trio) in (0, 3), "a trio is there whole or not at all"
        backup = root / "run.v2.pt.bak"
        places = [path for path in (root / "run.v2.pt", backup) if path.exists()]
        if trio:
            assert epoch_of(root) in (3, scenario.before_epoch)
        if not trio or epoch_of(root) != 3 or scenario.request.get("original") is None:
            assert [path.read_bytes() for path in places] == [bytes(original)]
        if attempt.plan.fault is Fault.ENOSPC and outcome.ending is Ending.RAISED:
            assert not [name for name in hidden(root) if "intent" not in name and trio == {}]
        report = run(root, **scenario.request)
        assert report.ok
        assert epoch_of(root) == 3
        assert visible(root) == sorted(scenario.files)
        assert hidden(root) == []

    return check


def act(root: Path, request: dict[str, Any]) -> None:
    """The real call; what it reports as failed is raised, so that the matrix sees it."""
    (one,) = run(root, **request).migrations
    if one.error is not None:
        raise one.error


@pytest.mark.case("C1.7")
@pytest.mark.case("C5.25")
@pytest.mark.filterwarnings("ignore:.*legacy layout:DeprecationWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_every_fault_the_source_or_the_whole_trio_is_there_and_a_rerun_finishes(
    name: str, scratch: Path
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(
        scenario.prepare, lambda root: act(root, scenario.request), scratch=scratch
    )
    check = checked(scenario, matrix)
    lost = []
    for attempt in matrix.attempts(chosen(matrix)):
        try:
            check(attempt)
        except (AssertionError, OSError, ValueError) as error:
            lost.append(f"{attempt}\n  {type(error).__name__}: {error}")
    assert not lost, f"{len(lost)} points:\n" + "\n".join(lost[:5])


@pytest.mark.parametrize("to", [MigrateTarget.SINGLE_FILE, MigrateTarget.DIRECTORY])
@pytest.mark.filterwarnings("ignore:.*legacy layout:DeprecationWarning")
def test_a_full_disk_at_every_operation_leaves_the_source_for_a_rerun(
    to: MigrateTarget, scratch: Path
) -> None:
    def prepare(root: Path) -> None:
        write(root / "run.v2.pt")

    request = {"to": to, "out": None, "original": Original.REMOVE}

    def real(root: Path) -> None:
        act(root, request | {"out": root / "out"})

    matrix = CrashMatrix(prepare, real, scratch=scratch)
    for attempt in matrix.attempts(p for p in chosen(matrix) if p.fault is Fault.ENOSPC):
        root = attempt.root
        if attempt.outcome.ending is Ending.RAISED:
            assert (root / "run.v2.pt").exists(), attempt
        if (root / "run.v2.pt").exists():
            real(root)
        assert visible(root) == ["out"], attempt
        target = root / "out" / ("run.v2.pt" if to is MigrateTarget.SINGLE_FILE else "run.v2")
        assert mp.Checkpoint.open(target).verify().ok
        assert hidden(root / "out") == [], attempt


def test_of_many_files_those_before_a_full_disk_are_done_and_the_rest_on_the_next_call(
    tmp_path: Path,
) -> None:
    import errno
    import os

    from milepost.storage import fileops

    for number in range(4):
        write(tmp_path / f"epoch_{number}.pt", epoch=number)
    written = 0

    def hook(name: str, target: str, function: Any, arguments: Any) -> Any:
        nonlocal written
        if name in ("write", "reserve") and written > 40_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        written += len(arguments[1]) if name == "write" else 0
        return function(*arguments)

    with fileops.hooked(hook):
        first = migrate([tmp_path], original=Original.REMOVE, options=ONE_THREAD)
    done, failed = first.of(Outcome.MIGRATED), first.of(Outcome.FAILED)
    assert done and failed and len(done) + len(failed) == 4
    assert {one.error.code for one in failed if one.error} == {"no-space"}
    assert all(one.source.exists() for one in failed)
    assert hidden(tmp_path) == []
    second = migrate([tmp_path], original=Original.REMOVE)
    assert {one.outcome for one in second.migrations} == {Outcome.MIGRATED}
    assert not list(tmp_path.glob("epoch_?.pt"))
