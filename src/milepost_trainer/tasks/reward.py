"""`reward`: a scalar head that ranks two answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.samples import Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import Mean, Outcome
from milepost_trainer.tasks.scores import ScoreTask


class Reward(ScoreTask):
    """Bradley-Terry loss of the scores of both answers, by a classifier of one label."""

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.reward_samples(files, tokenizer, config.max_seq_length)

    def outcome(self, batch: Batch) -> Outcome:
        pairs = self.scores(batch["input_ids"].flatten(0, 1)).view(-1, 2)
        chosen, rejected = pairs.detach().unbind(1)
        return Outcome(
            losses.bradley_terry(pairs).sum() / self.global_rows(batch),
            {
                "accuracy": Mean((chosen > rejected).float().sum(), len(pairs)),
                "margin": Mean((chosen - rejected).sum(), len(pairs)),
            },
        )
