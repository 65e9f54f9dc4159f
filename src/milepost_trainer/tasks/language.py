"""Language modelling: `pretrain` on all tokens, `sft` on answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.samples import Packing, Samples, read_samples
from milepost_trainer.tasks.base import Task


class LanguageModelling(Task):
    """The mean negative log-likelihood of all tokens of the global batch that have a label."""

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        packing = Packing.ON if config.packing else Packing.OFF
        return read_samples(config.task, files, tokenizer, config.max_seq_length, packing)

    def train_step(self, batch: Batch) -> dict[str, float]:
        return {"loss": self.model.train_step(batch)}

    def evaluate(self, batch: Batch) -> dict[str, float]:
        return {"loss": self.model.evaluate(batch)}
