"""By which number a checkpoint is the best of its run."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import InvalidInputError
from milepost.manager.retention import BestMode, KeepBest


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The metric `name`, of which less is better unless `mode` says otherwise.

    NaN and infinities are never best.
    """

    name: str = "loss"
    mode: BestMode = BestMode.MIN

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidInputError("BestMetric: name the metric, for instance BestMetric('loss')")

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether `value` is strictly better; anything is better than None."""
        if than is None:
            return True
        return value < than if self.mode is BestMode.MIN else value > than

    def as_retention(self) -> KeepBest:
        """Keep the best one."""
        return KeepBest(1, self.name, self.mode)
