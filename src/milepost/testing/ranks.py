"""A world of forked gloo ranks on this host, for actions that several ranks make together.

Every rank is a fork of this process, so a world begins in a few hundredths of a second; rank 0
holds a TCP store, as it does under torchrun. Modules that the action needs should be imported, and
torch should use one thread, before a world begins.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, NoReturn, TypeAlias

from milepost.testing.faults import Ending, Fault, FaultPlan, Operation, Outcome, record
from milepost.testing.forked import Striker, fork, outcome_of

Together: TypeAlias = Callable[[int, int], object]
"""What every rank does: called with its rank and the number of ranks."""

_HOST = "127.0.0.1"
_STORE_LIMIT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class RankFaultPlan:
    """A fault at the operation `nth` of one rank, counted from 0 as in the record of that rank."""

    rank: int
    nth: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault.value} at operation {self.nth} of rank {self.rank}"


class _Report(NamedTuple):
    """What a rank sends: how it ended, what it did when that was recorded, or why it could not."""

    outcome: Outcome
    operations: Sequence[Operation] = ()
    trace: str = ""


class World:
    """Ranks under way. `outcomes` waits for all of them; `close` ends what is left."""

    def __init__(
        self,
        job: Callable[[int, int], _Report],
        world_size: int,
        *,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._pids: list[int] = []
        self._pipes: list[tuple[int, int]] = []
        listening = socket.socket()
        with listening:
            listening.bind((_HOST, 0))
            listening.listen(2 * world_size)
            for rank in range(world_size):
                self._start(job, rank, world_size, listening, environment)

    def _start(
        self,
        job: Callable[[int, int], _Report],
        rank: int,
        world_size: int,
        listening: socket.socket,
        environment: Mapping[str, str],
    ) -> None:
        (told, telling), (parting, dismissing) = os.pipe(), os.pipe()
        pid = fork()
        if pid == 0:
            os.environ.update(environment)
            _be_a_rank(job, rank, world_size, listening, telling, parting)
        os.close(telling)
        os.close(parting)
        self._pids.append(pid)
        self._pipes.append((told, dismissing))

    def reports(self) -> list[_Report | int]:
        """Of each rank its report, or the wait status that it ended with instead.

        No rank leaves before all have reported or died: the store lives with rank 0.
        """
        raw = {told: b"" for told, _ in self._pipes}
        still = set(raw)
        while still:
            ready, _, _ = select.select(still, [], [], max(0.0, self._end_s - time.monotonic()))
            if not ready:
                break
            for told in ready:
                data = os.read(told, 2**20)
                raw[told] += data
                if not data:
                    still.discard(told)
        statuses = self._dismissed([told in still for told, _ in self._pipes])
        return [
            pickle.loads(raw[told]) if raw[told] and told not in still else status
            for (told, _), status in zip(self._pipes, statuses, strict=True)
        ]

    def _dismissed(self, hangs: Sequence[bool]) -> list[int]:
        """Let the ranks go, end those that hang; the wait status of each, -1 for those."""
        statuses = []
        for pid, (_, dismissing), is_hung in zip(self._pids, self._pipes, hangs, strict=True):
            if is_hung:
                os.kill(pid, signal.SIGKILL)
            with suppress(BrokenPipeError):  # it is dead
                os.write(dismissing, b"!")
            os.close(dismissing)
        for pid, (told, _), is_hung in zip(self._pids, self._pipes, hangs, strict=True):
            _, status = os.waitpid(pid, 0)
            os.close(told)
            statuses.append(-1 if is_hung else status)
        self._pids.clear()
        return statuses

    def close(self) -> None:
        """End all ranks that were not waited for."""
        if self._pids:
            self._dismissed([True] * len(self._pids))


def _be_a_rank(
    job: Callable[[int, int], _Report],
    rank: int,
    world_size: int,
    listening: socket.socket,
    telling: int,
    parting: int,
) -> NoReturn:
    try:
        try:
            _join(rank, world_size, listening)
            report = job(rank, world_size)
        except BaseException:  # noqa: BLE001 - the parent raises it
            report = _Report(Outcome(ending=Ending.RAISED), trace=traceback.format_exc())
        with open(telling, "wb") as pipe:
            pickle.dump(report, pipe)
        os.read(parting, 1)
    finally:
        os._exit(0)


def _join(rank: int, world_size: int, listening: socket.socket) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    port = listening.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    own = listening.detach()
    if rank != 0:
        os.close(own)
    store = TCPStore(
        _HOST,
        port,
        world_size,
        rank == 0,
        _STORE_LIMIT,
        wait_for_workers=False,
        master_listen_fd=own if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    store.set(f"here/{rank}", "1")  # on a busy machine a rank may begin seconds after another
    store.wait([f"here/{other}" for other in range(world_size)], _STORE_LIMIT)


def struck_job(
    action: Together, plan: RankFaultPlan, slow_s: float
) -> Callable[[int, int], _Report]:
    """The action, with a fault at one operation of one rank."""

    def job(rank: int, world_size: int) -> _Report:
        nth = plan.nth if rank == plan.rank else NEVER
        striker = Striker(FaultPlan(nth, plan.fault), slow_s=slow_s)
        return _Report(outcome_of(lambda: action(rank, world_size), striker))

    return job


NEVER = 2**62


def record_ranks(
    action: Together,
    world_size: int,
    *,
    environment: Mapping[str, str] = {},
    timeout_s: float = 120.0,
) -> list[list[Operation]]:
    """Run `action` on new ranks, and return what each did to the file system, in order.

    `ChildProcessError` when one of them does not finish.
    """

    def job(rank: int, world_size: int) -> _Report:
        operations = record(lambda: action(rank, world_size))
        return _Report(Outcome(ending=Ending.FINISHED), operations)

    world = World(job, world_size, environment=environment, timeout_s=timeout_s)
    reports = world.reports()
    found = [list(one.operations) for one in reports if not isinstance(one, int)]
    troubles = [
        f"rank {rank}: wait status {one}" if isinstance(one, int) else f"rank {rank}: {one.trace}"
        for rank, one in enumerate(reports)
        if isinstance(one, int) or one.trace
    ]
    if troubles:
        raise ChildProcessError("\n".join([f"not all of {world_size} ranks finished", *troubles]))
    return found


def outcomes_of(world: World, plan: RankFaultPlan) -> list[Outcome]:
    """How each rank ended; `ChildProcessError` for one that ended as nobody asked it to."""
    found: list[Outcome] = []
    for rank, report in enumerate(world.reports()):
        if not isinstance(report, int):
            if report.trace:
                raise ChildProcessError(f"{plan}: rank {rank} did not begin: {report.trace}")
            found.append(report.outcome)
        elif report < 0:
            found.append(Outcome(ending=Ending.HUNG))
        elif rank == plan.rank and plan.fault.kills and _is_killed(report):
            found.append(Outcome(ending=Ending.KILLED))
        else:
            raise ChildProcessError(f"{plan}: rank {rank} ended with wait status {report}")
    return found


def _is_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
