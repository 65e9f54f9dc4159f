"""Real ranks meet in a real TCP store."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from milepost.engine.rendezvous import MAX_VALUE_NBYTES, Rendezvous, together
from milepost.errors import NoSpaceError, RankError
from tests.worlds import run_outcomes, run_world


def meeting(rank: int, world_size: int, *, limit_s: float = 20.0) -> Rendezvous:
    store: Any = dist.distributed_c10d._get_default_store()
    return Rendezvous(store, rank=rank, world_size=world_size, topic="t", limit_s=limit_s)


def exchange_values(rank: int, world_size: int) -> tuple[list[bytes], bytes]:
    with meeting(rank, world_size) as meet:
        gathered = meet.gather("names", f"rank {rank}".encode() * (rank + 1))
        big = bytes([7]) * (2 * MAX_VALUE_NBYTES + 5)
        told = meet.broadcast("big", big if rank == 0 else None)
        meet.settle("done", None)
        return gathered, told[-3:] + str(len(told)).encode()


def test_values_of_any_size_reach_the_coordinator_and_come_back() -> None:
    results = run_world(3, exchange_values)
    assert results[0][0] == [b"rank 0", b"rank 1" * 2, b"rank 2" * 3]
    assert results[1][0] == []
    assert {told for _, told in results} == {b"\7\7\7" + str(2 * MAX_VALUE_NBYTES + 5).encode()}


def fail_on_rank_two(rank: int, world_size: int) -> str:
    with meeting(rank, world_size) as meet:
        error = NoSpaceError("the disk is full", needed_nbytes=5) if rank == 2 else None
        try:
            meet.settle("write", error)
        except NoSpaceError as own:
            return f"own: {own}"
        except RankError as other:
            return f"{other.rank} {other.failed} {other}"
    return "nothing"


def test_one_failing_rank_fails_all_with_its_message_and_name() -> None:
    others = "2 (2,) rank 2: the disk is full"
    assert run_world(3, fail_on_rank_two) == [others, others, "own: the disk is full"]


def fail_before_the_others_ask(rank: int, world_size: int) -> str:
    with meeting(rank, world_size) as meet:
        try:
            with together(meet, "outer"):
                if rank == 1:
                    raise NoSpaceError("the disk is full")
                meet.gather("inner", b"value")
                meet.broadcast("back", b"told" if rank == 0 else None)
        except (NoSpaceError, RankError) as error:
            return str(error)
    return "nothing"


def test_a_rank_that_fails_early_frees_those_who_wait_for_its_value() -> None:
    start = time.monotonic()
    assert run_world(3, fail_before_the_others_ask) == [
        "rank 1: the disk is full",
        "the disk is full",
        "rank 1: the disk is full",
    ]
    assert time.monotonic() - start < 30


def never_come(rank: int, world_size: int) -> tuple[str, float]:
    start = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with meeting(rank, world_size, limit_s=5.0) as meet:
        try:
            meet.settle("write", None)
        except RankError as error:
            return str(error), time.monotonic() - start
    return "nothing", 0.0


def test_a_rank_that_died_is_named_on_every_other_rank_in_bounded_time() -> None:
    first, dead, third = run_outcomes(3, never_come, deadline_s=30)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in (first, third):
        message, seconds = outcome.value
        assert "rank 1 has shown no sign of life" in message
        assert seconds < 25


def come_late(rank: int, world_size: int) -> str:
    with meeting(rank, world_size, limit_s=6.0) as meet:
        if rank == 1:
            time.sleep(9)  # longer than the limit, but its heartbeat goes on
        meet.settle("write", None)
    return "settled"


def test_a_slow_rank_that_still_lives_is_waited_for() -> None:
    assert run_world(2, come_late) == ["settled", "settled"]
