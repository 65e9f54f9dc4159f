"""An action tried with every fault at every one of its file operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from milepost.storage.fileops import PathLike
from milepost.testing.disk import DirectoryTree
from milepost.testing.faults import (
    Fault,
    FaultPlan,
    Operation,
    Outcome,
    plans,
    record,
)
from milepost.testing.forked import run_with_fault
from milepost.testing.power import PowerLoss, power_loss_states, tree_after

Place: TypeAlias = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try: the fault, the operation that it hit, how the action ended, and the directory."""

    plan: FaultPlan
    operation: Operation
    outcome: Outcome
    root: Path

    def __str__(self) -> str:
        return f"{self.plan} ({self.operation.name} {self.operation.target}): {self.outcome}"


class CrashMatrix:
    """`action(root)`, tried in copies of a directory that `prepare(root)` made once.

        matrix = CrashMatrix(prepare, action, scratch=tmp_path)
        for attempt in matrix.attempts(matrix.plans(Fault)):
            assert what_was_committed_is_intact(attempt.root)

    `scratch` is an empty directory for the copies; a memory file system is faster than a disk.
    """

    def __init__(self, prepare: Place, action: Place, *, scratch: PathLike) -> None:
        self.action = action
        self.scratch = Path(scratch).absolute()
        self._recorded = self.scratch / "recorded"
        self._recorded.mkdir(parents=True)
        prepare(self._recorded)
        self.before = DirectoryTree.of(self._recorded)
        shutil.rmtree(self._recorded)

    @cached_property
    def operations(self) -> Sequence[Operation]:
        """What the action does when nothing goes wrong."""
        return self._record(self.before, self.action)

    def recovered(self, nth: int, recovery: Place) -> Sequence[Operation]:
        """The operations of an action killed before its `nth`, and of `recovery(root)` after it."""
        first = self.operations[:nth]
        return [*first, *self._record(tree_after(first, self.before), recovery)]

    def _record(self, tree: DirectoryTree, action: Place) -> Sequence[Operation]:
        tree.write_to(self._recorded)
        operations = record(partial(action, self._recorded))
        shutil.rmtree(self._recorded)
        return operations

    def plans(self, faults: Iterable[Fault]) -> list[FaultPlan]:
        """Each fault at each operation that it can meet."""
        return plans(self.operations, faults)

    def attempts(self, chosen: Iterable[FaultPlan]) -> Iterator[Attempt]:
        """Try them one after another; each directory is removed when the next one is asked for."""
        for plan in chosen:
            root = self.scratch / f"{plan.fault.name.lower()}-{plan.nth}"
            self.before.write_to(root)
            outcome = run_with_fault(partial(self.action, root), plan)
            yield Attempt(
                plan=plan, operation=self.operations[plan.nth], outcome=outcome, root=root
            )
            shutil.rmtree(root)

    def power_losses(
        self,
        operations: Sequence[Operation] | None = None,
        *,
        first: int = 0,
        samples: int = 2,
        seed: int = 0,
    ) -> Iterator[tuple[PowerLoss, Path]]:
        """Disks after a power cut during the action, or during these operations, each written out.

        See `power_loss_states`. Each directory is removed when the next one is asked for.
        """
        recorded = self.operations if operations is None else operations
        yield from disks_after(
            recorded, self.before, self.scratch, first=first, samples=samples, seed=seed
        )


def disks_after(
    operations: Sequence[Operation],
    before: DirectoryTree,
    scratch: Path,
    *,
    first: int = 0,
    samples: int = 2,
    seed: int = 0,
) -> Iterator[tuple[PowerLoss, Path]]:
    """Each state of `power_loss_states`, written out in `scratch` until the next is asked for."""
    for loss in power_loss_states(operations, before, first=first, samples=samples, seed=seed):
        root = scratch / "after-a-power-cut"
        loss.tree.write_to(root)
        yield loss, root
        shutil.rmtree(root)
