"""A second tier: copies behind training, and a resume from the nearest good one."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.engine import open_files
from milepost.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    InvalidInputError,
    StorageError,
)
from milepost.layouts.directory_copy import copy_checkpoint
from milepost.storage import fileops
from tests.manager.small_training import Training, same
from tests.worlds import run_world

WEIGHTS = "model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def mirrored(run: Path, copies: Path, **options: Any) -> mp.CheckpointManager:
    keep = options.pop("mirror_keep", None)
    return mp.CheckpointManager(run, mirrors=[mp.Mirror(copies, keep=keep)], **options)


def save_at(manager: mp.CheckpointManager, training: Training, *steps: int) -> None:
    for step in steps:
        training.step()
        manager.save(step, training.state)


def resume(run: Path, copies: Path, **options: Any) -> tuple[mp.LoadReport, Training]:
    other = Training(seed=7)
    with mirrored(run, copies, **options) as manager:
        report = manager.resume(other.state)
        assert report is not None
    return report, other


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in mp.list_run(run).committed]


def files_of(path: Path) -> dict[str, bytes]:
    return {
        place.relative_to(path).as_posix(): place.read_bytes()
        for place in path.rglob("*")
        if place.is_file()
    }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def when_open(gate: threading.Event) -> Callable[[str], None]:
    def wait(name: str) -> None:
        assert gate.wait(60)

    return wait


@contextmanager
def in_mirror(copies: Path, action: Callable[[str], None]) -> Iterator[None]:
    """`action` is called before each change of a file in the mirror, with its name."""

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if str(copies) in target:
            action(name)
        return function(*arguments)

    with fileops.hooked(hook):
        yield


# ---- copying


@pytest.mark.parametrize("saving", mp.Saving)
def test_committed_checkpoints_are_copied_and_each_side_keeps_its_own(
    run: Path, copies: Path, saving: Any
) -> None:
    training = Training()
    keep = mp.KeepEvery(2)
    with mirrored(run, copies, keep=mp.KeepLast(1), mirror_keep=keep, saving=saving) as manager:
        save_at(manager, training, 1, 2, 3, 4, 5)
    assert steps_of(run) == [5]
    assert steps_of(copies) == [2, 4, 5], "the newest always stays"
    assert files_of(copies / "checkpoint-5") == files_of(run / "checkpoint-5")
    for step in (2, 4):
        assert mp.Checkpoint.open(copies / f"checkpoint-{step}").verify().ok
    assert mp.list_run(copies).unfinished == ()


def test_what_is_being_copied_is_not_removed_before(run: Path, copies: Path) -> None:
    training, gate = Training(), threading.Event()
    with (
        in_mirror(copies, when_open(gate)),
        mirrored(run, copies, keep=mp.KeepLast(1)) as manager,
    ):
        save_at(manager, training, 1, 2, 3)
        assert steps_of(run) == [1, 2, 3], "they wait for their copies"
        gate.set()
    assert (steps_of(run), steps_of(copies)) == ([3], [1, 2, 3])


def test_a_mirror_that_falls_behind_is_told_in_the_report(run: Path, copies: Path) -> None:
    training, gate = Training(), threading.Event()
    with (
        in_mirror(copies, when_open(gate)),
        mirrored(run, copies) as manager,
    ):
        save_at(manager, training, 1, 2, 3)
        report = manager.save(4, training.state)
        assert "4 checkpoints wait to be copied" in " ".join(report.notes)
        gate.set()


def test_a_full_mirror_is_noted_and_stops_nothing(
    run: Path, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()

    def full(name: str) -> None:
        if name in ("write", "reserve", "fallocate"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copies))

    with mirrored(run, copies) as manager:
        with in_mirror(copies / ".milepost-staging", full):
            notes = list(manager.save(1, training.state).notes)
            assert manager._steps is not None
            manager._steps.mirroring.close()
        assert "checkpoint-1" in caplog.text and steps_of(copies) == []
        notes += manager.save(2, training.state).notes
        assert sum("mirror: checkpoint-1: " in note for note in notes) == 1
        assert not any("mirror" in note for note in manager.save(3, training.state).notes)
    assert steps_of(run) == [1, 2, 3]
    assert steps_of(copies) == [2, 3]
    assert mp.list_run(copies).unfinished == ()


def test_a_copy_that_fails_in_any_way_is_noted_and_the_next_ones_are_made(
    run: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise RuntimeError("can't start new thread")

    training = Training()
    with mirrored(run, copies, keep=mp.KeepLast(1)) as manager:
        assert manager._steps is not None
        with monkeypatch.context() as patched:
            patched.setattr("milepost.manager.mirror.copy_checkpoint", refuse)
            notes = list(manager.save(1, training.state).notes)
            assert manager._steps.mirroring.close(30)
        notes += manager.save(2, training.state).notes
        assert sum("checkpoint-1: RuntimeError(" in note for note in notes) == 1
        assert manager._steps.mirroring.close(30)
    assert (steps_of(run), steps_of(copies)) == ([2], [2])


def test_a_damaged_checkpoint_is_not_copied(run: Path, copies: Path) -> None:
    training, gate = Training(), threading.Event()
    with in_mirror(copies, when_open(gate)), mirrored(run, copies) as manager:
        save_at(manager, training, 1, 2)
        flip(run / "checkpoint-2" / WEIGHTS)
        gate.set()
    assert steps_of(copies) == [1]


def test_a_mirror_has_a_directory_of_its_own(run: Path, copies: Path) -> None:
    copies.parent.mkdir(exist_ok=True)
    copies.symlink_to(run)
    with pytest.raises(InvalidInputError, match="a directory of its own"):
        mirrored(run, copies)
    with pytest.raises(InvalidInputError, match="a directory of its own"):
        mp.CheckpointManager(run, mirrors=[mp.Mirror(run / "m"), mp.Mirror(run / "m")])


KILLED = """
import os, signal, sys
import milepost as mp
from milepost.storage import fileops
from tests.manager.small_training import Training

run, copies, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
training, count = Training(), 0

def hook(name, target, function, arguments):
    global count
    if copies in target:
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)

with fileops.hooked(hook), mp.CheckpointManager(run, mirrors=[mp.Mirror(copies)]) as manager:
    manager.save(1, training.state)
print(count)
"""


def die_at(run: Path, copies: Path, at: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(copies), str(at)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.case("V16")
def test_a_kill_while_copying_leaves_nothing_torn_and_the_next_process_makes_up_for_it(
    tmp_path: Path,
) -> None:
    whole = die_at(tmp_path / "whole", tmp_path / "whole-copies", 0)
    count = int(whole.stdout)
    assert count > 20
    for at in (count // 4, count - 3):
        run, copies = tmp_path / f"run-{at}", tmp_path / f"copies-{at}"
        assert die_at(run, copies, at).returncode == -signal.SIGKILL
        assert steps_of(run) == [1]
        if copies.is_dir():
            listing = mp.list_run(copies)
            assert listing.torn == ()
            assert all(mp.Checkpoint.open(e.path).verify().ok for e in listing.committed)
        resume(run, copies)
        assert steps_of(copies) == [1] and mp.list_run(copies).unfinished == ()


@pytest.mark.parametrize("how", ["cut short", "a file is gone"])
def test_a_torn_copy_is_replaced_by_a_whole_one(run: Path, copies: Path, how: str) -> None:
    with mirrored(run, copies) as manager:
        save_at(manager, Training(), 1)
    copy = copies / "checkpoint-1"
    if how == "cut short":
        os.truncate(copy / WEIGHTS, 40)
    else:
        (copy / "training" / "state.json").unlink()
    resume(run, copies)
    assert files_of(copy) == files_of(run / "checkpoint-1")
    listing = mp.list_run(copies)
    assert (steps_of(copies), listing.torn, listing.unfinished) == ([1], (), ())


def test_a_torn_copy_stays_when_the_checkpoint_is_damaged_too(run: Path, copies: Path) -> None:
    with mirrored(run, copies) as manager:
        save_at(manager, Training(), 1)
    os.truncate(copies / "checkpoint-1" / WEIGHTS, 40)
    torn = files_of(copies / "checkpoint-1")
    flip(run / "checkpoint-1" / WEIGHTS)
    with pytest.raises(DamagedError, match="are not those that were saved"):
        copy_checkpoint(run / "checkpoint-1", copies / "checkpoint-1", mp.WriteOptions())
    assert files_of(copies / "checkpoint-1") == torn


def test_a_checkpoint_of_more_files_than_a_process_may_open_is_copied(
    run: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.full((64,), float(n))) for n in range(60)]
    )
    state = {"model": model}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mirrored(run, copies) as manager:
        monkeypatch.setattr(open_files, "MAX_OPEN_FILES", 20)
        few = len(os.listdir("/proc/self/fd")) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            manager.save(1, state, max_shard_size=256)
            assert manager._steps is not None and manager._steps.mirroring.close(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(copies.glob("checkpoint-1/*.safetensors"))) == 60
    assert files_of(copies / "checkpoint-1") == files_of(run / "checkpoint-1")


# ---- resuming


@pytest.mark.parametrize("lost", ["the run", "the newest"])
def test_what_is_gone_from_the_run_is_taken_from_the_mirror(
    run: Path, copies: Path, lost: str
) -> None:
    training = Training()
    with mirrored(run, copies) as manager:
        save_at(manager, training, 1, 2)
    newest = mp.list_run(run).committed[-1].manifest
    shutil.rmtree(run if lost == "the run" else run / "checkpoint-2")
    other = Training(seed=3)
    with mirrored(run, copies, resume=mp.Resume.MUST) as manager:
        with pytest.warns(CheckpointWarning, match="gone from"):
            report = manager.resume(other.state)
        assert report is not None and report.path == copies / "checkpoint-2"
        assert same(other.values(), training.values())
        assert report.passed_over[0].startswith("checkpoint-2: gone from")
        manager.save(3, other.state)
    manifest = mp.list_run(run).committed[-1].manifest
    assert (manifest.parent_id, manifest.generation) == (newest.checkpoint_id, 0)
    assert steps_of(copies) == [1, 2, 3]


@pytest.mark.parametrize("how", ["a flipped bit", "a short file", "no manifest"])
@pytest.mark.filterwarnings("ignore::milepost.errors.CheckpointWarning")
def test_what_is_damaged_in_the_run_is_taken_from_the_mirror(
    run: Path, copies: Path, how: str
) -> None:
    training = Training()
    with mirrored(run, copies) as manager:
        save_at(manager, training, 1, 2)
    newest = mp.list_run(run).committed[-1].manifest
    if how == "a flipped bit":
        flip(run / "checkpoint-2" / WEIGHTS)
    elif how == "a short file":
        os.truncate(run / "checkpoint-2" / WEIGHTS, 40)
    else:
        (run / "checkpoint-2" / "milepost.json").unlink()
    other = Training(seed=3)
    with mirrored(run, copies) as manager:
        report = manager.resume(other.state)
        assert report is not None and report.path == copies / "checkpoint-2"
        assert [text.split(":")[0] for text in report.passed_over] == ["checkpoint-2"]
        assert same(other.values(), training.values())
        manager.save(3, other.state)
    manifest = mp.list_run(run).committed[-1].manifest
    assert (manifest.parent_id, manifest.generation) == (newest.checkpoint_id, 0)


@pytest.mark.filterwarnings("ignore::milepost.errors.CheckpointWarning")
def test_an_older_copy_is_taken_when_all_else_is_damaged_and_begins_a_generation(
    run: Path, copies: Path
) -> None:
    training = Training()
    with mirrored(run, copies, keep=mp.KeepLast(1)) as manager:
        save_at(manager, training, 1, 2)
    flip(run / "checkpoint-2" / WEIGHTS)
    flip(copies / "checkpoint-2" / WEIGHTS)
    with mirrored(run, copies) as manager:
        report = manager.resume(training.state)
        assert report is not None and report.path == copies / "checkpoint-1"
        assert len(report.passed_over) == 3
        manager.save(3, training.state)
    entry = mp.list_run(run).committed[-1]
    assert (entry.manifest.generation, entry.manifest.branch_step) == (1, 1)
    report, _ = resume(run, copies)
    assert (report.step, report.passed_over) == (3, [])


def test_the_run_itself_is_preferred_and_a_branch_that_was_left_stays_left(
    run: Path, copies: Path
) -> None:
    training = Training()
    with mirrored(run, copies) as manager:
        save_at(manager, training, 1, 2, 3)
    report, _ = resume(run, copies)
    assert (report.path, report.passed_over) == (run / "checkpoint-3", [])
    with mp.CheckpointManager(run, resume=run / "checkpoint-1") as manager:  # without the mirror
        manager.resume(training.state)
        manager.save(2, training.state)
    report, _ = resume(run, copies)
    assert (report.path, report.passed_over) == (run / "checkpoint-2", [])
    with mirrored(run, copies, resume=mp.Resume.NEVER) as manager:
        manager.resume(training.state)
        manager.save(1, training.state)
    shutil.rmtree(run)
    with pytest.warns(CheckpointWarning, match="gone from"):
        report, _ = resume(run, copies)
    assert report.step == 1 and report.path == copies / "checkpoint-1"


def test_a_mirror_out_of_reach_stops_only_a_resume_that_needs_it(run: Path, copies: Path) -> None:
    training = Training()
    copies.parent.mkdir(exist_ok=True)
    copies.symlink_to(copies.name)  # ELOOP, as bad as EIO
    far = copies / "far"
    with mp.CheckpointManager(run) as manager:
        save_at(manager, training, 1)
    report, _ = resume(run, far)
    assert (report.step, report.passed_over) == (1, [])
    shutil.rmtree(run)
    with mirrored(run, far) as manager, pytest.raises(StorageError, match="cannot be ruled out"):
        manager.resume(training.state)


# ---- on ranks


def on_ranks(rank: int, world_size: int, run: Path, copies: Path, last: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    state = {"model": model, "data": {"rank": rank, "step": 0}}
    options: dict[str, Any] = {"saving": mp.Saving.ASYNC} if last == 2 else {}
    with mirrored(run, copies, **options) as manager:
        try:
            report = manager.resume(state)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        begin = 1 if report is None else (report.step or 0) + 1
        for step in range(begin, last + 1):
            state["data"] = {"rank": rank, "step": step}
            manager.save(step, state)
        if report is None:
            return None
        return str(report.path), report.passed_over, state["data"]


def test_ranks_take_the_same_copy_after_the_run_is_lost_or_damaged(tmp_path: Path) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    assert run_world(2, on_ranks, run, copies, 2) == [None, None]
    assert steps_of(copies) == [1, 2]
    shutil.rmtree(run)
    first, second = run_world(2, on_ranks, run, copies, 3)
    assert first[:2] == second[:2]
    assert first[0] == str(copies / "checkpoint-2") and "gone from" in first[1][0]
    assert (first[2], second[2]) == ({"rank": 0, "step": 3}, {"rank": 1, "step": 3})
    flip(run / "checkpoint-3" / WEIGHTS)
    first, second = run_world(2, on_ranks, run, copies, 3)
    assert first[:2] == second[:2]
    assert first[0] == str(copies / "checkpoint-3")
    assert first[1][0].startswith("checkpoint-3: ")
    assert (first[2], second[2]) == ({"rank": 0, "step": 3}, {"rank": 1, "step": 3})
