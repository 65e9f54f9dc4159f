"""The Hugging Face Trainer, TRL's and sentence-transformers', saving and resuming with Milepost.

from milepost.integrations.transformers import MilepostTrainerMixin

class Trainer(MilepostTrainerMixin, transformers.Trainer): ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost._warn import warn_user
from milepost.checkpointing.in_flight import InFlight, SaveHandle, wait_for_saves
from milepost.checkpointing.load import RngRestore, Verify, load
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.save_async import Overlap
from milepost.checkpointing.save_prepare import Rng
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.target import OnExisting
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.engine.write import WriteOptions
from milepost.errors import CheckpointWarning, InvalidInputError
from milepost.integrations import transformers_stock as stock
from milepost.integrations.transformers_models import (
    models_of,
    require_averaged,
    side_documents,
    write_model_card,
)
from milepost.integrations.transformers_resume import (
    is_milepost,
    newest_checkpoint,
    require_usable,
    saved_keys,
)
from milepost.integrations.transformers_retention import TotalLimit
from milepost.integrations.transformers_state import (
    PROGRESS,
    documents_of,
    export_callbacks,
    log_other_arguments,
    metrics_of,
    progress_of,
    require_supported,
    restore_progress,
    training_state,
)
from milepost.layouts.checkpoint import Layout
from milepost.manager.manager import CheckpointManager
from milepost.manager.resume import Resume, ResumeFrom
from milepost.manager.saving import ManagerOptions, SaveMode, Saving

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)


class MilepostTrainerMixin(_Trainer):  # type: ignore[misc]
    """Put before a Trainer class: its checkpoints are Milepost's, everything else stays its own.

    A checkpoint is one atomic commit: weights for `from_pretrained`, optimizer, scheduler, random
    state of every rank, `trainer_state.json` and the training arguments as JSON. It resumes
    exactly, on another number of ranks too, sharded as the model is held then. `save_total_limit`,
    `save_only_model`, `load_best_model_at_end`, `resume_from_checkpoint` (a path, or True for the
    newest that is sound) and pushes to the Hub work as in the Trainer. A checkpoint that the stock
    Trainer wrote resumes when it is named by its path.

    Keywords of the constructor: with `milepost_saving=Saving.ASYNC` a save goes on behind training,
    and `milepost_in_flight` and `milepost_overlap` are those of `CheckpointManager`;
    `milepost_verify` is what is proven of a checkpoint before it is resumed; `milepost_options` are
    ways of writing. `milepost_report` tells what the last resume did, None before it.
    """

    milepost_report: LoadReport | None = None
    _milepost_manager: CheckpointManager[Any] | None = None
    _milepost_progress: list[dict[str, Any]] = []
    _milepost_refused: tuple[Any, Any] | None = None

    def __init__(
        self,
        *args: Any,
        milepost_saving: Saving = Saving.WAIT,
        milepost_in_flight: InFlight = InFlight.WAIT,
        milepost_overlap: Overlap = Overlap.NONE,
        milepost_verify: Verify = Verify.DIGESTS,
        milepost_options: WriteOptions | None = None,
        **kwargs: Any,
    ) -> None:
        mode = SaveMode(milepost_saving, milepost_in_flight, milepost_overlap, None)
        mode.check(Layout.DIRECTORY, ())
        self._milepost_mode, self._milepost_verify = mode, milepost_verify
        self._milepost_write_options = milepost_options
        self._milepost_limit = TotalLimit(1)
        self._milepost_saves: dict[int, SaveHandle] = {}
        try:
            super().__init__(*args, **kwargs)
        finally:
            if self._milepost_refused is not None:
                own, only_model = self._milepost_refused
                own.save_only_model = only_model
        require_supported(self)

    # ---- what the stock Trainer refuses since it could not save it

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.is_distributed_loading_by_transformers:
            # For the rest of the constructor, which refuses the optimizer of a sharded model.
            self._milepost_refused = (self.args, self.args.save_only_model)
            self.args.save_only_model = True

    def create_accelerator_and_postprocess(self) -> None:
        with _set(self.args, save_only_model=False):
            super().create_accelerator_and_postprocess()

    # ---- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; True goes on from the newest checkpoint of Milepost's that is sound.

        Collective. `NotFoundError` when there is none, `NotCommittedError` when there are only torn
        or foreign directories, `DamagedError` when all are damaged, or the one that was named.
        """
        require_averaged(self)
        if resume_from_checkpoint is True:
            run = Path(self.args.output_dir)
            resume_from_checkpoint = str(newest_checkpoint(run, self._milepost_verify))
        elif resume_from_checkpoint and is_milepost(resume_from_checkpoint):
            require_usable(Path(resume_from_checkpoint), self._milepost_verify)
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        resume: ResumeFrom = Resume.NEVER
        if resume_from_checkpoint is not None and is_milepost(resume_from_checkpoint):
            resume = Path(resume_from_checkpoint)
        self._milepost_saves = {}
        with self._open_manager(Path(self._get_output_dir(trial)), resume) as manager:
            self._milepost_manager = manager
            try:
                return super()._inner_training_loop(
                    batch_size=batch_size,
                    args=args,
                    resume_from_checkpoint=resume_from_checkpoint,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
            finally:
                self._milepost_manager = None

    def _open_manager(self, run: Path, resume: ResumeFrom) -> CheckpointManager[Any]:
        """The manager of one training. What it resumes from has been proven already."""
        limit = self.args.save_total_limit
        self._milepost_limit = TotalLimit(limit if limit and limit > 0 else 1)
        options: ManagerOptions = {
            "resume": resume,
            "verify": Verify.SIZES,
            "best": None,
            "keep": self._milepost_limit if limit and limit > 0 else None,
            "options": self._milepost_write_options,
        }
        mode = self._milepost_mode
        if mode.saving is Saving.WAIT:
            return CheckpointManager(run, saving=Saving.WAIT, **options)
        options["in_flight"], options["overlap"] = mode.in_flight, mode.overlap
        return CheckpointManager(run, saving=Saving.ASYNC, **options)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_saves()
        # The best may be the last one to be loaded; what goes is for the manager to say.
        with _set(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # ---- saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Commit `checkpoint-<step>`; one that this training has saved already is kept."""
        manager = self._milepost_manager
        if manager is None:
            raise InvalidInputError(
                "a checkpoint of the Trainer belongs to a call of train(); to save at another "
                "time, call save_model(), or milepost.save"
            )
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        step = self.state.global_step
        before = self.state.best_model_checkpoint
        self._point_to_best(manager.directory, step)
        models = models_of(self)
        state: dict[str, Any] = models
        if not self.args.save_only_model:
            state = {**training_state(self, models), PROGRESS: {"ranks": progress_of(self)}}
        with converse() as talk, together(talk, "documents"):
            export_callbacks(self)
            write_model_card(self)
            documents, notes = documents_of(self)
            documents.update(side_documents(self))
        saved = manager.save(
            step,
            state,
            metrics=metrics_of(self.state),
            epoch=self.state.epoch,
            processing_class=self._own_processing_class(),
            rng=Rng.LEAVE_OUT if self.args.save_only_model else Rng.INCLUDE,
            on_existing=OnExisting.KEEP,
            documents=documents,
        )
        self._took(step, saved, notes, before)
        if self.args.push_to_hub:
            self._finish_saves()
            self._push_from_checkpoint(str(manager.directory / f"checkpoint-{step}"))

    def _point_to_best(self, run: Path, step: int) -> None:
        """Name the checkpoint of the best step so far, if it is there or on its way."""
        best = self.state.best_global_step
        if best and self.args.save_strategy != "no":
            place = run / f"checkpoint-{best}"
            if best == step or best in self._milepost_saves or place.is_dir():
                self.state.best_model_checkpoint = str(place)
                self._milepost_limit.take_best(best)

    def _took(
        self, step: int, saved: SaveReport | SaveHandle, notes: list[str], before: str | None
    ) -> None:
        """Log what a save had to say; one that was left out is not the best."""
        if isinstance(saved, SaveHandle):
            report = saved.not_written
            if report is not None and report.checkpoint_id == "":
                self.state.best_model_checkpoint = before
            else:
                self._milepost_saves[step] = saved
        else:
            report = saved
        for note in (*notes, *(report.notes if report is not None else ())):
            logger.info("checkpoint-%d: %s", step, note)

    def _finish_saves(self) -> None:
        """Return when what was saved is committed; raise what failed behind training."""
        wait_for_saves()
        for handle in self._milepost_saves.values():
            handle.wait()

    def _own_processing_class(self) -> Any:
        if self.processing_class is not None:
            return self.processing_class
        return getattr(self.data_collator, "tokenizer", None)

    def _checkpoint_push_skip_names(self, checkpoint_folder: str) -> set[str]:
        """Names that sentence-transformers does not copy into the repository of the model."""
        own = {"training", "milepost.json", "training_args.json", "loss"}
        return own | set(super()._checkpoint_push_skip_names(checkpoint_folder))

    # ---- resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if is_milepost(resume_from_checkpoint):
            if not self.is_in_train:  # in training it is loaded together with the optimizer
                load(resume_from_checkpoint, models_of(self))
            return
        path = Path(resume_from_checkpoint)
        if stock.has_plain_weights(self, path):
            stock.load_weights(self, path)
        elif model is None:
            super()._load_from_checkpoint(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if is_milepost(checkpoint):
            self._resume(Path(checkpoint))
        elif stock.is_sharded_by_accelerate(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            stock.load_training_state(self, Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and stock.is_sharded_by_accelerate(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not is_milepost(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        assert self.milepost_report is not None, "what is resumed was loaded before"
        self.milepost_report.restore_rng()
        if self._milepost_progress:
            restore_progress(self, self._milepost_progress)

    def _resume(self, checkpoint: Path) -> None:
        """Fill model, optimizer, scheduler and scaler; what the checkpoint lacks starts anew."""
        manager = self._milepost_manager
        assert manager is not None, "a resume is part of train()"
        progress: dict[str, Any] = {"ranks": []}
        wanted = {**training_state(self, models_of(self)), PROGRESS: progress}
        saved = saved_keys(checkpoint)
        absent = sorted(wanted.keys() - saved)
        if absent:
            warn_user(
                f"{checkpoint}: holds no {', '.join(absent)}; what it does not hold starts anew",
                CheckpointWarning,
            )
        state = {key: value for key, value in wanted.items() if key in saved}
        self.milepost_report = manager.resume(state, rng=RngRestore.LATER)
        self._milepost_progress = progress["ranks"]
        self._milepost_limit.take_best(self.state.best_global_step)
        log_other_arguments(self.args, checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not is_milepost(best):
            super()._load_best_model()
            return
        logger.info("loading the best model, %s (score: %s)", best, self.state.best_metric)
        load(best, models_of(self))


@contextmanager
def _set(args: Any, **values: Any) -> Iterator[None]:
    """Training arguments with other values, for the time of the block."""
    before = {name: getattr(args, name) for name in values}
    for name, value in values.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
