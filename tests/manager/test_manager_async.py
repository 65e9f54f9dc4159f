"""A manager whose saves go on behind training: what counts, when, and what is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import milepost as mp
from milepost.engine.rendezvous import Solo
from milepost.errors import (
    CheckpointError,
    InvalidInputError,
    SaveInFlightError,
    SaveOutcomeUnknownError,
    StorageError,
)
from tests.manager.small_training import Training, same
from tests.slow_disk import failing_writes, held_writes
from tests.worlds import run_world


def manager_of(run: Path, **options: Any) -> mp.CheckpointManager[mp.SaveHandle]:
    return mp.CheckpointManager(run, saving=mp.Saving.ASYNC, **options)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in mp.list_run(run).committed]


# ---- what follows the commit


def test_a_run_behind_training_resumes_with_the_bits_of_one_that_waits(tmp_path: Path) -> None:
    def train(run: Path, saving: mp.Saving, last: int, seed: int = 0) -> Training:
        training = Training(seed=seed)
        options: dict[str, Any] = {"saving": saving, "save": mp.EveryNSteps(1)}
        with mp.CheckpointManager(run, keep=mp.KeepLast(2), **options) as manager:
            report = manager.resume(training.state)
            for step in range((report.step or 0) + 1 if report else 1, last + 1):
                loss = training.step()
                manager.maybe_save(step, training.state, metrics={"loss": loss})
        return training

    train(tmp_path / "waits", mp.Saving.WAIT, 5)
    waits = train(tmp_path / "waits", mp.Saving.WAIT, 8, seed=9)
    train(tmp_path / "behind", mp.Saving.ASYNC, 5)
    behind = train(tmp_path / "behind", mp.Saving.ASYNC, 8, seed=9)
    assert same(waits.values(), behind.values())
    one, two = mp.list_run(tmp_path / "waits"), mp.list_run(tmp_path / "behind")
    assert [entry.step for entry in one.committed] == [entry.step for entry in two.committed]
    for name in ("latest", "best"):
        assert os.readlink(tmp_path / "waits" / name) == os.readlink(tmp_path / "behind" / name)
    histories = [
        json.loads((tmp_path / run / "checkpoint-8" / "trainer_state.json").read_bytes())
        for run in ("waits", "behind")
    ]
    assert histories[0]["log_history"] == histories[1]["log_history"]


def test_nothing_is_removed_or_pointed_to_before_the_commit(tmp_path: Path) -> None:
    training, buffers = Training(), mp.HostBuffers()
    with manager_of(tmp_path, keep=mp.KeepLast(1), buffers=buffers) as manager:
        first = manager.save(1, training.state).wait()
        with held_writes() as gate:
            handle = manager.save(2, training.state)
            assert not handle.done()
            assert steps_of(tmp_path) == [1]
            assert os.readlink(tmp_path / "latest") == "checkpoint-1"
            gate.set()
            report = handle.wait()
        assert report.written and report.checkpoint_id != first.checkpoint_id
        assert buffers.nbytes > 0
        assert steps_of(tmp_path) == [2]
        assert os.readlink(tmp_path / "latest") == "checkpoint-2"
        (entry,) = mp.list_run(tmp_path).committed
        assert entry.manifest.parent_id == first.checkpoint_id


def test_queued_saves_descend_from_what_was_committed_in_between(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path, in_flight=mp.InFlight.QUEUE) as manager:
        with held_writes() as gate:
            handles = [manager.save(1, training.state)]
            handles.append(manager.save(2, training.state, metrics={"loss": 1.0}))
            assert manager.log_history == [{"step": 2, "loss": 1.0}]
            gate.set()
            ids = [handle.wait().checkpoint_id for handle in handles]
        assert [e.manifest.parent_id for e in mp.list_run(tmp_path).committed] == [None, ids[0]]


def test_a_queued_save_behind_one_that_fails_descends_from_the_last_good_one(
    tmp_path: Path,
) -> None:
    training = Training()
    with manager_of(tmp_path, in_flight=mp.InFlight.QUEUE, keep=mp.KeepLast(1)) as manager:
        first = manager.save(1, training.state).wait()
        with failing_writes(part="checkpoint-2"), held_writes() as gate:
            bad = manager.save(2, training.state, metrics={"loss": 2.0})
            good = manager.save(3, training.state, metrics={"loss": 3.0})
            gate.set()
            with pytest.raises(StorageError):
                bad.wait()
            good.wait()
        assert [entry["loss"] for entry in manager.log_history] == [3.0]
        (entry,) = mp.list_run(tmp_path).committed
        assert (entry.step, entry.manifest.parent_id) == (3, first.checkpoint_id)


def test_a_coordinator_that_falls_silent_after_the_commit_costs_a_note(tmp_path: Path) -> None:
    class Silent(Solo):
        is_coordinator = False

        def settle(self, name: str, error: BaseException | None) -> None:
            raise SaveOutcomeUnknownError("rank 0 has shown no sign of life")

        announce = settle

    with manager_of(tmp_path) as manager:
        report = manager.save(1, Training().state).wait()
        assert manager._steps is not None
        told = manager._steps.saver._committed(Silent(), report, time.monotonic())
    assert told.checkpoint_id == report.checkpoint_id
    assert "what followed the commit is not known: rank 0" in told.notes[-1]


@pytest.mark.case("V18")
def test_a_failure_is_raised_by_the_next_call_and_the_step_after_it_is_due(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path, save=mp.EveryNSteps(10), keep=mp.KeepLast(1)) as manager:
        first = manager.save(1, training.state, metrics={"loss": 1.0}).wait()
        with failing_writes():
            manager.maybe_save(10, training.state, metrics={"loss": 0.5})
            mp.wait_for_saves()
        assert steps_of(tmp_path) == [1]
        assert os.readlink(tmp_path / "best") == "checkpoint-1"
        assert [entry["step"] for entry in manager.log_history] == [1]
        with pytest.raises(StorageError, match="step 10 was not saved behind training"):
            manager.maybe_save(11, training.state)
        handle = manager.maybe_save(12, training.state)
        assert handle is not None and handle.wait().written
        assert manager.maybe_save(13, training.state) is None
        (entry,) = mp.list_run(tmp_path).current[-1:]
        assert (entry.step, entry.manifest.parent_id) == (12, first.checkpoint_id)


def test_the_end_of_the_block_waits_and_raises_what_nobody_was_told(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        manager.save(1, training.state)
    assert steps_of(tmp_path) == [1]
    with (
        pytest.raises(StorageError, match="step 2 was not saved"),
        failing_writes(part="checkpoint-2"),
        manager_of(tmp_path) as manager,
    ):
        manager.resume(training.state)
        manager.save(2, training.state)
    with manager_of(tmp_path) as manager:  # the lease was given back, and it is told once
        manager.resume(training.state)
        manager.save(3, training.state)
    assert steps_of(tmp_path) == [1, 3]


def test_an_exception_in_the_block_finishes_the_save_and_stays_what_it_is(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(ArithmeticError, match="training"), manager_of(tmp_path) as manager:
        manager.save(1, training.state)
        raise ArithmeticError("training")
    assert steps_of(tmp_path) == [1]


def test_resume_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    training = Training()
    training.steps(2)
    expected = training.values()
    with manager_of(tmp_path) as manager, held_writes() as gate:
        manager.save(2, training.state)
        training.step()
        threading.Timer(0.05, gate.set).start()
        report = manager.resume(training.state)
        assert report is not None and report.step == 2
        assert same(training.values(), expected)


# ---- when


def test_when_idle_saves_as_soon_as_the_last_one_is_committed(tmp_path: Path) -> None:
    training, saved = Training(), []
    with manager_of(tmp_path, save=mp.WhenIdle()) as manager:
        with held_writes() as gate:
            for step in range(1, 6):
                saved += [step] if manager.maybe_save(step, training.state) else []
            assert saved == [1]
            gate.set()
            mp.wait_for_saves()
        assert manager.should_save(6) and not manager.should_save(1)
        assert manager.maybe_save(6, training.state) is not None
    assert steps_of(tmp_path) == [1, 6]


def test_a_skipped_save_does_not_count_and_a_refused_one_is_an_error(tmp_path: Path) -> None:
    training = Training()
    with (
        manager_of(tmp_path / "a", save=mp.EveryNSteps(1), in_flight=mp.InFlight.SKIP) as manager,
        held_writes() as gate,
    ):
        manager.save(1, training.state)
        skipped = manager.save(2, training.state, metrics={"loss": 1.0}).wait()
        assert not skipped.written and "step 2 was left out" in skipped.notes[0]
        assert manager.log_history == []
        assert manager.should_save(2), "it was not saved"
        gate.set()
        mp.wait_for_saves()
        assert manager.save(2, training.state).wait().written
    with manager_of(tmp_path / "b", in_flight=mp.InFlight.ERROR) as manager, held_writes():
        manager.save(1, training.state)
        with pytest.raises(SaveInFlightError, match="checkpoint-2"):
            manager.save(2, training.state)


def test_what_a_signal_asks_for_is_never_left_out(tmp_path: Path) -> None:
    training = Training()
    options = {"save": mp.OnSignal(signal.SIGUSR1), "in_flight": mp.InFlight.SKIP}
    with manager_of(tmp_path, **options) as manager, held_writes() as gate:
        manager.save(1, training.state)
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Timer(0.05, gate.set).start()
        handle = manager.maybe_save(2, training.state)
        assert handle is not None and handle.wait().written
        assert manager.maybe_save(3, training.state) is None
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"saving": mp.Saving.ASYNC, "layout": mp.Layout.TRIO},
        {"in_flight": mp.InFlight.QUEUE},
        {"overlap": mp.Overlap.UNTIL_STEP},
        {"buffers": mp.HostBuffers()},
        {"layout": mp.Layout.TRIO, "mirrors": [mp.Mirror("elsewhere")]},
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        mp.CheckpointManager(tmp_path / "run", **options)
    assert list(tmp_path.iterdir()) == []


TERMINATED = """
import os, signal, sys, time
import milepost as mp
from milepost.storage import fileops
from tests.manager.small_training import Training

def slow(name, target, function, arguments):
    if name == "write" and "checkpoint-" in target:
        time.sleep(float(sys.argv[3]))
    return function(*arguments)

training = Training()
manager = mp.CheckpointManager(
    sys.argv[1], saving=mp.Saving.ASYNC, save=mp.OnSignal(), grace_s=float(sys.argv[2])
)
with fileops.hooked(slow), manager:
    manager.save(1, training.state)
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(2, 100):
        training.step()
        manager.maybe_save(step, training.state)
        if manager.stop_requested:
            break
    begin = time.monotonic()
print(step, time.monotonic() - begin)
"""


@pytest.mark.case("V19")
@pytest.mark.parametrize(("grace_s", "pause_s"), [(30.0, 0.01), (0.01, 0.1)])
def test_after_sigterm_the_saves_are_finished_and_close_waits_no_longer_than_the_grace_time(
    tmp_path: Path, grace_s: float, pause_s: float
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, str(tmp_path), str(grace_s), str(pause_s)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ")
    assert ("the time after SIGTERM is over" in done.stderr) == (grace_s < 1)
    assert steps_of(tmp_path) == [1, 2], "the interpreter waits for what close did not"


# ---- on ranks


def told(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def behind_on_ranks(rank: int, world_size: int, run: Path) -> Any:
    model = torch.nn.Linear(8, 8)
    state = {"model": model, "data": {"rank": rank}}
    found: dict[str, Any] = {}
    with manager_of(run / "counted", save=mp.EveryNSteps(50), keep=mp.KeepLast(2)) as manager:
        manager.resume(state)
        handles = [manager.save(step, state, metrics={"loss": float(rank)}) for step in (1, 2, 3)]
        found["ids"] = [handle.wait().checkpoint_id for handle in handles]
        found["history"] = manager.log_history
        found["kept"] = steps_of(run / "counted")
        dist.barrier()
        with failing_writes(part="checkpoint-4") if rank == 1 else held_nothing():
            manager.save(4, state)
            mp.wait_for_saves()
        for step in range(5, 49):  # between two counted steps: all are told at one of these
            time.sleep(0.02 * (1 + rank))
            if manager.should_save(step):
                found["raised"] = (step, told(lambda s=step: manager.save(s, state)))  # type: ignore[misc]
                break
        found["after"] = [told(lambda: manager.save(49, state)), manager.should_save(49)]
        mp.wait_for_saves()
        with held_writes() as gate:
            manager.save(50, state)
            threading.Timer(0.1 * rank, gate.set).start()
            report = manager.resume(state)
            found["resumed"] = report.step if report else None
    with manager_of(run / "idle", save=mp.WhenIdle()) as manager:
        manager.resume(state)
        saved = []
        for step in range(1, 100):
            time.sleep(0.01)
            saved += [step] if manager.maybe_save(step, state) else []
        found["idle"] = saved
    return found


@contextmanager
def held_nothing() -> Iterator[None]:
    yield


@pytest.mark.case("V18")
@pytest.mark.case("V19")
def test_ranks_save_behind_training_and_are_told_of_a_failure_at_one_step(tmp_path: Path) -> None:
    first, second = run_world(2, behind_on_ranks, tmp_path)
    assert first == second
    assert first["kept"] == [2, 3], "a save that has ended is pruned, as every rank sees it"
    assert first["history"] == [{"step": step, "loss": 0.0} for step in (1, 2, 3)]
    step, message = first["raised"]
    assert 5 <= step < 49 and "step 4 was not saved behind training" in message
    assert "rank 1" in message
    assert first["after"] == ["nothing", False]
    assert first["resumed"] == 50
    manifests = [entry.manifest for entry in mp.list_run(tmp_path / "counted").committed]
    assert [each.step for each in manifests] == [3, 49, 50], "the best, and the newest two"
    assert [each.parent_id for each in manifests[1:]] == [m.checkpoint_id for m in manifests[:2]]
    assert len(first["idle"]) >= 2
    assert steps_of(tmp_path / "idle") == first["idle"]
