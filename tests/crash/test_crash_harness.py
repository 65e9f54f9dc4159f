"""The harness itself: it strikes where it says, and tells what happened."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from milepost.storage import atomic, fileops
from milepost.testing.faults import Ending, Fault, FaultPlan, lacking, plans, record
from milepost.testing.forked import run_with_fault, standing_still

DATA = b"0123456789"


def test_a_record_lists_the_operations_with_their_bytes(tmp_path: Path) -> None:
    operations = record(lambda: atomic.replace_file(tmp_path / "file", DATA))
    names = [one.name for one in operations]
    assert names == ["open", "write", "fsync", "rename", "fsync-directory"]
    assert operations[1].nbytes == len(DATA) and operations[1].arguments[1] == DATA
    assert all(one.happened for one in operations)


def test_an_operation_that_failed_is_recorded_as_one_that_changed_nothing(tmp_path: Path) -> None:
    def action() -> None:
        with pytest.raises(FileNotFoundError):
            fileops.rename(tmp_path / "no", tmp_path / "where")

    (operation,) = record(action)
    assert not operation.happened


def test_faults_meet_only_the_operations_that_they_can(tmp_path: Path) -> None:
    operations = record(lambda: atomic.replace_file(tmp_path / "file", DATA))
    found = plans(operations, [Fault.EIO, Fault.SHORT_WRITE])
    assert [plan.nth for plan in found if plan.fault is Fault.EIO] == [0, 1, 2, 3, 4]
    assert [plan.nth for plan in found if plan.fault is Fault.SHORT_WRITE] == [1]


@pytest.mark.parametrize(
    ("fault", "left"),
    [(Fault.KILL_BEFORE, b""), (Fault.KILL_HALFWAY, DATA[:5]), (Fault.KILL_AFTER, DATA)],
)
def test_a_kill_leaves_what_was_written_until_then(
    tmp_path: Path, fault: Fault, left: bytes
) -> None:
    outcome = run_with_fault(
        lambda: atomic.write_new_file(tmp_path / "file", DATA), FaultPlan(1, fault)
    )
    assert outcome.ending is Ending.KILLED
    assert (tmp_path / "file").read_bytes() == left


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (Fault.EIO, errno.EIO),
        (Fault.ENOSPC, errno.ENOSPC),
        (Fault.EDQUOT, errno.EDQUOT),
        (Fault.READ_ONLY, errno.EROFS),
    ],
)
def test_an_error_is_raised_in_the_action_and_reported(
    tmp_path: Path, fault: Fault, number: int
) -> None:
    outcome = run_with_fault(
        lambda: atomic.write_new_file(tmp_path / "file", DATA), FaultPlan(1, fault)
    )
    assert (outcome.ending, outcome.error) == (Ending.RAISED, "OSError")
    assert os.strerror(number) in outcome.message


@pytest.mark.parametrize("fault", [Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW])
def test_an_interruption_a_short_write_or_a_slow_disk_is_no_error(
    tmp_path: Path, fault: Fault
) -> None:
    outcome = run_with_fault(
        lambda: atomic.write_new_file(tmp_path / "file", DATA), FaultPlan(1, fault)
    )
    assert outcome.ending is Ending.FINISHED and outcome.struck
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_full_disk_stays_full_but_lets_files_go(tmp_path: Path) -> None:
    def action() -> None:
        for name in ("one", "two"):
            with pytest.raises(OSError, match="No space left"):
                fileops.make_directory(tmp_path / name)
        fileops.unlink(tmp_path / "file")

    (tmp_path / "file").write_bytes(DATA)
    outcome = run_with_fault(action, FaultPlan(0, Fault.ENOSPC))
    assert outcome.ending is Ending.FINISHED, outcome
    assert list(tmp_path.iterdir()) == []


def test_an_action_with_fewer_operations_says_that_it_was_not_struck(tmp_path: Path) -> None:
    outcome = run_with_fault(
        lambda: atomic.write_new_file(tmp_path / "file", DATA), FaultPlan(9, Fault.EIO)
    )
    assert outcome.ending is Ending.FINISHED and not outcome.struck


def test_a_child_that_dies_by_itself_is_not_taken_for_a_kill(tmp_path: Path) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ChildProcessError, match="ended by itself"):
        run_with_fault(die, FaultPlan(0, Fault.EIO))


def test_a_child_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError):
        run_with_fault(signal.pause, FaultPlan(0, Fault.EIO), timeout_s=0.1)


def test_a_child_can_stand_still_before_an_operation(tmp_path: Path) -> None:
    with standing_still(lambda: atomic.replace_file(tmp_path / "file", DATA), nth=3) as pid:
        os.kill(pid, 0)
        assert not (tmp_path / "file").exists()
        assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_file_system_can_lack_what_many_lack(tmp_path: Path) -> None:
    def action() -> None:
        with lacking("exchange", "link"):
            assert fileops.exchange(tmp_path / "a", tmp_path / "b") is False
            with pytest.raises(OSError, match="not supported"):
                fileops.link(tmp_path / "a", tmp_path / "c")

    assert record(action) == []
