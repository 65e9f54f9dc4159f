"""Global batches and their cursor: one count of samples, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from milepost_trainer.config import ConfigError
from milepost_trainer.samples import Samples

Batch: TypeAlias = dict[str, torch.Tensor]
"""Rows of samples: `input_ids`, `labels`, and what else a task's samples have."""


class GlobalBatches:
    """An endless stream of samples, shuffled anew each epoch, cut into global batches.

    Sample number n of the stream is row `order(n // rows)[n % rows]`. A data rank takes its slice
    of each global batch, so the stream does not depend on how many there are, and the position is
    one number: after a resume at another width or batch size no sample comes twice or is left out.
    """

    def __init__(
        self, samples: Samples, *, batch_size: int, seed: int, data_rank: int, data_world: int
    ) -> None:
        self.samples, self.seed = samples, seed
        self.batch_size = batch_size
        share = batch_size // data_world
        self._slice = range(data_rank * share, (data_rank + 1) * share)
        self._digest = samples.digest()
        self._saved_digest = self._digest
        self._orders: dict[int, torch.Tensor] = {}
        self.consumed = 0

    @property
    def epoch(self) -> float:
        """How often the data was seen."""
        return self.consumed / len(self.samples)

    def next(self) -> Batch:
        """This rank's rows of the next global batch."""
        rows = [self._row(self.consumed + place) for place in self._slice]
        self.consumed += self.batch_size
        return self._taken(rows)

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        """This rank's rows of each global batch of one pass in order, and how many samples that
        batch has: the last one is filled up with the last sample."""
        last = len(self.samples) - 1
        for begin in range(0, last + 1, self.batch_size):
            rows = [min(begin + place, last) for place in self._slice]
            yield self._taken(rows), min(self.batch_size, last + 1 - begin)

    def _taken(self, rows: list[int]) -> Batch:
        return {name: tensor[rows] for name, tensor in self.samples.columns().items()}

    def _row(self, number: int) -> int:
        epoch, place = divmod(number, len(self.samples))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.samples), generator=generator)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return int(self._orders[epoch][place])

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "seed": self.seed, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed, self.seed = state["consumed"], state["seed"]
        self._saved_digest = state["digest"]
        self._orders = {}

    def check(self) -> None:
        """`ConfigError` when the loaded position is one in other data."""
        if self._saved_digest != self._digest:
            raise ConfigError(
                "train_files, max_seq_length or the tokenizer give other samples than those that "
                f"the checkpoint has read {self.consumed} of; resume with the data of the run, or "
                "start a new one from the checkpoint by model_name_or_path"
            )
