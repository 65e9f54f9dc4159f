"""Ranks in trouble: whatever fails, wherever, all raise one error in bounded time, and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import milepost as mp
from milepost.engine.rendezvous import Rendezvous
from milepost.errors import SaveOutcomeUnknownError
from milepost.storage import fileops
from tests.worlds import run_outcomes, run_world, silence_of

LIMIT_S = 5


def state_of(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(32, 32), "data": {"rank": rank}}


def told(action: Callable[[], object]) -> tuple[str, float]:
    """What `action` raised, with its class, and how long it took."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


def failing(operation: str, error: Exception, ending: str = "") -> Any:
    """A hook that raises at each `operation` on a path that ends so."""

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == operation and str(target).endswith(ending):
            raise error
        return function(*arguments)

    return fileops.hooked(hook)


class Broken:
    """Fails when its state is asked for, on one rank."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.error is not None:
            raise self.error


# (what the failing rank is told to do, the rank, the class that all raise)
PHASES: dict[str, tuple[int, str]] = {
    "begin": (0, "ExistsError"),
    "capture": (1, "RankError"),
    "capture, of a value": (2, "UnencodableError"),
    "plan": (2, "MismatchError"),
    "stage": (0, "NoSpaceError"),
    "write": (1, "StorageError"),
    "write, on rank 0": (0, "NoSpaceError"),
    "commit": (0, "StorageError"),
    "commit, after the claim": (0, "StorageError"),
}


def fail_in(phase: str, rank: int, run: Path, step: int) -> None:
    """A save in which `rank` fails in `phase`."""
    state = state_of(rank)
    number, _ = PHASES[phase]
    is_mine = rank == number
    with ExitStack() as stack:
        match phase:
            case "begin":
                step = 1
            case "capture":
                state["broken"] = Broken(ArithmeticError("no state") if is_mine else None)
            case "capture, of a value":
                state["data"] = {"rank": object() if is_mine else rank}
            case "plan":
                state["model"] = torch.nn.Linear(32, 32).to(
                    torch.bfloat16 if is_mine else torch.float32
                )
            case "stage":
                if is_mine:
                    stack.enter_context(failing("mkdir", OSError(28, "no space")))
            case "write" | "write, on rank 0":
                if is_mine:
                    stack.enter_context(failing("write", OSError(28 if rank == 0 else 5, "bad")))
            case "commit":
                if is_mine:
                    stack.enter_context(failing("fsync-directory", OSError(5, "sick disk")))
            case _:
                if is_mine:
                    stack.enter_context(failing("rename", OSError(5, "sick disk")))
        mp.save(run / f"checkpoint-{step}", state, step=step)


def fail_in_every_phase(rank: int, world_size: int, run: Path) -> Any:
    state = state_of(rank)
    mp.save(run / "checkpoint-1", state, step=1)
    found = {}
    for number, phase in enumerate(PHASES, start=2):
        found[phase] = told(lambda p=phase, s=number: fail_in(p, rank, run, s))  # type: ignore[misc]
    mp.save(run / "checkpoint-50", state, step=50)
    return found, [entry.step for entry in mp.list_run(run).committed]


@pytest.mark.case("C1.9")
@pytest.mark.case("E7")
def test_a_rank_that_fails_in_any_phase_makes_all_raise_the_same(tmp_path: Path) -> None:
    results = run_world(3, fail_in_every_phase, tmp_path)
    for phase, (number, expected) in PHASES.items():
        messages = {found[phase][0] for found, _ in results}
        assert len(messages) == 1, (phase, messages)
        message = messages.pop()
        assert message.startswith(f"{expected}: "), (phase, message)
        assert f"rank {number}" in message, (phase, message)
        assert max(found[phase][1] for found, _ in results) < 30
    assert [steps for _, steps in results] == [[1, 50]] * 3, "the others stay, the next one works"
    assert mp.list_run(tmp_path).unfinished == ()
    assert all(mp.Checkpoint.open(e.path).verify().ok for e in mp.list_run(tmp_path).committed)


def fail_to_load(rank: int, world_size: int, run: Path) -> Any:
    state = {**state_of(rank), "broken": Broken(None)}
    mp.save(run / "checkpoint-1", state, step=1)
    found = []
    other = state_of(rank)
    if rank == 1:
        other["model"] = torch.nn.Linear(16, 16)
    before = [p.detach().clone() for p in other["model"].parameters()]
    found.append(told(lambda: mp.load(run / "checkpoint-1", {**other, "broken": Broken(None)}))[0])
    untouched = all(
        torch.equal(a, b) for a, b in zip(before, other["model"].parameters(), strict=True)
    )
    torn = {**state_of(rank), "broken": Broken(ArithmeticError("no") if rank == 1 else None)}
    found.append(told(lambda: mp.load(run / "checkpoint-1", torn))[0])
    mp.load(run / "checkpoint-1", state)
    return found, untouched


def test_a_rank_that_cannot_load_leaves_all_untouched_or_tells_all_they_are_torn(
    tmp_path: Path,
) -> None:
    (first, same_first), (second, same_second) = run_world(2, fail_to_load, tmp_path)
    assert first == second and same_first and same_second
    assert first[0].startswith("ShapeMismatchError: rank 1: ")
    assert first[1].startswith("LoadTornError: rank 1: ")
    assert "must not be used until a load succeeds" in first[1]


# ---- ranks that are late, or dead


def come_late(rank: int, world_size: int, run: Path, late_s: float, limit_s: int) -> Any:
    state = state_of(rank)
    mp.save(run / "checkpoint-1", state, step=1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # late by the clock of the others, however slow the disk was
        store.wait([f"calling/{other}" for other in range(world_size) if other != 1])
        time.sleep(late_s)
    else:
        store.set(f"calling/{rank}", "1")
    with silence_of(limit_s):
        late = told(lambda: mp.save(run / "checkpoint-2", state, step=2))
    return late, told(lambda: mp.save(run / "checkpoint-3", state, step=3))


@pytest.mark.parametrize(
    ("late_s", "limit_s", "steps"), [(2, 90, [1, 2, 3]), (LIMIT_S + 4, LIMIT_S, [1, 3])]
)
def test_a_late_rank_is_waited_for_and_one_past_the_limit_is_named_by_all(
    tmp_path: Path, late_s: float, limit_s: int, steps: list[int]
) -> None:
    results = run_world(3, come_late, tmp_path, late_s, limit_s)
    messages = {late[0] for late, _ in results}
    if steps == [1, 2, 3]:
        assert messages == {"nothing"}
    else:
        assert len(messages) == 1
        message = messages.pop()
        assert message.startswith("RankTimeoutError: rank 1 has shown no sign of life"), message
        assert max(late[1] for late, _ in results) < LIMIT_S + 15, "the late one is told at once"
    assert [after[0] for _, after in results] == ["nothing"] * 3
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == steps


def kill_at(moment: str) -> Any:
    """End this process without a word at a moment of a save."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if moment == "in a write" and name == "write":
            die()
        result = function(*arguments)
        if moment == "after the rename" and name == "rename":
            die()
        return result

    return fileops.hooked(hook)


def die_in_a_save(rank: int, world_size: int, run: Path, who: int, moment: str) -> Any:
    state = state_of(rank)
    mp.save(run / "checkpoint-1", state, step=1)
    stack = ExitStack()
    if rank == who and moment == "once all is written":
        # Its last word is that it has written all; then it is gone.
        original = Rendezvous.broadcast

        def say_no_more(self: Rendezvous, name: str, value: bytes | None = None) -> bytes:
            if name == "write/settled":
                time.sleep(1)  # what it said before is read
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, name, value)

        Rendezvous.broadcast = say_no_more  # type: ignore[method-assign]
    elif rank == who:
        stack.enter_context(kill_at(moment))
    with stack, silence_of(LIMIT_S):
        return told(lambda: mp.save(run / "checkpoint-2", state, step=2))


@pytest.mark.case("E7")
@pytest.mark.parametrize(
    ("who", "moment", "expected", "steps"),
    [
        (1, "in a write", "RankTimeoutError: rank 1", [1]),
        (2, "once all is written", "nothing", [1, 2]),
        (0, "in a write", "RankError: the store that the ranks meet in is gone", [1]),
        (0, "after the rename", "nothing", [1, 2]),
    ],
)
def test_a_rank_killed_before_the_commit_undoes_it_and_after_it_does_not(
    tmp_path: Path, who: int, moment: str, expected: str, steps: list[int]
) -> None:
    outcomes = run_outcomes(3, die_in_a_save, tmp_path, who, moment, deadline_s=120)
    assert outcomes[who].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            # A rank that learnt its outcome has nobody to say good-bye to when rank 0 is dead.
            assert outcome.value is not None, outcome.error
            message, seconds = outcome.value
            assert message.startswith(expected), message
            assert seconds < LIMIT_S + 25
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == steps


def fall_silent_after_the_claim(rank: int, world_size: int, run: Path, renames: str) -> Any:
    """Rank 0 claims the commit, is not heard of any more, and renames before that or later."""
    state = state_of(rank)
    original = Rendezvous.claim

    def claim(self: Rendezvous) -> None:
        original(self)
        self._stop.set()  # no heartbeat any more
        if renames == "later":
            time.sleep(3 * LIMIT_S + 2)

    def announce(self: Rendezvous, name: str, error: BaseException | None) -> None:
        time.sleep(2 * LIMIT_S)

    if rank == 0:
        Rendezvous.claim = claim  # type: ignore[method-assign]
        Rendezvous.announce = announce  # type: ignore[method-assign]
    with silence_of(LIMIT_S):
        result = told(lambda: mp.save(run / "checkpoint-1", state, step=1))
    dist.barrier()
    return result


@pytest.mark.parametrize(("renames", "raised"), [("before", None), ("later", "unknown")])
def test_a_rank_that_is_not_told_the_outcome_looks_for_it_on_disk(
    tmp_path: Path, renames: str, raised: str | None
) -> None:
    _, (message, seconds) = run_world(2, fall_silent_after_the_claim, tmp_path, renames)
    if raised is None:
        assert message == "nothing"
    else:
        assert message.startswith(f"{SaveOutcomeUnknownError.__name__}: ")
        assert "list the run before going on" in message
    assert seconds < 45
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1]
