"""`reward`: a scalar head that ranks two answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import Head, ParallelModel
from milepost_trainer.samples import Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import LossTask, Mean, Outcome


class Reward(LossTask):
    """Bradley-Terry loss of the scores of both answers.

    The score of a row is that of its last token that is not padding, as transformers' sequence
    classifiers pick it; the model's config says which token that is.
    """

    head = Head.SCORE
    needs_pad = True

    def __init__(self, config: TrainerConfig, model: ParallelModel, tokenizer: Any) -> None:
        super().__init__(config, model, tokenizer)
        self._pad = tokenizer.pad_token_id
        for saved in model.configs:
            saved.pad_token_id = self._pad

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.reward_samples(files, tokenizer, config.max_seq_length)

    def outcome(self, batch: Batch) -> Outcome:
        ids = batch["input_ids"].flatten(0, 1)
        numbers = torch.arange(ids.shape[1])
        last = (numbers * (ids != self._pad)).argmax(dim=-1)
        picked = self.model.columns((numbers == last[:, None]).float())
        scores = self.model.outputs(self.model.columns(ids)).float()
        pairs = self.model.sum_over_context((scores * picked).sum(dim=-1)).view(-1, 2)
        chosen, rejected = pairs.detach().unbind(1)
        return Outcome(
            losses.bradley_terry(pairs).sum() / self.global_rows(batch),
            {
                "accuracy": Mean((chosen > rejected).float().sum(), len(pairs)),
                "margin": Mean((chosen - rejected).sum(), len(pairs)),
            },
        )
