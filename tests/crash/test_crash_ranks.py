"""A fault at every file operation of every rank of a sharded save, synchronous and asynchronous."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from milepost.errors import CheckpointError
from milepost.layouts.run import list_run
from milepost.testing.faults import Ending, Fault
from milepost.testing.ranks import RankFaultPlan
from milepost.testing.world_matrix import RankAction, WorldAttempt, WorldCrashMatrix
from tests.crash.conftest import DISKS, tell_points
from tests.crash.sharded import EVERY_RANK_WRITES, committed, load, save, save_behind

BEFORE, AFTER = {1: 1.0}, {1: 1.0, 2: 2.0}
PROCESSES = 12
LOST_TOUCH = {"RankError", "RankTimeoutError", "SaveOutcomeUnknownError"}


def first(rank: int, world_size: int, root: Path) -> None:
    save(root, 1, 1.0)


def second(rank: int, world_size: int, root: Path) -> None:
    save(root, 2, 2.0)


def second_behind(rank: int, world_size: int, root: Path) -> None:
    save_behind(root, 2, 2.0)


ACTIONS: dict[str, RankAction] = {"save": second, "save_async": second_behind}


def matrix_of(action: RankAction, world_size: int, scratch: Path) -> WorldCrashMatrix:
    return WorldCrashMatrix(
        first,
        action,
        world_size=world_size,
        scratch=scratch,
        limit_s=2 + world_size,
        environment=EVERY_RANK_WRITES,
    )


# ---- what must hold at every point


def check_endings(attempt: WorldAttempt, found: dict[int, float]) -> None:
    """All ranks end alike, and say what is so."""
    fault, outcomes = attempt.plan.fault, attempt.outcomes
    assert found in (BEFORE, AFTER)
    assert attempt.struck.struck
    assert all(one.ending is not Ending.HUNG for one in outcomes)
    if fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
        assert all(one.ending is Ending.FINISHED for one in outcomes)
    survivors = attempt.survivors
    endings = {one.ending for one in survivors}
    errors = {one.error for one in survivors}
    if fault.kills:
        assert attempt.struck.ending is Ending.KILLED
        assert errors <= LOST_TOUCH | {None}
    else:
        assert len({one.message for one in survivors}) == 1
    if attempt.plan.rank != 0:  # else some may not know yet how far rank 0 had come
        assert len(errors) <= 1
    assert len(endings) <= 1
    if Ending.FINISHED in endings:
        assert found == AFTER
    elif survivors and not fault.kills:
        check_error(attempt, found)


def check_error(attempt: WorldAttempt, found: dict[int, float]) -> None:
    outcome = attempt.struck
    assert "StorageError" in outcome.classes
    if len(attempt.outcomes) > 1:
        assert outcome.message.startswith(f"rank {attempt.plan.rank}: ")
    if "untouched" not in outcome.message:
        return
    assert found == BEFORE
    if attempt.plan.fault in (Fault.ENOSPC, Fault.EDQUOT):
        assert outcome.error == "NoSpaceError"
    if attempt.plan.fault is not Fault.READ_ONLY:
        assert leftovers(attempt.root) == set()


def leftovers(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.startswith(".")} - {".milepost.lock"}


def check_next_save(root: Path, found: dict[int, float]) -> None:
    save(root, 50, 5.0)
    assert committed(root) == found | {50: 5.0}
    assert leftovers(root) == set() and list_run(root).torn == ()


def check(attempt: WorldAttempt) -> None:
    found = committed(attempt.root)
    listing = list_run(attempt.root)
    assert listing.newest is not None and listing.newest.step == max(found)
    assert listing.torn == ()
    check_endings(attempt, found)
    check_next_save(attempt.root, found)


# ---- what is tried


def explore(
    request: pytest.FixtureRequest,
    matrix: WorldCrashMatrix,
    chosen: list[RankFaultPlan],
    check: Callable[[WorldAttempt], None] = check,
) -> None:
    lost = []
    for attempt in matrix.attempts(chosen, at_once=PROCESSES // (matrix.world_size + 1)):
        try:
            check(attempt)
        except (AssertionError, CheckpointError, OSError) as error:
            lost.append(f"{attempt}\n  {type(error).__name__}: {error}")
    assert not lost, f"{len(lost)} of {len(chosen)} points:\n" + "\n".join(lost[:8])
    tried = [(plan.rank, matrix.operations[plan.rank], plan) for plan in chosen]
    tell_points(request, matrix.world_size, tried)


def one_of_each_kind(matrix: WorldCrashMatrix, faults: Iterable[Fault]) -> list[RankFaultPlan]:
    """Every kind of operation once for each rank, now the first of its kind, now the last."""
    wanted, chosen = list(faults), []
    for rank, operations in enumerate(matrix.operations):
        kinds: dict[str, list[int]] = {}
        for number, one in enumerate(operations):
            kinds.setdefault(one.name, []).append(number)
        for count, numbers in enumerate(kinds.values()):
            fault = wanted[(count + rank) % len(wanted)]
            chosen.append(RankFaultPlan(rank, numbers[-(count % 2)], fault))
    return chosen


@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.parametrize("name", ACTIONS)
def test_a_rank_that_fails_or_dies_at_any_kind_of_operation_costs_no_checkpoint(
    name: str, scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(ACTIONS[name], 2, scratch)
    kinds = [Fault.KILL_BEFORE, Fault.EIO, Fault.KILL_AFTER, Fault.ENOSPC, Fault.READ_ONLY]
    explore(request, matrix, one_of_each_kind(matrix, kinds))


EXHAUSTIVE = [Fault.KILL_BEFORE, Fault.EIO]
SAMPLED = [fault for fault in Fault if fault not in EXHAUSTIVE]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.parametrize("name", ACTIONS)
def test_two_ranks_lose_nothing_at_any_operation_of_either(
    name: str, scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(ACTIONS[name], 2, scratch)
    others = matrix.plans(SAMPLED)
    sample = random.Random(2).sample(others, min(60, len(others)))
    explore(request, matrix, matrix.plans(EXHAUSTIVE) + sample)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", ACTIONS)
def test_one_rank_and_four_lose_nothing_either(
    name: str, world_size: int, scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(ACTIONS[name], world_size, scratch)
    plans = matrix.plans(Fault)
    explore(request, matrix, random.Random(world_size).sample(plans, min(60, len(plans))))


def test_ranks_go_on_after_a_fault_that_all_survive(scratch: Path) -> None:
    """The same processes save again, on the same store and with a new group of the exchange."""

    def fail_and_go_on(rank: int, world_size: int, root: Path) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
            save(root, 2, 2.0)
        save_behind(root, 3, 3.0)
        save(root, 4, 4.0)
        load(root / "checkpoint-4", 4.0)

    matrix = matrix_of(second, 2, scratch)
    plans = matrix.plans([Fault.EIO], ranks=[1])
    matrix.action = fail_and_go_on
    for attempt in matrix.attempts(plans, at_once=2):
        assert all(one.ending is Ending.FINISHED for one in attempt.outcomes), attempt
        assert committed(attempt.root) == BEFORE | {3: 3.0, 4: 4.0}


# ---- power cuts


@pytest.fixture(params=["some", pytest.param("rest", marks=pytest.mark.slow)])
def samples(request: pytest.FixtureRequest) -> int:
    return 1 if request.param == "some" else 12


@pytest.mark.case("V17")
@pytest.mark.parametrize("name", ACTIONS)
def test_a_power_cut_while_two_ranks_write_costs_no_checkpoint(
    name: str, samples: int, scratch: Path, request: pytest.FixtureRequest
) -> None:
    matrix = matrix_of(ACTIONS[name], 2, scratch)
    assert all(len(operations) > 3 for operations in matrix.operations), "both ranks write"
    count = 0
    for loss, root in matrix.power_losses(samples=samples, seed=samples):
        found = committed(root)
        assert found == AFTER or (found == BEFORE and not loss.finished), (str(loss), found)
        check_next_save(root, found)
        count += 1
    request.node.user_properties.append((DISKS, count))


# ---- the harness itself


def raise_on_rank_1(rank: int, world_size: int, root: Path) -> None:
    if rank == 1:
        raise ValueError("on purpose")


def test_a_rank_that_fails_while_it_is_recorded_is_named(scratch: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"ranks finished\nrank 1: (.|\n)*purpose"):
        matrix_of(raise_on_rank_1, 2, scratch).plans([Fault.EIO])


def test_ranks_that_do_not_end_are_ended_and_said_to_hang(scratch: Path) -> None:
    matrix = matrix_of(second, 2, scratch)
    plan = matrix.plans([Fault.EIO], ranks=[1])[0]
    matrix.action = _sleep
    matrix.timeout_s = 1.0
    (attempt,) = matrix.attempts([plan])
    assert [one.ending for one in attempt.outcomes] == [Ending.FINISHED, Ending.HUNG]


def _sleep(rank: int, world_size: int, root: Path) -> None:
    if rank == 1:
        signal.pause()
