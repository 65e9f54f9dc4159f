"""`CheckpointManager`: when to save, what to keep, and where to go on after a restart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from milepost.checkpointing.capture import State
from milepost.checkpointing.load import RngRestore, Verify
from milepost.checkpointing.load_request import Moments
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.save import Rng
from milepost.checkpointing.save_run import SaveReport
from milepost.checkpointing.target import OnExisting
from milepost.checkpointing.world import is_distributed
from milepost.engine.write import WriteOptions
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Layout
from milepost.manager.best import BestMetric
from milepost.manager.cadence import Begun, Cadence
from milepost.manager.epochs import EpochRun, Finished
from milepost.manager.resume import Resume, ResumeFrom, as_resume
from milepost.manager.retention import RetentionPolicy
from milepost.manager.save_policies import EveryNSteps, SavePolicy
from milepost.manager.step_choice import nothing_there
from milepost.manager.steps import StepRun, history_entry
from milepost.manager.tenure import hold, take_lease
from milepost.manager.trio_load import TrioState
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.state.policies import ClassPolicy, DtypePolicy, Missing, ShapePolicy, Unexpected
from milepost.storage.fileops import PathLike

GRACE_S = 30.0
"""How long schedulers wait between SIGTERM and SIGKILL, if nobody says otherwise."""


class CheckpointManager:
    """The checkpoints of one training, in one directory.

    With `Layout.DIRECTORY` a run consists of steps, `checkpoint-<step>`: `resume(state)` once,
    then `maybe_save(step, state)` at each step boundary, or `save`. With `Layout.TRIO` it consists
    of epochs, under the names `latest`, `best` and `epoch_<N>`: `load_checkpoint(model, ...)` once,
    then `save_checkpoint(epoch, model, ...)`.

    `save` says when `maybe_save` saves; with the trio, which epochs get a number of their own
    (`EveryNSteps(2)`: each second one; all when left out). `keep` says what is kept, one policy or
    several that each may keep something; everything when left out. The newest, the best by `best`,
    the one resumed from and pinned ones always stay. `resume` is a `Resume` or the path of a
    checkpoint. `verify` is what a resume in the directory layout proves before it touches anything.
    `grace_s` is how long this machine lets a job live after SIGTERM.

    The manager holds the lease of the directory until `close` (or the end of its `with` block):
    `RunInUseError` when another process has it. One thread uses it.

    >>> with CheckpointManager("run", save=EveryNSteps(500), keep=KeepLast(3)) as manager:
    ...     report = manager.resume(state)
    ...     for step in range(report.step + 1 if report else 1, 10_001):
    ...         loss = train_step(step)
    ...         manager.maybe_save(step, state, metrics={"loss": loss})  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        layout: Layout = Layout.DIRECTORY,
        save: SavePolicy | None = None,
        keep: RetentionPolicy | Sequence[RetentionPolicy] | None = None,
        resume: ResumeFrom = Resume.AUTO,
        best: BestMetric | None = BestMetric(),  # noqa: B008
        verify: Verify = Verify.DIGESTS,
        grace_s: float = GRACE_S,
        options: WriteOptions | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.layout, self._options = layout, options
        rank, world_size = _rank_and_world()
        wanted = as_resume(resume)
        if wanted is Resume.MUST and not self.directory.is_dir():
            raise nothing_there(self.directory)
        self._steps: StepRun | None = None
        self._epochs: EpochRun | None = None
        policies = _as_list(keep)
        match layout:
            case Layout.DIRECTORY if world_size == 1:
                self._steps = StepRun(
                    self.directory, keep=policies, resume=wanted, best=best, verify=verify
                )
            case Layout.TRIO:
                self._epochs = EpochRun(
                    self.directory,
                    save=save if save is not None else EveryNSteps(1),
                    keep=policies,
                    resume=wanted,
                    best=best,
                    options=options,
                )
            case _:
                raise InvalidInputError(_why_not(layout, world_size))
        lease = take_lease(self.directory) if rank == 0 else None
        try:
            self._cadence = Cadence(save, grace_s)
        except BaseException:
            if lease is not None:
                lease.__exit__(None, None, None)
            raise
        self._tenure = hold(self, lease, self._cadence.listener)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the lease and the signals. A second call does nothing."""
        self._tenure()

    # ---- when

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM came, and the save that it asks for is done: leave the loop.

        In a loop that calls `maybe_save` it is true after that save, never before; in one that
        does not, at once. Needs `OnSignal` in the save policy.
        """
        return self._cadence.stop_requested

    def should_save(self, step: int) -> bool:
        """Whether the save policy wants a save at this step boundary."""
        return self._cadence.is_due(step)

    def accumulating(self) -> AbstractContextManager[None]:
        """The middle of a gradient accumulation: gradients are not part of a checkpoint.

        A `maybe_save` that is due in this block waits for the first one outside of it; `save` is
        refused.
        """
        return self._cadence.accumulating()

    # ---- steps (directory layout)

    def maybe_save(self, step: int, state: State, **options: Any) -> SaveReport | None:
        """`save` with the same keywords when the save policy wants it; None when not."""
        if not self.should_save(step):
            return None
        if self._cadence.in_accumulation:
            self._cadence.put_off()
            return None
        return self.save(step, state, **options)

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, Any] | None = None,
        epoch: float | None = None,
        model_config: Any = None,
        processing_class: Any = None,
        primary: str | None = None,
        rng: Rng = Rng.INCLUDE,
        on_existing: OnExisting = OnExisting.ERROR,
        max_shard_size: int | str = DEFAULT_PART_NBYTES,
    ) -> SaveReport:
        """Write `checkpoint-<step>`, as `milepost.save` does, then remove what `keep` lets go.

        `latest` and `best` are made to point to the newest and the best, for people. `metrics` are
        kept in the manifest, and with `log` in `trainer_state.json`. Trouble after the commit is a
        note of the report. What has the step's name and was abandoned or torn is moved aside.
        """
        run = self._step_run("save", "save_checkpoint")
        if self._cadence.in_accumulation:
            raise InvalidInputError(
                f"step {step}: save() in the middle of a gradient accumulation, whose gradients "
                "would be lost; call maybe_save(), or save after the optimizer's step"
            )
        begun = self._begin(step)
        report = run.save(
            step,
            state,
            {
                "metrics": metrics,
                "epoch": epoch,
                "model_config": model_config,
                "processing_class": processing_class,
                "primary": primary,
                "rng": rng,
                "on_existing": on_existing,
                "max_shard_size": max_shard_size,
                "options": self._options,
            },
        )
        self._cadence.end(step, begun)
        return report

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
        model_config: Any = None,
        primary: str | None = None,
        rng: RngRestore = RngRestore.NOW,
    ) -> LoadReport | None:
        """Fill `state` from the checkpoint to go on from; None when the run is a fresh one.

        A newer checkpoint that is proven damaged is passed over, with a warning, and named in
        `report.passed_over`; the run goes on in a new generation, which supersedes it. What cannot
        be read is tried again, then raised. When nothing of what is there can be used, that is an
        error, never a fresh run.

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
                "model_config": model_config,
                "primary": primary,
                "rng": rng,
            },
        )
        if report is not None:
            self._cadence.stands_at(report.step)
        return report

    def log(self, step: int, values: Mapping[str, Any], *, epoch: float | None = None) -> None:
        """Add an entry to the history that later saves write into `trainer_state.json`."""
        run = self._step_run("log", "the metrics of save_checkpoint")
        run.log_history.append(history_entry(step, epoch, values))

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """What was logged in this run, before the resume too."""
        return [] if self._steps is None else list(self._steps.log_history)

    def _step_run(self, called: str, instead: str) -> StepRun:
        if self._steps is None:
            raise InvalidInputError(
                f"{called}() is for layout=Layout.DIRECTORY; this manager keeps trios: use "
                f"{instead}"
            )
        return self._steps

    # ---- epochs (trio layout)

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
        begun = self._begin(epoch + 1)
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
        self._cadence.end(epoch + 1, begun)

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

    # ---- both

    @property
    def load_report(self) -> LoadReport | None:
        """What the resume did; None before it, and for a fresh run."""
        run = self._steps or self._epochs
        return None if run is None else run.load_report

    def _begin(self, step: int) -> Begun:
        if not self._tenure.alive:
            raise InvalidInputError(f"step {step}: this manager is closed; make a new one")
        return self._cadence.begin()


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def _as_list(
    keep: RetentionPolicy | Sequence[RetentionPolicy] | None,
) -> list[RetentionPolicy]:
    if keep is None:
        return []
    return list(keep) if isinstance(keep, Sequence) else [keep]


def _why_not(layout: Layout, world_size: int) -> str:
    if layout is Layout.DIRECTORY:
        return (
            f"the directory layout is written by one process so far, torch.distributed has "
            f"{world_size}; use layout=Layout.TRIO for whole tensors"
        )
    return f"layout={layout}: a manager keeps Layout.DIRECTORY or Layout.TRIO"
