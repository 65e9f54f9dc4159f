"""What a task is: data, a model's head, and the loss of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from milepost_trainer.batches import Batch, GlobalBatches
from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import Head, ParallelModel, next_tokens
from milepost_trainer.samples import NO_LOSS, Samples

Splits = Mapping[str, GlobalBatches]
"""The data of a run: `train`, and `eval` if it has some."""


class Task(ABC):
    """One kind of training. All calls are collective: every rank makes them with its own rows."""

    head: ClassVar[Head] = Head.LANGUAGE_MODEL
    needs_pad: ClassVar[bool] = False
    """Whether those who use the model pad its rows, so that its tokenizer must know how."""

    def __init__(self, config: TrainerConfig, model: ParallelModel, tokenizer: Any) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer

    @staticmethod
    @abstractmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        """All samples of files. `ConfigError` names the line that cannot be used."""

    @abstractmethod
    def train_step(self, batch: Batch) -> dict[str, float]:
        """Forward and backward of one global batch, of which `batch` is this rank's part.

        Returns `loss`, the mean over the global batch, and what else is worth a line in the log;
        the same on every rank.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """The same numbers without dropout and gradients."""

    # ---- what a checkpoint has of a task beside its model

    def prepare(self, splits: Splits, checkpoint: Path | None) -> list[str]:
        """What is left to do after a resume from `checkpoint`, or in a fresh run, which has none;
        lines for the log."""
        return []

    def state(self) -> dict[str, Any]:
        """Further entries of the state to save and to fill."""
        return {}

    def documents(self) -> dict[str, Any]:
        """Further files that a resume wants of a checkpoint, by name."""
        return {}

    def model_files(self) -> dict[str, bytes]:
        """Further files that others need to use the model, by name."""
        return {}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the global batch, from this data rank's part of its sum and of its count."""

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`loss` is a scalar with gradients, this data rank's part of the mean over the global batch:
    the parts of all data ranks add up to it."""

    loss: torch.Tensor
    metrics: Mapping[str, Mean] = field(default_factory=dict)


class LossTask(Task):
    """A task that says what its loss is; gradients and sums over ranks are done here."""

    @abstractmethod
    def outcome(self, batch: Batch) -> Outcome:
        """Forward of this rank's rows."""

    def train_step(self, batch: Batch) -> dict[str, float]:
        outcome = self.outcome(batch)
        (outcome.loss * self.model.averaged_over).backward()  # type: ignore[no-untyped-call]
        return self._over_all_ranks(outcome)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        with self.model.evaluating():
            return self._over_all_ranks(self.outcome(batch))

    def global_rows(self, batch: Batch) -> int:
        """Samples of the global batch."""
        return len(batch["input_ids"]) * self.model.data_world

    def _over_all_ranks(self, outcome: Outcome) -> dict[str, float]:
        names = list(outcome.metrics)
        parts = [outcome.loss.detach().double()]
        for mean in outcome.metrics.values():
            parts += [
                mean.total.detach().double().to(outcome.loss.device),
                torch.as_tensor(mean.count, dtype=torch.float64, device=outcome.loss.device),
            ]
        sums = self.model.sum_over_data(torch.stack(parts)).tolist()
        found = {"loss": sums[0]}
        for number, name in enumerate(names):
            total, count = sums[1 + 2 * number : 3 + 2 * number]
            if count:
                found[name] = total / count
        return found


def token_logps(model: ParallelModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of what each column of this rank predicts, 0 where that has no label.

    `(rows, length)` to float32 `(rows, columns)`.
    """
    targets = model.columns(next_tokens(labels))
    logits = model.outputs(model.columns(ids)).flatten(0, 1).float()
    losses = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=NO_LOSS, reduction="none"
    )
    return -losses.view_as(targets)


def row_logps(model: ParallelModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of all that has a label in each row: `(rows, length)` to `(rows,)`."""
    return model.sum_over_context(token_logps(model, ids, labels).sum(dim=-1))
