"""What `save_total_limit` keeps of a run: the newest checkpoints, and the best among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from milepost.manager.retention import Kept


@dataclass(slots=True)
class TotalLimit:
    """Keep `total` checkpoints, the best one counted in; the newest and the best always stay.

    `bests` are the steps that the Trainer took for the best, the latest last. The last of them that
    is committed is the best that there is: a later one may still be on its way to the disk.
    """

    total: int
    bests: list[int] = field(default_factory=list)

    def take_best(self, step: int | None) -> None:
        """Remember that `step` is the best now."""
        if step is not None and [step] != self.bests[-1:]:
            self.bests.append(step)

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        steps = [entry.step for entry in entries]
        kept = set(steps[-1:])
        kept.update([step for step in self.bests if step in steps][-1:])
        for step in reversed(steps):
            if len(kept) >= self.total:
                break
            kept.add(step)
        return kept

    def __str__(self) -> str:
        return f"save_total_limit:{self.total}"
