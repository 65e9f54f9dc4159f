"""A training in the trio layout: `latest`, `best` and `epoch_<N>` of one directory."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from milepost._warn import warn_user
from milepost.checkpointing.config import as_mapping
from milepost.checkpointing.provenance import exactness
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.write import WriteOptions
from milepost.errors import (
    CheckpointError,
    CheckpointWarning,
    InconsistentError,
    InvalidInputError,
)
from milepost.layouts.trio import TrioContent, write_trio
from milepost.layouts.trio_meta import as_epoch, as_loss, plain_numbers
from milepost.manager.best import BestMetric
from milepost.manager.resume import Resume
from milepost.manager.retention import RetentionPolicy, finite_metric
from milepost.manager.save_policies import SaveContext, SavePolicy
from milepost.manager.space_forecast import forecast
from milepost.manager.trio_choice import Chosen, choose, read_whole
from milepost.manager.trio_load import (
    OWN_KEY,
    TrioPlan,
    TrioState,
    apply_trio,
    plan_trio,
    refuse_sharded,
    split_own,
)
from milepost.manager.trio_optimizer import names_by_group, optimizer_class
from milepost.manager.trio_run import BEST, LATEST, look_at, numbered, prune_epochs
from milepost.state.model import capture_model
from milepost.state.names import unwrap
from milepost.state.rng import capture_rng, pack_rng

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What is saved beside the live objects when an epoch (zero-based) is done."""

    epoch: int
    loss: Any = None
    extra_state: Any = None
    model_config: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class EpochRun:
    """What `CheckpointManager` does in the trio layout; see there."""

    def __init__(
        self,
        directory: Path,
        *,
        save: SavePolicy,
        keep: Sequence[RetentionPolicy],
        resume: Resume | Path,
        best: BestMetric | None,
        options: WriteOptions | None,
    ) -> None:
        self.directory, self.policy, self.keep = directory, save, keep
        self.resume, self.best, self.options = resume, best, options
        self.best_loss = math.inf
        self.loaded_extra_state: Any = None
        self.load_report: LoadReport | None = None
        self._resumed_id: str | None = None
        self._saves = 0
        self._warned: set[str] = set()

    @property
    def checkpoints_saved(self) -> list[Path]:
        """The numbered epochs on disk, oldest first."""
        return [entry.path for entry in numbered(self.directory)]

    # ---- saving

    def save(self, state: TrioState, finished: Finished, context: SaveContext) -> list[str]:
        """Write one epoch under all its names; what an engineer should know, as notes."""
        row = pack_rng(capture_rng())
        notes: list[str] = []
        with converse() as talk:
            with together(talk, "whole"):
                refuse_sharded(state.model)
            rows = talk.gather("rng", row)
            with together(talk, "written"):
                if talk.is_coordinator:
                    notes = self._write(state, finished, context, rows)
        if not talk.is_coordinator:
            self.best_loss = self._best_loss_with(as_loss(finished.loss, "loss"))
        return notes

    def _write(
        self, state: TrioState, finished: Finished, context: SaveContext, rows: Sequence[bytes]
    ) -> list[str]:
        epoch, loss = as_epoch(finished.epoch), as_loss(finished.loss, "loss")
        metrics = plain_numbers(finished.metrics)
        names, best_id = self._names(epoch, {"loss": loss, **metrics}, context)
        best_loss = self._best_loss_with(loss)
        content = TrioContent(
            model_state=_weights(state.model),
            optimizer_state=_state_of(state.optimizer),
            scheduler_state=_state_of(state.scheduler),
            scaler_state=_state_of(state.scaler),
            extra_state=_with_own(finished.extra_state, state, rows),
            epoch=epoch,
            loss=loss,
            best_loss=best_loss,
            model_config=_recorded_config(finished.model_config, state),
            metrics=metrics,
        )
        start = time.monotonic()
        written = write_trio(self.directory, names, content, self.options)
        logger.info(
            "epoch %d saved as %s in %.2f s", epoch, ", ".join(names), time.monotonic() - start
        )
        self.best_loss = best_loss
        self._saves += 1
        notes = forecast(self.directory, written.nbytes) if self._saves == 1 else []
        best_id = written.save_id if BEST in names else best_id
        return [*notes, *self._prune({written.save_id, best_id, self._resumed_id})]

    def _prune(self, protect: set[str | None]) -> list[str]:
        if not self.keep:
            return []
        ids = {identity for identity in protect if identity is not None}
        try:
            for name in prune_epochs(self.directory, self.keep, protect=ids):
                logger.info("removed %s: no retention policy keeps it", self.directory / name)
        except (CheckpointError, OSError) as error:  # the save itself is done and counts
            note = f"old epochs are still there: {error}"
            logger.warning("%s", note)
            return [note]
        return []

    def _names(
        self, epoch: int, metrics: Mapping[str, Any], context: SaveContext
    ) -> tuple[list[str], str | None]:
        """The names of this save, and the save that is best until then."""
        names = [LATEST]
        best_id = None
        if self.best is not None:
            before, best_id = self._best_on_disk(self.best)
            value = finite_metric(metrics.get(self.best.name))
            if value is None:
                self._warn_not_best(metrics.get(self.best.name), epoch)
            elif self.best.is_better(value, before):
                names.append(BEST)
        if self.policy.should_save(context):
            names.append(f"epoch_{epoch + 1}")
        return names, best_id

    def _best_on_disk(self, best: BestMetric) -> tuple[float | None, str | None]:
        """Value and identity of the best there is, also of an earlier process; no damaged one."""
        entry = look_at(self.directory, BEST)
        if entry.info is None:
            return None, None
        return finite_metric(entry.metrics.get(best.name)), entry.info.checkpoint_id

    def _warn_not_best(self, value: Any, epoch: int) -> None:
        assert self.best is not None, "asked for the best only when one is kept"
        if value is None and self.best.name == "loss":
            return  # an epoch saved without a loss, as one may
        what = "was not given" if value is None else f"is {value}"
        if self.best.name not in self._warned:
            self._warned.add(self.best.name)
            warn_user(
                f"epoch {epoch}: {self.best.name} {what}; it is saved, but never becomes best "
                "(this is said once)",
                CheckpointWarning,
            )

    def _best_loss_with(self, loss: float | None) -> float:
        """The smallest finite loss: of this process, of the `best` on disk, and this one."""
        found = [self.best_loss, finite_metric(loss)]
        if self._saves == 0:
            entry = look_at(self.directory, BEST)
            found.append(None if entry.info is None else finite_metric(entry.info.loss))
        return min(value for value in found if value is not None)

    # ---- loading

    def load(
        self, state: TrioState, expected_config: Mapping[str, Any] | None
    ) -> tuple[int, float]:
        """Fill live state from what `resume` says; (0, inf) for a fresh run. Collective."""
        with converse() as talk:
            chosen = self._agree(talk)
            if chosen is None:
                return 0, math.inf
            expected = _recorded_config(expected_config, state)
            plans: list[TrioPlan] = []
            with together(talk, "checked"):
                plans.append(
                    plan_trio(
                        chosen.path,
                        chosen.payload,
                        state,
                        expected,
                        rank=talk.rank,
                        world_size=talk.world_size,
                    )
                )
            with together(talk, "filled"):
                apply_trio(plans[0])
        self._finish(plans[0], chosen, state)
        return chosen.payload.epoch + 1, self.best_loss

    def _agree(self, talk: Conversation) -> Chosen | None:
        """Rank 0 chooses; the others read the very same save, or all fail."""
        mine: Chosen | None = None
        told = None
        with together(talk, "chosen"):
            if talk.is_coordinator:
                mine = choose(self.directory, self.resume)
        if talk.is_coordinator:
            told = json.dumps(None if mine is None else [str(mine.path), _save_id(mine)]).encode()
        answer = json.loads(talk.broadcast("path", told))
        if answer is None:
            return None
        path, save_id = answer
        with together(talk, "read"):
            mine = mine or _read_same(Path(path), save_id)
        assert mine is not None, "a rank that read nothing has raised"
        return mine

    def _finish(self, plan: TrioPlan, chosen: Chosen, state: TrioState) -> None:
        report = plan.report
        report.passed_over = list(chosen.passed_over)
        self.best_loss = chosen.payload.best_loss
        self.loaded_extra_state = plan.extra_state
        self.load_report = report
        self._resumed_id = report.checkpoint_id
        for key in report.kept:
            warn_user(
                f"{chosen.path}: holds no state of the {key}, which starts from its beginning; "
                + _KEPT.get(key, "restore it yourself, or do not pass it"),
                CheckpointWarning,
            )
        report.notes += [f"random state: {text}" for text in report.restore_rng()]
        for line in report.lines():
            logger.info("%s", line)


_KEPT = {
    "scheduler": "a warm-up would be done again: step it to where the training stands",
    "optimizer": "its moments are fresh",
}


def _save_id(chosen: Chosen) -> Any:
    return chosen.payload.metadata.get("save_id")


def _read_same(path: Path, save_id: str | None) -> Chosen:
    chosen = Chosen(path=path, payload=read_whole(path))
    if _save_id(chosen) != save_id:
        raise InconsistentError(
            f"{path}: rank 0 reads save {save_id}, this rank {_save_id(chosen)}; do all ranks see "
            "the same directory?",
            path=path,
        )
    return chosen


def _weights(model: nn.Module) -> OrderedDict[str, Any]:
    """The state dict under plain names: wrappers taken off, tied names included."""
    captured = capture_model(model)
    weights: OrderedDict[str, Any] = OrderedDict(captured.leaves)
    weights.update({name: captured.leaves[kept] for name, kept in captured.ties.items()})
    weights.update(captured.extra)
    return weights


def _state_of(obj: Any) -> Any:
    return None if obj is None else obj.state_dict()


def _with_own(extra_state: Any, state: TrioState, rows: Sequence[bytes]) -> dict[str, Any]:
    """The caller's extra state and, under one key, what makes a resume exact."""
    if extra_state is not None and not isinstance(extra_state, dict):
        raise InvalidInputError(
            f"extra_state is a {type(extra_state).__name__}, expected a dict such as "
            "collect_extra_state() gives"
        )
    if split_own(extra_state)[0]:
        raise InvalidInputError(f"extra_state: the key {OWN_KEY!r} is taken; use another")
    own: dict[str, Any] = {
        "rng": _stacked(rows),
        "exactness": exactness({"optimizer": state.optimizer}),
    }
    if state.optimizer is not None:
        own["optimizer_class"] = optimizer_class(state.optimizer)
        names = names_by_group(state.model, state.optimizer)
        if names is not None:
            own["param_names"] = names
    return {**(extra_state or {}), OWN_KEY: own}


def _stacked(rows: Sequence[bytes]) -> torch.Tensor:
    """The random state of every rank as one `[world, n]` tensor of bytes."""
    length = max(map(len, rows))
    padded = bytearray().join(row.ljust(length, b"\0") for row in rows)
    return torch.frombuffer(padded, dtype=torch.uint8).reshape(len(rows), length)


def _recorded_config(config: Any, state: TrioState) -> dict[str, Any] | None:
    """The configuration with PEFT method and optimizer class beside it; its own fields count."""
    if config is None:
        return None
    beside: dict[str, Any] = {}
    adapters = getattr(unwrap(state.model), "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        adapter = next(iter(adapters.values()))
        method = getattr(adapter, "peft_type", None)
        beside["peft_method"] = str(getattr(method, "value", method)).lower()
        rank = getattr(adapter, "r", None)
        beside |= {} if rank is None else {"peft_rank": rank}
    if state.optimizer is not None:
        beside["optimizer_class"] = optimizer_class(state.optimizer).rpartition(".")[2]
    return {**beside, **as_mapping(config)}
