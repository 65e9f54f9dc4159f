"""The directory layout on several real ranks: one decides, all go the same way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import milepost as mp
from milepost.errors import CheckpointError, RankTimeoutError
from milepost.storage import fileops
from tests.parallel.models import FSDP2, start
from tests.worlds import run_outcomes, run_world, silence_of

LAST = 6


def told(action: Callable[[], object]) -> str:
    """Class and message of what `action` raises."""
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- a run


def train(rank: int, world_size: int, run: Path, last: int) -> Any:
    training = start(FSDP2, seed=rank)  # FSDP2 takes what it is given; a resume repairs it
    losses, written = [], []
    with mp.CheckpointManager(
        run, save=mp.EveryNSteps(2), keep=mp.KeepLast(1), best=mp.BestMetric("score")
    ) as manager:
        report = manager.resume(training.state())
        for step in range(report.step + 1 if report and report.step else 1, last + 1):
            losses.append(training.step())
            score = {2: 0.5, 4: 0.25, 6: 0.75}.get(step, 9.0) + rank  # the coordinator's counts
            saved = manager.maybe_save(step, training.state(), metrics={"score": score})
            written += [] if saved is None else [(saved.step, saved.checkpoint_id, saved.notes)]
        history = manager.log_history
    return losses, written, history, None if report is None else report.level.value


def test_a_run_on_ranks_goes_on_exactly_and_keeps_what_one_process_would(tmp_path: Path) -> None:
    whole = run_world(2, train, tmp_path / "whole", LAST)
    run_world(2, train, tmp_path / "cut", 4)
    second = run_world(2, train, tmp_path / "cut", LAST)
    for rank in range(2):
        assert second[rank][0] == whole[rank][0][4:]
        assert second[rank][3] == "exact"
        assert second[rank][1:3] == second[0][1:3], "ids, notes and history are those of rank 0"
    for run in ("whole", "cut"):
        listing = mp.list_run(tmp_path / run)
        assert [entry.step for entry in listing.committed] == [4, 6], "the best and the newest"
        assert os.readlink(tmp_path / run / "latest") == "checkpoint-6"
        assert os.readlink(tmp_path / run / "best") == "checkpoint-4"
        newest = tmp_path / run / "checkpoint-6"
        document = json.loads((newest / "trainer_state.json").read_bytes())
        assert document["best_metric"] == 0.25
        assert document["best_global_step"] == 4
        assert document["best_model_checkpoint"] == str(tmp_path / run / "checkpoint-4")
        assert [entry["score"] for entry in document["log_history"]] == [0.5, 0.25, 0.75]


@contextmanager
def slow_and_counted(seed: int, longest_s: float) -> Iterator[Counter[str]]:
    """Wait a random time before each change of a name, and count the changes."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name in ("mkdir", "rename", "exchange", "link", "symlink", "unlink", "rmdir"):
            counts[name] += 1
            time.sleep(rng.uniform(0, longest_s))
        return function(*arguments)

    with fileops.hooked(hook):
        yield counts


def save_and_prune(rank: int, world_size: int, run: Path, rounds: int, longest_s: float) -> Any:
    state = {"model": torch.nn.Linear(2, 2), "data": {"rank": rank}}
    with (
        slow_and_counted(rank, longest_s) as counts,
        mp.CheckpointManager(run, keep=mp.KeepLast(2)) as manager,
    ):
        manager.resume(state)
        for step in range(1, rounds + 1):
            report = manager.save(step, state)
            assert not any("still there" in note for note in report.notes), report.notes
        seen = [entry.step for entry in mp.list_run(run).committed]
    return dict(counts), seen


@pytest.mark.case("V25")
@pytest.mark.parametrize(
    ("rounds", "longest_s"),
    [(6, 0.01), pytest.param(200, 0.03, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_one_rank_publishes_and_prunes_and_the_others_change_no_name(
    tmp_path: Path, rounds: int, longest_s: float
) -> None:
    results = run_world(4, save_and_prune, tmp_path, rounds, longest_s, deadline_s=3600)
    assert sum(results[0][0].values()) > 5 * rounds, "rank 0 makes, renames and removes"
    for counts, seen in results:
        assert seen == [rounds - 1, rounds], "a save that returned is published and pruned"
        assert counts == results[0][0] or counts == {}, "nobody else touches a name"


# ---- when: clocks and signals


def loop(
    manager: mp.CheckpointManager, rank: int, last: int, signals: Mapping[int, tuple[int, int]]
) -> tuple[list[int], int]:
    """Steps that were saved, and the one after which the loop was left; ranks go at their own
    pace, and meet in a collective now and then. `signals` maps steps to (rank, signal)."""
    saved = []
    state = {"progress": {"step": 0}}
    manager.resume(state)
    for step in range(1, last + 1):
        time.sleep(0.001 * (rank + 1))
        if step % 7 == 0:
            dist.all_reduce(torch.ones(1))  # helper threads answer meanwhile
        receiver, number = signals.get(step, (None, 0))
        if receiver == rank:
            os.kill(os.getpid(), number)
        if manager.should_save(step):
            manager.save(step, state)
            saved.append(step)
        if manager.stop_requested:
            return saved, step
    return saved, 0


def save_by_clock_and_signal(rank: int, world_size: int, run: Path) -> Any:
    clock = mp.AnyOf(mp.EveryNSteps(300), mp.EveryNMinutes(0.1 / 60))
    with mp.CheckpointManager(run / "clock", save=clock) as manager:
        by_clock = loop(manager, rank, 600, {})  # there is time to agree between counted steps
    signals = {20: (1, signal.SIGUSR1), 500: (2, signal.SIGTERM)}
    with mp.CheckpointManager(run / "signal", save=mp.OnSignal()) as manager:
        by_signal = loop(manager, rank, 20_000, signals)
    return by_clock, by_signal


@pytest.mark.case("V19")
def test_clock_and_signals_of_any_rank_make_all_save_at_one_step(tmp_path: Path) -> None:
    first, *others = run_world(3, save_by_clock_and_signal, tmp_path)
    assert others == [first, first]
    (by_clock, _), (by_signal, stopped) = first
    assert {300, 600}.issubset(by_clock), "steps that are counted need no agreement"
    assert len(by_clock) > 2
    assert len(by_signal) == 2, "rank 1 asked for one, rank 2 for the last one"
    assert 20 <= by_signal[0] < 500 <= by_signal[1] == stopped
    assert [entry.step for entry in mp.list_run(tmp_path / "clock").committed] == by_clock


class Faulty:
    """A policy that fails once it is asked with a clock."""

    def should_save(self, context: Any) -> bool:
        if context.now_s > context.last_saved_s:
            raise ArithmeticError("no clock")
        return False


def ask_a_faulty_policy(rank: int, world_size: int, run: Path) -> str:
    def ask() -> None:
        with mp.CheckpointManager(run, save=Faulty()) as manager:
            for step in range(1000):
                time.sleep(0.01)
                manager.should_save(step)

    return told(ask)


def leave_early(rank: int, world_size: int, run: Path) -> float:
    manager = mp.CheckpointManager(run, save=mp.EveryNMinutes(0.3 / 60))
    state = {"progress": {"step": 0}}
    manager.resume(state)
    begin = time.monotonic()
    for step in range(1, 100 if rank == 1 else 20):
        if rank == 1:
            time.sleep(0.01)
            manager.should_save(step)
    manager.close()
    return time.monotonic() - begin


def test_a_policy_that_fails_and_a_rank_that_ends_leave_nobody_waiting(tmp_path: Path) -> None:
    messages = run_world(2, ask_a_faulty_policy, tmp_path / "a")
    assert len(set(messages)) == 1
    assert messages[0].startswith("RankError: rank 0: ArithmeticError: no clock")
    assert max(run_world(2, leave_early, tmp_path / "b")) < 20


# ---- where to go on


def write_two(rank: int, world_size: int, run: Path) -> None:
    state = {"model": torch.nn.Linear(64, 64), "data": {"rank": rank}}
    for name in ("a", "other"):
        with mp.CheckpointManager(run / name) as manager:
            manager.resume(state)
            manager.save(1, state)
            manager.save(2, state)
    with mp.CheckpointManager(run / "other", resume=run / "other" / "checkpoint-1") as manager:
        manager.resume(state)
        manager.save(2, state)  # a second generation of step 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    run_world(2, write_two, path)
    return path


def resume_in(rank: int, world_size: int, directories: list[Path]) -> tuple[Any, bool]:
    """Each rank resumes from a directory of its own; what it was told, and if it is as before."""
    os.environ["MILEPOST_VISIBLE_S"] = "3"
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    state = {"model": model, "data": {"rank": -1}}
    answer: Any = None
    hidden = directories[rank] / "hidden"
    if hidden.exists():
        threading.Timer(1.0, hidden.rename, [directories[rank] / "checkpoint-2"]).start()
    with mp.CheckpointManager(directories[rank]) as manager:
        try:
            report = manager.resume(state)
            answer = None if report is None else (report.step, report.passed_over, state["data"])
        except CheckpointError as error:
            answer = f"{type(error).__name__}: {error}"
    return answer, torch.equal(model.weight, before)


def copies(runs: Path, tmp_path: Path) -> list[Path]:
    for name in ("0", "1"):
        shutil.copytree(runs / "a", tmp_path / name)
    return [tmp_path / "0", tmp_path / "1"]


@pytest.mark.case("C1.9")
@pytest.mark.parametrize("view", ["nothing", "another generation", "a file less", "unreadable"])
def test_ranks_with_other_views_end_with_one_error_and_untouched(
    runs: Path, tmp_path: Path, view: str
) -> None:
    directories = copies(runs, tmp_path)
    target = directories[1] / "checkpoint-2"
    if view == "nothing":
        shutil.rmtree(target)
    elif view == "another generation":
        shutil.rmtree(target)
        shutil.copytree(runs / "other" / "checkpoint-2", target)
    elif view == "a file less":
        (target / "model.safetensors").unlink()
    else:
        (target / "milepost.json").unlink()
        (target / "milepost.json").symlink_to(target / "milepost.json")  # ELOOP, as bad as EIO
    (first, same_first), (second, same_second) = run_world(2, resume_in, directories)
    assert first == second and same_first and same_second
    expected = {
        "nothing": r"here is none; give all ranks the same directory",
        "another generation": "of generation 1; give",
        "a file less": "here model.safetensors is missing",
        "unreadable": "it can be neither used nor ruled out",
    }[view]
    assert expected in first, first
    assert first.startswith("StorageError: rank 1: " if view == "unreadable" else "MismatchError: ")


def test_what_another_rank_sees_later_is_waited_for(runs: Path, tmp_path: Path) -> None:
    directories = copies(runs, tmp_path)
    (directories[1] / "checkpoint-2").rename(directories[1] / "hidden")
    results = run_world(2, resume_in, directories)
    assert [answer for answer, _ in results] == [(2, [], {"rank": 0}), (2, [], {"rank": 1})]


@pytest.mark.case("E7")
def test_damage_that_one_rank_proves_makes_all_take_the_older_one(
    runs: Path, tmp_path: Path
) -> None:
    directory = copies(runs, tmp_path)[0]
    for name in ("model.safetensors", "training/state.safetensors"):
        path = directory / "checkpoint-2" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (first, _), (second, _) = run_world(2, resume_in, [directory, directory])
    assert first[0] == second[0] == 1
    assert first[1] == second[1]
    assert first[1][0].startswith("checkpoint-2: ")
    assert (first[2], second[2]) == ({"rank": 0}, {"rank": 1})


def take_a_busy_directory(rank: int, world_size: int, run: Path) -> list[str]:
    return [
        told(lambda: mp.CheckpointManager(run)),
        told(lambda: mp.CheckpointManager(run / "nowhere", resume=mp.Resume.MUST)),
    ]


def test_a_lease_that_rank_0_does_not_get_is_an_error_of_all(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path):
        first, second = run_world(2, take_a_busy_directory, tmp_path)
    assert first == second
    assert first[0].startswith("RunInUseError: rank 0: ")
    assert first[1].startswith("NotFoundError: rank 0: ")


def come_late_or_never(rank: int, world_size: int, run: Path) -> Any:
    state = {"model": torch.nn.Linear(64, 64), "data": {"rank": -1}}
    with mp.CheckpointManager(run) as manager:
        if rank == 1:
            time.sleep(2)
        report = manager.resume(state)
        assert report is not None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            with silence_of(5):
                manager.save(3, state)
        except RankTimeoutError as error:
            return report.step, error.failed, time.monotonic() - begin
    return "nothing"


def test_a_late_rank_is_waited_for_and_a_dead_one_named(runs: Path, tmp_path: Path) -> None:
    directory = copies(runs, tmp_path)[0]
    survivor, dead = run_outcomes(2, come_late_or_never, directory, deadline_s=120)
    assert dead.exit_code == -signal.SIGKILL
    step, failed, seconds = survivor.value
    assert (step, failed) == (2, (1,))
    assert seconds < 30
    assert [entry.step for entry in mp.list_run(directory).committed] == [1, 2]
