"""The calls of a manager that keeps trios, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from milepost.errors import InvalidInputError
from milepost.manager.cadence import Cadence, SaveTurn
from milepost.manager.epochs import EpochRun, Finished
from milepost.manager.trio_load import TrioState


class EpochCalls:
    """The part of `CheckpointManager` for `Layout.TRIO`; see there."""

    _epochs: EpochRun | None
    _cadence: Cadence
    _tenure: Any

    def save_checkpoint(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loss: Any = None,
        extra_state: dict[str, Any] | None = None,
        model_config: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the finished epoch (zero-based) as `latest`, as `best` when it is, and numbered.

        The files are written once and published under all names as one change; when this returns
        they are durable, on every rank. Collective where torch.distributed is initialised: rank 0
        writes whole tensors, sharded ones are refused, and an error of one rank is raised on all.
        A loss that is not finite never becomes best.
        """
        run = self._epoch_run("save_checkpoint", "save")
        with self._saving(epoch + 1):
            run.save(
                TrioState(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler),
                Finished(
                    epoch=epoch,
                    loss=loss,
                    extra_state=extra_state,
                    model_config=model_config,
                    metrics=metrics or {},
                ),
                replace(self._cadence.context(epoch + 1), last_saved_step=None),
            )

    def load_checkpoint(
        self,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        device: torch.device | str | None = None,
        expected_model_config: Any = None,
    ) -> tuple[int, float]:
        """Fill live objects from what `resume` says: (the epoch to begin, the best loss so far).

        (0, inf) for a fresh run. `latest` when it is intact, else the newest that is, with a
        warning; legacy `.pt` files too. All is checked before anything changes:
        `ConfigMismatchError`, `KeyMismatchError`, `ShapeMismatchError` and other `MismatchError`s
        leave everything as it was. Moments follow parameter names. Tensors are filled where they
        are; `device` is accepted and not needed. Random state is set at the end. Collective.
        """
        state = TrioState(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        result = self._epoch_run("load_checkpoint", "resume").load(state, expected_model_config)
        self._cadence.stands_at(None)
        return result

    @property
    def best_loss(self) -> float:
        """The smallest finite loss so far, of a loaded checkpoint too; inf before."""
        return math.inf if self._epochs is None else self._epochs.best_loss

    @property
    def loaded_extra_state(self) -> Any:
        """The `extra_state` of the checkpoint that was loaded."""
        return None if self._epochs is None else self._epochs.loaded_extra_state

    @property
    def checkpoints_saved(self) -> list[Path]:
        """The numbered epochs on disk, oldest first, those of earlier processes too."""
        return [] if self._epochs is None else self._epochs.checkpoints_saved

    def _epoch_run(self, called: str, instead: str) -> EpochRun:
        if self._epochs is None:
            raise InvalidInputError(
                f"{called}() is for layout=Layout.TRIO; this manager keeps steps: use {instead}()"
            )
        return self._epochs

    def _saving(self, step: int) -> AbstractContextManager[SaveTurn]:
        if not self._tenure.alive:
            raise InvalidInputError(f"step {step}: this manager is closed; make a new one")
        return self._cadence.saving(step)
