"""Tasks that train a sequence classifier: a linear head on the last token of a text."""

from __future__ import annotations

from typing import Any

import torch

from milepost_trainer.config import TrainerConfig
from milepost_trainer.parallel import Head, ParallelModel
from milepost_trainer.tasks.base import LossTask


class ScoreTask(LossTask):
    """A task whose loss is one of scores of whole texts.

    The scores of a text are those of its last token that is not padding, as transformers' sequence
    classifiers pick it; the model's config says which token that is.
    """

    head = Head.SCORE
    needs_pad = True

    def __init__(self, config: TrainerConfig, model: ParallelModel, tokenizer: Any) -> None:
        super().__init__(config, model, tokenizer)
        self._pad = tokenizer.pad_token_id
        for saved in model.configs:
            saved.pad_token_id = self._pad

    def scores(self, ids: torch.Tensor) -> torch.Tensor:
        """Of this rank's rows, `(rows, length)` to float32 `(rows, labels)`. Collective."""
        numbers = torch.arange(ids.shape[1])
        last = (numbers * (ids != self._pad)).argmax(dim=-1)
        picked = self.model.columns((numbers == last[:, None]).float())
        every = self.model.outputs(self.model.columns(ids)).float()
        return self.model.sum_over_context((every * picked[..., None]).sum(dim=1))
