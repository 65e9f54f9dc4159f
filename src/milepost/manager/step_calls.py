"""The calls of a manager that keeps steps, other than its saves: resume, history, the best one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milepost.checkpointing.capture import State
from milepost.checkpointing.load import RngRestore
from milepost.checkpointing.load_request import Moments, Weights
from milepost.checkpointing.report import LoadReport
from milepost.errors import InvalidInputError
from milepost.hf.trainer_state import BestCheckpoint
from milepost.manager.cadence import Cadence
from milepost.manager.step_save import history_entry
from milepost.manager.steps import StepRun
from milepost.state.policies import (
    BlockPolicy,
    ClassPolicy,
    DtypePolicy,
    Missing,
    ShapePolicy,
    Unexpected,
)


class StepCalls:
    """The part of `CheckpointManager` for `Layout.DIRECTORY`; see there."""

    _steps: StepRun | None
    _cadence: Cadence

    def checkpoint_to_resume(self, *, moments: Moments = Moments.RESTORE) -> Path | None:
        """The checkpoint that `resume` will load, before there is a model; None for a fresh run.

        For runs that build their model from it (`milepost.resolve_resume_weights_source`). It is
        chosen and verified here, as `resume` does it and with the same errors, and `resume` then
        takes this one without verifying it again. `moments` is what `resume` will be called with:
        where they start afresh, damaged optimizer state does not count. Collective.
        """
        return self._step_run("checkpoint_to_resume", "load_checkpoint").choose(moments)

    def resume(
        self,
        state: State,
        *,
        missing: Missing = Missing.ERROR,
        unexpected: Unexpected = Unexpected.ERROR,
        dtype: DtypePolicy = DtypePolicy.ERROR,
        shape: ShapePolicy = ShapePolicy.ERROR,
        optimizer_class: ClassPolicy = ClassPolicy.ERROR,
        moments: Moments = Moments.RESTORE,
        blocks: BlockPolicy = BlockPolicy.ERROR,
        weights: Weights = Weights.READ,
        model_config: Any = None,
        primary: str | None = None,
        rng: RngRestore = RngRestore.NOW,
    ) -> LoadReport | None:
        """Fill `state` from the checkpoint to go on from; None when the run is a fresh one.

        A newer checkpoint that is proven damaged is passed over, with a warning, and named in
        `report.passed_over`; the run goes on in a new generation, which supersedes it. What cannot
        be read is tried again, then raised. A newer save that a dead process left unfinished is
        named in the same way. When nothing of what is there can be used, that is an error, never a
        fresh run. A copy in a mirror is taken where the run has nothing as new.

        Random state is set at the end. When the loop makes an iterator of a data loader afterwards,
        that draws from it: call `report.restore_rng()` once the first iterator exists.
        """
        report = self._step_run("resume", "load_checkpoint").load(
            state,
            {
                "missing": missing,
                "unexpected": unexpected,
                "dtype": dtype,
                "shape": shape,
                "optimizer_class": optimizer_class,
                "moments": moments,
                "blocks": blocks,
                "weights": weights,
                "model_config": model_config,
                "primary": primary,
                "rng": rng,
            },
        )
        if report is not None:
            self._cadence.stands_at(report.step)
        return report

    # ---- the history, and the best

    def log(self, step: int, values: Mapping[str, Any], *, epoch: float | None = None) -> None:
        """Add an entry to the history that later saves write into `trainer_state.json`."""
        run = self._step_run("log", "the metrics of save_checkpoint")
        run.saver.log(history_entry(step, epoch, values))

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """What was logged in this run, before the resume too."""
        return [] if self._steps is None else list(self._steps.saver.log_history)

    def best(self) -> BestCheckpoint | None:
        """The best committed checkpoint of the run, by the manager's `best`; None without one.

        Waits for a save in flight, which may be the best. Collective.
        """
        return self._step_run("best", "best_loss").best()

    def load_best(
        self,
        state: State,
        *,
        dtype: DtypePolicy = DtypePolicy.ERROR,
        model_config: Any = None,
        primary: str | None = None,
    ) -> LoadReport:
        """Fill the models of `state` from the best committed checkpoint; nothing else changes.

        What is trained of an adapter is restored from its own tensors, and the base stays. Any
        topology may have saved it. The run itself stands where it stood: a later save continues the
        newest checkpoint. Waits for a save in flight. Collective; `NotFoundError` when no
        checkpoint was saved with a finite value of the metric, `DamagedError` when the best is not
        as it was saved.
        """
        return self._step_run("load_best", "load_checkpoint").load_best(
            state, {"dtype": dtype, "model_config": model_config, "primary": primary}
        )

    def _step_run(self, called: str, instead: str) -> StepRun:
        if self._steps is None:
            raise InvalidInputError(
                f"{called}() is for layout=Layout.DIRECTORY; this manager keeps trios: use "
                f"{instead}"
            )
        return self._steps
