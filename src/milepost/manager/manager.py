"""`CheckpointManager`: when to save, what to keep, and where to go on after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Unpack, cast, overload

from milepost.checkpointing.adapter_save import Adapters
from milepost.checkpointing.capture import State
from milepost.checkpointing.events import OnEvent
from milepost.checkpointing.in_flight import InFlight, SaveHandle
from milepost.checkpointing.linking import Unchanged
from milepost.checkpointing.load import Verify
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.save_async import Overlap
from milepost.checkpointing.save_prepare import Rng
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.sidecars import Documents, Sidecars
from milepost.checkpointing.target import OnExisting
from milepost.engine.host_buffers import HostBuffers
from milepost.engine.write import WriteOptions
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Layout
from milepost.manager.best import BestMetric
from milepost.manager.epoch_calls import EpochCalls
from milepost.manager.epochs import EpochRun
from milepost.manager.mirror import Mirror, Mirroring
from milepost.manager.resume import Resume, ResumeFrom, as_resume
from milepost.manager.retention import RetentionPolicy
from milepost.manager.save_policies import EveryNSteps, SavePolicy
from milepost.manager.saving import ManagerOptions, SaveMode, Saving
from milepost.manager.step_calls import StepCalls
from milepost.manager.steps import StepRun
from milepost.manager.tenure import hold, take
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.storage.fileops import PathLike

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Saved = TypeVar("Saved", bound=SaveReport | SaveHandle, default=SaveReport)
else:
    from typing import TypeVar

    Saved = TypeVar("Saved")

GRACE_S = 30.0
"""How long schedulers wait between SIGTERM and SIGKILL, if nobody says otherwise."""


class CheckpointManager(StepCalls, EpochCalls, Generic[Saved]):
    """The checkpoints of one training, in one directory.

    With `Layout.DIRECTORY` a run consists of steps, `checkpoint-<step>`: `resume(state)` once,
    then `maybe_save(step, state)` at each step boundary, or `save`. With `Layout.TRIO` it consists
    of epochs, under the names `latest`, `best` and `epoch_<N>`: `load_checkpoint(model, ...)` once,
    then `save_checkpoint(epoch, model, ...)`.

    `save` says when `maybe_save` saves; with the trio, which epochs get a number of their own
    (`EveryNSteps(2)`: each second one; all when left out). `keep` says what is kept, one policy or
    several that each may keep something; everything when left out. The newest, the best by `best`,
    the one resumed from and pinned ones always stay. `resume` is a `Resume`, the path of a
    checkpoint, or what configurations say: true for the newest, false to begin again. `verify` is
    what a resume in the directory layout proves before it touches anything. `grace_s` is how long
    this machine lets a job live after SIGTERM.

    With `saving=Saving.ASYNC` (directory layout) a save returns a `SaveHandle` as soon as the state
    may change, and the rest goes on behind training: the commit, and after it what counts by it
    (retention, links, lineage, mirrors). `in_flight`, `overlap` and `buffers` are those of
    `save_async`; what a signal asks for is never left out. A save that fails there is logged at
    once and raised by the next `maybe_save`, `save`, `resume` or `close`, on every rank, and the
    next step is due. Committed checkpoints are copied to `mirrors` in the background. `on_event` is
    told of every save in the directory layout, as `save` says.

    The manager holds the lease of the directory until `close` (or the end of its `with` block),
    which waits for what is under way: `RunInUseError` when another job has it. One thread uses it.
    On several ranks all of them make one and make the same calls; the coordinator (rank 0) alone
    looks at the directory, decides, removes, and tells the others, and an error of one rank is
    raised on all.

    >>> with CheckpointManager("run", save=EveryNSteps(500), keep=KeepLast(3)) as manager:
    ...     report = manager.resume(state)
    ...     for step in range(report.step + 1 if report else 1, 10_001):
    ...         loss = train_step(step)
    ...         manager.maybe_save(step, state, metrics={"loss": loss})  # doctest: +SKIP
    """

    @overload
    def __init__(
        self: CheckpointManager[SaveReport],
        directory: PathLike,
        *,
        saving: Literal[Saving.WAIT] = ...,
        **options: Unpack[ManagerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: CheckpointManager[SaveHandle],
        directory: PathLike,
        *,
        saving: Literal[Saving.ASYNC],
        **options: Unpack[ManagerOptions],
    ) -> None: ...

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
        saving: Saving = Saving.WAIT,
        in_flight: InFlight = InFlight.WAIT,
        overlap: Overlap = Overlap.NONE,
        buffers: HostBuffers | None = None,
        mirrors: Sequence[Mirror] = (),
        options: WriteOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.layout, self._options = layout, options
        mode = SaveMode(saving, in_flight, overlap, buffers, on_event)
        mode.check(layout, mirrors)
        wanted, policies = as_resume(resume), _as_list(keep)
        self._steps: StepRun | None = None
        self._epochs: EpochRun | None = None
        mirroring: Mirroring | None = None
        match layout:
            case Layout.DIRECTORY:
                mirroring = Mirroring(self.directory, mirrors, options)
                self._steps = StepRun(
                    self.directory,
                    keep=policies,
                    resume=wanted,
                    best=best,
                    verify=verify,
                    mode=mode,
                    mirroring=mirroring,
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
                raise InvalidInputError(
                    f"layout={layout}: a manager keeps Layout.DIRECTORY or Layout.TRIO"
                )
        lease, self._cadence = take(self.directory, wanted, mirroring, save, grace_s, saving)
        self._tenure = hold(self, lease, self._cadence)
        if self._steps is not None:
            self._steps.saver.took = self._cadence.took

    def __enter__(self) -> CheckpointManager[Saved]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = self._end()
        if failure is not None and error is None:
            raise failure

    def close(self) -> None:
        """Finish the save and the copies under way, give back the lease and the signals.

        Raises what a save failed with behind training, if nobody was told. After SIGTERM nothing is
        waited for beyond `grace_s`. A second call does nothing.
        """
        failure = self._end()
        if failure is not None:
            raise failure

    def _end(self) -> BaseException | None:
        try:
            if self._steps is None or not self._tenure.alive:
                return None
            return self._steps.saver.finish(self._cadence.seconds_left)
        finally:
            self._tenure()

    # ---- when

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM came, and the save that it asks for is done: leave the loop.

        In a loop that calls `maybe_save` it is true after that save, never before; in one that
        does not, at once. On several ranks it is true on all of them after the save that follows a
        SIGTERM of any. Needs `OnSignal` in the save policy.
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

    def maybe_save(self, step: int, state: State, **options: Any) -> Saved | None:
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
        sidecars: Sidecars | None = None,
        documents: Documents | None = None,
        adapters: Adapters = Adapters.ALONE,
        unchanged: Unchanged = Unchanged.LINK_VERIFIED,
    ) -> Saved:
        """Write `checkpoint-<step>`, as `milepost.save` does, then remove what `keep` lets go.

        Returns a `SaveReport`, with `Saving.ASYNC` a `SaveHandle`, whose `wait` gives the report.

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
        options = {
            "metrics": metrics,
            "epoch": epoch,
            "model_config": model_config,
            "processing_class": processing_class,
            "primary": primary,
            "rng": rng,
            "on_existing": on_existing,
            "max_shard_size": max_shard_size,
            "sidecars": sidecars,
            "documents": documents,
            "adapters": adapters,
            "unchanged": unchanged,
            "options": self._options,
        }
        with self._saving(step) as turn:
            return cast("Saved", run.saver.save(step, state, options, turn))

    # ---- both

    @property
    def load_report(self) -> LoadReport | None:
        """What the resume did; None before it, and for a fresh run."""
        run = self._steps or self._epochs
        return None if run is None else run.load_report


def _as_list(
    keep: RetentionPolicy | Sequence[RetentionPolicy] | None,
) -> list[RetentionPolicy]:
    if keep is None:
        return []
    return list(keep) if isinstance(keep, Sequence) else [keep]
