"""`sdpg`: a policy gradient towards the frozen base, as it answers a prompt that says more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import ParallelModel, next_tokens
from milepost_trainer.samples import NO_LOSS, Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import Mean, Outcome, token_logps
from milepost_trainer.tasks.reference import ReferenceTask


class Sdpg(ReferenceTask):
    """Self-distilled policy gradient, `losses.sdpg`, the mean over completion tokens."""

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.sdpg_samples(files, tokenizer, config.max_seq_length)

    def score(self, model: ParallelModel, batch: Batch) -> torch.Tensor:
        """(samples, 2, length): log-probabilities of each completion token after the policy's
        prompt and after the teacher's, both where the policy's row predicts it."""
        logps = _whole_token_logps(model, batch)
        counted = (next_tokens(batch["labels"].flatten(0, 1)) != NO_LOSS).to(logps.device)
        base, teacher = logps.view(batch["labels"].shape).unbind(1)
        own, taught = counted.view(batch["labels"].shape).unbind(1)
        aligned = torch.zeros_like(base)
        aligned[own] = teacher[taught]  # both rows have the same completion, in the same order
        return torch.stack((base, aligned), dim=1)

    def outcome(self, batch: Batch) -> Outcome:
        ids, labels = batch["input_ids"][:, 0], batch["labels"][:, 0]
        base, teacher = (
            self.model.columns(scores) for scores in self.reference.scores(batch).unbind(1)
        )
        policy = token_logps(self.model, ids, labels)
        counted = self.model.columns(next_tokens(labels)) != NO_LOSS
        loss, advantage, divergence = losses.sdpg(
            policy, teacher, base, beta=self.config.beta_or_default
        )
        sums = torch.stack(
            [
                (advantage * counted).sum(),
                (divergence * counted).sum(),
                counted.sum().to(policy.dtype),
            ]
        )
        sums = self.model.sum_over_context(sums)
        tokens = float(self.model.sum_over_data(sums[2]))
        part = self.model.sum_over_context((loss * counted).sum() / tokens)
        return Outcome(part, {"advantage": Mean(sums[0], sums[2]), "kl": Mean(sums[1], sums[2])})


def _whole_token_logps(model: ParallelModel, batch: Batch) -> torch.Tensor:
    """Of both rows of each sample, with the columns of all ranks that share them."""
    ids, labels = (batch[key].flatten(0, 1) for key in ("input_ids", "labels"))
    part = token_logps(model, ids, labels)
    whole = part.new_zeros(labels.shape)
    begin = model.first_column(labels.shape[1])
    whole[:, begin : begin + part.shape[1]] = part
    return model.sum_over_context(whole)
