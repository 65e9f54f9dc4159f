"""`classification`: a head that says which of several kinds a text is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.functional import cross_entropy

from milepost_trainer.batches import Batch
from milepost_trainer.config import TrainerConfig
from milepost_trainer.samples import Samples
from milepost_trainer.tasks import rows
from milepost_trainer.tasks.base import Mean, Outcome
from milepost_trainer.tasks.scores import ScoreTask


class Classification(ScoreTask):
    """The cross entropy of the classes of texts."""

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        classes = config.num_labels
        assert classes is not None  # the configuration refuses to go without
        return rows.classification_samples(files, tokenizer, config.max_seq_length, classes)

    def outcome(self, batch: Batch) -> Outcome:
        scores = self.scores(batch["input_ids"])
        classes = batch["class"].to(scores.device)
        right = (scores.detach().argmax(dim=-1) == classes).float()
        return Outcome(
            cross_entropy(scores, classes, reduction="sum") / self.global_rows(batch),
            {"accuracy": Mean(right.sum(), len(right))},
        )
