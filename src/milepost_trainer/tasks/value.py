"""`value`: a language model that also says, after each token of an answer, how good it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import Head, next_tokens
from milepost_trainer.samples import NO_LOSS, Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import LossTask, Mean, Outcome


class Value(LossTask):
    """`losses.verifier`: the language model and its value head learn together."""

    head = Head.VALUE

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.value_samples(files, tokenizer, config.max_seq_length)

    def outcome(self, batch: Batch) -> Outcome:
        ids, labels = batch["input_ids"], batch["labels"]
        outputs = self.model.outputs(self.model.columns(ids)).float()
        targets = self.model.columns(next_tokens(labels))
        judged = self.model.columns(labels) != NO_LOSS
        value = batch["value"].to(outputs.device)[:, None]
        surprise, error = losses.verifier(
            outputs[..., :-1], outputs[..., -1], targets, value, judged
        )
        predicted = targets != NO_LOSS
        sums = self.model.sum_over_context(
            torch.stack(
                (surprise.sum(), predicted.sum(), error.sum(), judged.sum()),
            )
        )
        tokens, values = self.model.sum_over_data(sums[1::2]).tolist()
        return Outcome(
            sums[0] / tokens + sums[2] / values,
            {"nll": Mean(sums[0], sums[1]), "value_error": Mean(sums[2], sums[3])},
        )
