"""Learning from preferences with a frozen reference: `dpo` on pairs, `kto` on single answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import ParallelModel
from milepost_trainer.samples import Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import Mean, Outcome, row_logps
from milepost_trainer.tasks.reference import ReferenceTask


class Dpo(ReferenceTask):
    """Direct preference optimization. Both answers of a pair are rows of the same data rank."""

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.dpo_samples(files, tokenizer, config.max_seq_length)

    def score(self, model: ParallelModel, batch: Batch) -> torch.Tensor:
        """(pairs, 2): log-probabilities of the chosen and the rejected answer."""
        return _logps_of_pairs(model, batch)

    def outcome(self, batch: Batch) -> Outcome:
        reference = self.reference.scores(batch)
        policy = _logps_of_pairs(self.model, batch)
        beta = self.config.beta_or_default
        found = losses.dpo(
            policy, reference, beta=beta, label_smoothing=self.config.label_smoothing
        )
        rewards = beta * (policy - reference).detach()
        chosen, rejected = rewards.unbind(1)
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
        }
        return Outcome(
            found.sum() / self.global_rows(batch),
            {name: Mean(value.sum(), len(value)) for name, value in values.items()},
        )


class Kto(ReferenceTask):
    """Kahneman-Tversky optimization.

    The baseline is the mean over the global batch of the log-ratio of foreign completions, at least
    0, without gradient and dropout.
    """

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.kto_samples(files, tokenizer, config.max_seq_length)

    def score(self, model: ParallelModel, batch: Batch) -> torch.Tensor:
        """(rows, 2): log-probabilities of the own and of the foreign completion."""
        return _logps_of_pairs(model, batch)

    def outcome(self, batch: Batch) -> Outcome:
        config, count = self.config, self.global_rows(batch)
        reference, foreign = self.reference.scores(batch).unbind(1)
        with self.model.evaluating():
            apart = row_logps(self.model, *_half(batch, 1)) - foreign
        baseline = (self.model.sum_over_data(apart.sum()) / count).clamp(min=0).float()
        ratios = row_logps(self.model, *_half(batch, 0)) - reference
        desirable = batch["desirable"].to(ratios.device)
        found = losses.kto(
            ratios,
            desirable,
            baseline,
            beta=config.beta_or_default,
            weights=(config.desirable_weight, config.undesirable_weight),
        )
        rewards = config.beta_or_default * ratios.detach()
        return Outcome(
            found.sum() / count,
            {
                "rewards/chosen": Mean(rewards[desirable].sum(), desirable.sum()),
                "rewards/rejected": Mean(rewards[~desirable].sum(), (~desirable).sum()),
                "kl": Mean(baseline, 1.0),
            },
        )


def _logps_of_pairs(model: ParallelModel, batch: Batch) -> torch.Tensor:
    flat = (batch[key].flatten(0, 1) for key in ("input_ids", "labels"))
    return row_logps(model, *flat).view(-1, 2)


def _half(batch: Batch, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["input_ids"][:, which], batch["labels"][:, which]
