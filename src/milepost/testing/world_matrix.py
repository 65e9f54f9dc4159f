"""An action of several ranks, tried with every fault at every file operation of each rank."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from milepost.storage.fileops import PathLike
from milepost.testing.disk import DirectoryTree
from milepost.testing.faults import Ending, Fault, Operation, Outcome, plans
from milepost.testing.matrix import disks_after
from milepost.testing.power import PowerLoss
from milepost.testing.ranks import (
    RankFaultPlan,
    Together,
    World,
    outcomes_of,
    record_ranks,
    struck_job,
)

RankAction: TypeAlias = Callable[[int, int, Path], object]
"""Called on every rank as `action(rank, world_size, root)`."""

_LIMIT_S = 4
_PATIENT = {"MILEPOST_RANK_TIMEOUT_S": "60"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldAttempt:
    """One try: the fault, the operation that it hit, how each rank ended, and the directory."""

    plan: RankFaultPlan
    operation: Operation
    outcomes: tuple[Outcome, ...]
    root: Path

    @property
    def struck(self) -> Outcome:
        """How the rank ended that the fault hit."""
        return self.outcomes[self.plan.rank]

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        """How the ranks ended that were not killed."""
        return tuple(one for one in self.outcomes if one.ending is not Ending.KILLED)

    def __str__(self) -> str:
        ends = "; ".join(f"rank {rank} {one}" for rank, one in enumerate(self.outcomes))
        return f"{self.plan} ({self.operation.name} {self.operation.target}): {ends}"


class WorldCrashMatrix:
    """`action(rank, world_size, root)` on forked gloo ranks, in copies of a directory that
    `prepare`, called the same way, made once.

        matrix = WorldCrashMatrix(prepare, action, world_size=2, scratch=tmp_path)
        for attempt in matrix.attempts(matrix.plans(Fault)):
            assert what_was_committed_is_intact(attempt.root), attempt

    Where one rank is killed, or its disk is slow, the others wait `limit_s` for a silent one
    (`MILEPOST_RANK_TIMEOUT_S`); a slow disk takes a second longer. A rank that has not ended after
    `timeout_s` is ended and `HUNG`. `environment` are variables of the ranks. `scratch` is an empty
    directory for the copies.
    """

    def __init__(
        self,
        prepare: RankAction,
        action: RankAction,
        *,
        world_size: int,
        scratch: PathLike,
        limit_s: int = _LIMIT_S,
        timeout_s: float = 90.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.action, self.world_size = action, world_size
        self.scratch = Path(scratch).absolute()
        self.limit_s, self.timeout_s = limit_s, timeout_s
        self.environment = {
            "MILEPOST_IO_THREADS": "1",
            "MILEPOST_RANK_TIMEOUT_S": str(limit_s),
            **(environment or {}),
        }
        self._recorded = self.scratch / "recorded"
        self._recorded.mkdir(parents=True)
        self._record(prepare)
        self.before = DirectoryTree.of(self._recorded)
        shutil.rmtree(self._recorded)

    @cached_property
    def operations(self) -> Sequence[Sequence[Operation]]:
        """What each rank does when nothing goes wrong."""
        self.before.write_to(self._recorded)
        operations = self._record(self.action)
        shutil.rmtree(self._recorded)
        return operations

    @property
    def merged(self) -> list[Operation]:
        """What all ranks do, in the order in which it ended."""
        found = [one for operations in self.operations for one in operations]
        return sorted(found, key=lambda one: one.ended_ns)

    def _record(self, action: RankAction) -> list[list[Operation]]:
        return record_ranks(
            _at(action, self._recorded),
            self.world_size,
            environment=self.environment | _PATIENT,
        )

    def plans(
        self, faults: Iterable[Fault], ranks: Iterable[int] | None = None
    ) -> list[RankFaultPlan]:
        """Each fault at each operation that it can meet, of these ranks or of all."""
        wanted = list(faults)
        return [
            RankFaultPlan(rank, plan.nth, plan.fault)
            for rank in (range(self.world_size) if ranks is None else ranks)
            for plan in plans(self.operations[rank], wanted)
        ]

    def attempts(
        self, chosen: Iterable[RankFaultPlan], *, at_once: int = 1
    ) -> Iterator[WorldAttempt]:
        """Try them, `at_once` worlds side by side: to wait for a dead rank takes no processor.

        Each directory is removed when the next attempt is asked for.
        """
        running: deque[tuple[RankFaultPlan, Path, World]] = deque()
        try:
            for plan in chosen:
                running.append(self._started(plan))
                if len(running) == at_once:
                    yield from self._ended(*running.popleft())
            while running:
                yield from self._ended(*running.popleft())
        finally:
            for _, root, world in running:
                world.close()
                shutil.rmtree(root)

    def _started(self, plan: RankFaultPlan) -> tuple[RankFaultPlan, Path, World]:
        root = self.scratch / f"rank-{plan.rank}-{plan.fault.name.lower()}-{plan.nth}"
        self.before.write_to(root)
        environment = self.environment
        if not (plan.fault.kills or plan.fault is Fault.SLOW):  # nobody falls silent
            environment = environment | _PATIENT
        job = struck_job(_at(self.action, root), plan, slow_s=self.limit_s + 1.0)
        world = World(job, self.world_size, environment=environment, timeout_s=self.timeout_s)
        return plan, root, world

    def _ended(self, plan: RankFaultPlan, root: Path, world: World) -> Iterator[WorldAttempt]:
        outcomes = tuple(outcomes_of(world, plan))
        operation = self.operations[plan.rank][plan.nth]
        yield WorldAttempt(plan=plan, operation=operation, outcomes=outcomes, root=root)
        shutil.rmtree(root)

    def power_losses(self, *, samples: int = 2, seed: int = 0) -> Iterator[tuple[PowerLoss, Path]]:
        """Disks after a power cut of the whole host during the action, each written out.

        See `power_loss_states`. Each directory is removed when the next one is asked for.
        """
        yield from disks_after(self.merged, self.before, self.scratch, samples=samples, seed=seed)


def _at(action: RankAction, root: Path) -> Together:
    return lambda rank, world_size: action(rank, world_size, root)
