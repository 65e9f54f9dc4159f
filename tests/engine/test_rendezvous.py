"""Real ranks meet in a real TCP store."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from milepost.engine.connections import Connections, clone_store
from milepost.engine.rendezvous import (
    MAX_VALUE_NBYTES,
    Rendezvous,
    led,
    together,
)
from milepost.engine.verdicts import _classes, pack_error, shared_error, unpack_error
from milepost.errors import (
    CheckpointError,
    DamagedError,
    KeyMismatchError,
    NoSpaceError,
    RankError,
    RankTimeoutError,
    SaveOutcomeUnknownError,
)
from tests.worlds import run_outcomes, run_world


def meeting(rank: int, world_size: int, *, limit_s: float = 20.0, topic: str = "t") -> Rendezvous:
    store: Any = dist.distributed_c10d._get_default_store()
    return Rendezvous(store, rank=rank, world_size=world_size, topic=topic, limit_s=limit_s)


def exchange_values(rank: int, world_size: int) -> tuple[list[bytes], bytes]:
    with meeting(rank, world_size) as meet:
        gathered = meet.gather("names", f"rank {rank}".encode() * (rank + 1))
        big = bytes([7]) * (2 * MAX_VALUE_NBYTES + 5)
        told = meet.broadcast("big", big if rank == 0 else None)
        for nbytes in (0, 1, MAX_VALUE_NBYTES, MAX_VALUE_NBYTES + 1):
            value = meet.broadcast(f"of {nbytes}", bytes(nbytes) if rank == 0 else None)
            assert value == bytes(nbytes)
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
        except NoSpaceError as raised:
            return f"{raised.rank} {raised.needed_nbytes} {raised.errno} {raised}"
    return "nothing"


def test_one_failing_rank_fails_all_with_one_error() -> None:
    expected = f"2 5 {errno.ENOSPC} rank 2: the disk is full"
    assert run_world(3, fail_on_rank_two) == [expected] * 3


def fail_in_own_ways(rank: int, world_size: int) -> list[str]:
    raised = []
    errors: list[Exception] = [ArithmeticError("no"), OSError(5, "sick mount", "/mnt/a")]
    for number, error in enumerate(errors):
        with meeting(rank, world_size, topic=f"t{number}") as meet:
            try:
                meet.settle("x", error if rank == 1 else None)
            except CheckpointError as found:
                raised.append(f"{type(found).__name__} {found.rank} {found}")
    with meeting(rank, world_size, topic="both") as meet:
        both: list[CheckpointError] = [
            DamagedError("flipped"),
            KeyMismatchError("k", missing=["a"]),
        ]
        try:
            meet.settle("x", both[rank])
        except CheckpointError as found:
            raised.append(f"{type(found).__name__} {found.rank} {found}")
    return raised


def test_errors_of_other_kinds_are_one_error_too() -> None:
    first, second = run_world(2, fail_in_own_ways)
    assert first == second, "even when both ranks fail at once"
    assert first[0] == "RankError 1 rank 1: ArithmeticError: no"
    assert first[1] == "StorageError 1 rank 1: [Errno 5] sick mount: '/mnt/a'"
    assert first[2].split()[0] in ("DamagedError", "KeyMismatchError")


@pytest.mark.parametrize("kind", sorted(_classes(CheckpointError).values(), key=str))
def test_every_class_of_error_survives_the_way(kind: type[CheckpointError]) -> None:
    document = {"class": kind.__name__, "message": "m", "fields": {"rank": 2}, "cause": None}
    found = unpack_error(json.dumps(document))
    assert (type(found), str(found), found.rank) == (kind, "m", 2)


def test_an_error_survives_the_way_to_another_rank() -> None:
    error = KeyMismatchError("no such names", missing=["a", "b"])
    error.__cause__ = DamagedError("a flipped byte", path="x.safetensors")
    found = unpack_error(pack_error(shared_error(error, 3)))
    assert isinstance(found, KeyMismatchError)
    assert (str(found), found.rank, found.missing) == ("rank 3: no such names", 3, ("a", "b"))
    assert isinstance(found.__cause__, DamagedError)
    assert found.__cause__.path == "x.safetensors"
    assert shared_error(error, 4) is error and error.rank == 3, "the rank that began stays named"


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
    assert run_world(3, fail_before_the_others_ask) == ["rank 1: the disk is full"] * 3
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
    first, dead, third = run_outcomes(3, never_come, deadline_s=90)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in (first, third):
        message, seconds = outcome.value
        assert "rank 1 has shown no sign of life" in message
        assert seconds < 25


def connect_to_a_dead_store(rank: int, world_size: int) -> list[str]:
    store: Any = dist.distributed_c10d._get_default_store()
    meet = meeting(rank, world_size)
    told = []
    if rank == 0:
        store.get("connected")  # waits for it
        os.kill(os.getpid(), signal.SIGKILL)
    with meet:
        store.set("connected", b"1")
        with suppress(RuntimeError):
            while True:
                store.check(["anything"])
        for connect in (lambda: clone_store(store), meet.hand_over):
            try:
                connect()
            except RankError as error:
                told.append(str(error))
    return told


def test_a_connection_to_a_store_that_died_meanwhile_is_given_up_at_once() -> None:
    dead, other = run_outcomes(2, connect_to_a_dead_store, deadline_s=90)
    assert dead.exit_code == -signal.SIGKILL
    assert other.value is not None, other.error
    assert len(other.value) == 2, "torch itself tries for half an hour"
    assert all("the store that the ranks meet in is gone" in text for text in other.value)


def talk_often(rank: int, world_size: int) -> int:
    store: Any = dist.distributed_c10d._get_default_store()
    clones = []

    class Counting:
        """The store, counting further connections."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def clone(self) -> Any:
            clones.append(store.clone())
            return clones[-1]

    counting: Any = Counting()
    connections = Connections(counting)
    for number in range(20):
        with Rendezvous(
            counting,
            rank=rank,
            world_size=world_size,
            topic=f"talk-{number}",
            connections=connections,
        ) as meet:
            if number % 2:
                meet.hand_over()
            meet.settle("write", None)
    return len(clones)


def test_conversations_use_the_same_connections_again() -> None:
    # Two, or some more while the resolver lets the first wait for seconds; else there would be 30.
    assert max(run_world(2, talk_often)) <= 10


def come_late(rank: int, world_size: int) -> str:
    with meeting(rank, world_size, limit_s=6.0) as meet:
        if rank == 1:
            time.sleep(9)  # longer than the limit, but its heartbeat goes on
        meet.settle("write", None)
    return "settled"


def test_a_slow_rank_that_still_lives_is_waited_for() -> None:
    assert run_world(2, come_late) == ["settled", "settled"]


def lead(rank: int, world_size: int) -> list[str]:
    told = []
    with meeting(rank, world_size, topic="good") as meet, led(meet, "commit"):
        if rank == 0:
            meet.claim()
            told.append("claimed")
    with meeting(rank, world_size, topic="bad") as meet:
        try:
            with led(meet, "commit"):
                if rank == 0:
                    meet.claim()
                    raise NoSpaceError("no room for the name")
        except NoSpaceError as error:
            told.append(str(error))
    with meeting(rank, world_size, topic="off") as meet:
        if rank == 1:
            with suppress(DamagedError):
                meet.settle("x", DamagedError("off"))
            meet.store.set("told", b"1")
        elif rank == 0:
            meet.store.get("told")  # waits for it
            try:
                meet.claim()
            except DamagedError as error:
                told.append(str(error))
    return told


def test_the_coordinator_claims_the_outcome_once_or_hears_why_not() -> None:
    first, second = run_world(2, lead)
    failed = "rank 0: no room for the name"
    assert first == ["claimed", failed, "rank 1: off"]
    assert second == [failed]


def fall_silent(rank: int, world_size: int, when: str) -> tuple[str, bool]:
    with meeting(rank, world_size) as meet:
        meet.settle("written", None)
        meet.limit_s = 4.0  # for the one wait that it is about
        if rank == 0:
            if when == "after":
                meet.claim()
            time.sleep(0.2)
            meet._stop.set()  # no heartbeat any more
            time.sleep(8)
            return "silent", True
        try:
            meet.announce("commit", None)
        except CheckpointError as error:
            return type(error).__name__, meet.knows_outcome
    return "nothing", True


@pytest.mark.parametrize(
    ("when", "raised"),
    [("before", RankTimeoutError.__name__), ("after", SaveOutcomeUnknownError.__name__)],
)
def test_a_coordinator_that_falls_silent_leaves_a_doubt_only_after_its_claim(
    when: str, raised: str
) -> None:
    _, other = run_world(2, fall_silent, when)
    assert other == (raised, when == "before")
