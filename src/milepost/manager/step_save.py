"""Saving a step of a run: where it stands before, what is kept and copied once it is committed."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from milepost.checkpointing.capture import State
from milepost.checkpointing.events import EventKind, Events
from milepost.checkpointing.in_flight import InFlight, SaveHandle, saves
from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.save import save
from milepost.checkpointing.save_async import WAITS_FOR, Sequel, left_out, start_save
from milepost.checkpointing.save_prepare import SaveKeywords
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.world import is_distributed
from milepost.engine.rendezvous import Conversation, led
from milepost.errors import (
    CheckpointError,
    InvalidInputError,
    RankError,
    SaveOutcomeUnknownError,
)
from milepost.format.manifest import Manifest
from milepost.hf.trainer_state import BestCheckpoint
from milepost.layouts.run import RunListing, list_run
from milepost.layouts.trio_meta import plain_numbers
from milepost.manager import links
from milepost.manager.best import BestMetric
from milepost.manager.best_of_run import best_entry
from milepost.manager.cadence import SaveTurn
from milepost.manager.decide import decide
from milepost.manager.mirror import Mirroring
from milepost.manager.nearest import generations_in
from milepost.manager.prune import prune_run
from milepost.manager.resume import Resume
from milepost.manager.retention import Kept, RetentionPolicy, finite_metric
from milepost.manager.saving import SaveMode, Saving
from milepost.manager.space_forecast import forecast
from milepost.manager.step_choice import next_generation
from milepost.storage.staging import move_aside, move_to_incomplete

logger = logging.getLogger(__name__)

SUPERSEDED_DIRECTORY = "_superseded_checkpoints"


class StepSaver:
    """The saves of a manager in the directory layout.

    `took` is told how many seconds each save behind training needed. `lineage` is that of the next
    save, at the coordinator; it changes when a checkpoint is committed, and `best`, which goes into
    `trainer_state.json`, counts what is committed at the call.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: Sequence[RetentionPolicy],
        resume: Resume | Path,
        best: BestMetric | None,
        mode: SaveMode,
        mirroring: Mirroring,
    ) -> None:
        self.directory, self.keep, self.resume = directory, keep, resume
        self.best, self.mode, self.mirroring = best, mode, mirroring
        self.log_history: list[dict[str, Any]] = []
        self.lineage: Lineage | None = None
        self.resumed_id: str | None = None
        self.took: Callable[[float], None] = lambda seconds: None
        self._best: BestCheckpoint | None = None
        self._saves = 0
        self._handles: list[SaveHandle] = []
        self._kept_for_mirrors = False
        self._guard = threading.Lock()  # of the history

    def save(
        self, step: int, state: State, options: dict[str, Any], turn: SaveTurn
    ) -> SaveReport | SaveHandle:
        """`options` are keywords of `milepost.save`, all but `lineage`, `log_history` and `best`.

        Collective; the metrics are those of the coordinator. What signals ask for is never left
        out.
        """
        if self.mode.saving is Saving.WAIT:
            return self._save_waiting(step, state, options)
        in_flight = InFlight.WAIT if turn.signals else self.mode.in_flight
        handle = self._save_behind(step, state, options, in_flight)
        turn.is_left_out = handle is None
        if handle is None:
            target = self.directory / f"checkpoint-{step}"
            report = left_out(target, step, in_flight)
            rank = dist.get_rank() if is_distributed() else 0
            events = Events(self.mode.on_event, step=step, path=target, rank=rank)
            events.tell(EventKind.LEFT_OUT)
            return SaveHandle(target, step, report)
        return handle

    def _save_waiting(self, step: int, state: State, options: dict[str, Any]) -> SaveReport:
        saves.drain()
        told = decide(lambda: self._opening(step, options))
        keywords, entry = self._keywords(step, options, told)
        report = save(self.directory / f"checkpoint-{step}", state, step=step, **keywords)
        if not report.written:
            self._stand_after(report)
            return report
        if entry is not None:
            self.log(entry)
        notes: list[str] = decide(lambda: self._settle(report))
        return replace(report, notes=(*report.notes, *notes))

    def _save_behind(
        self, step: int, state: State, options: dict[str, Any], in_flight: InFlight
    ) -> SaveHandle | None:
        """None when an earlier one is under way and `in_flight` does not wait."""
        start_s = time.monotonic()
        if in_flight in WAITS_FOR:
            saves.drain(WAITS_FOR[in_flight])
        is_patient = in_flight in WAITS_FOR

        def opening() -> dict[str, Any] | None:
            return self._opening(step, options) if is_patient or saves.count == 0 else None

        told = decide(opening)
        if told is None:
            return None
        keywords, entry = self._keywords(step, options, told)
        if entry is not None:
            self.log(entry)
        sequel = Sequel(
            lineage=self._lineage_now,
            committed=lambda talk, report: self._committed(talk, report, start_s),
            failed=lambda: self._unlog(entry),
        )
        target, how = self.directory / f"checkpoint-{step}", (self.mode.overlap, self.mode.buffers)
        try:
            handle = start_save(target, state, step, in_flight, *how, keywords, sequel)
        except BaseException:
            self._unlog(entry)
            raise
        if handle.not_written is not None:
            self._unlog(entry)
            self._stand_after(handle.not_written)
        self._handles = [each for each in self._handles if not each.done() or each.is_untold]
        self._handles.append(handle)
        return handle

    def finish(self, timeout_s: float | None) -> BaseException | None:
        """Wait for the saves and copies under way; what a save failed with that nobody was told."""
        start_s = time.monotonic()
        is_done = saves.drain(timeout_s=timeout_s)
        left_s = None if timeout_s is None else timeout_s - (time.monotonic() - start_s)
        if not (is_done and self.mirroring.close(left_s)):
            logger.warning(
                "%s: the time after SIGTERM is over and a save or a copy is still under way; if "
                "this process is killed now, the checkpoint before it counts",
                self.directory,
            )
        elif self._kept_for_mirrors:
            self._prune()
        failures = [each.take_untold() for each in self._handles if each.is_untold]
        return failures[0] if failures else None

    # ---- the history

    def log(self, entry: dict[str, Any]) -> None:
        """Add an entry to the history that later saves write."""
        with self._guard:
            self.log_history.append(entry)

    def _unlog(self, entry: dict[str, Any] | None) -> None:
        """The save that the entry belongs to does not exist."""
        with self._guard:
            self.log_history = [each for each in self.log_history if each is not entry]

    # ---- before

    def _keywords(
        self, step: int, options: dict[str, Any], told: Mapping[str, Any]
    ) -> tuple[SaveKeywords, dict[str, Any] | None]:
        """Keywords of `save`, and the entry of the history that they have at the end, if any."""
        metrics, entry = told["metrics"], None
        history = list(self.log_history)
        if metrics:
            entry = history_entry(step, options.get("epoch"), metrics)
            history.append(entry)
        own: SaveKeywords = {
            "metrics": metrics,
            "lineage": Lineage(**told["lineage"]),
            "log_history": history,
            "best": self._best,
            "on_event": self.mode.on_event,
        }
        return {**options, **own}, entry  # type: ignore[typeddict-item]

    def _opening(self, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Before a save: where it stands in the run, and that its name is free."""
        if self.lineage is None:  # else the thread behind training may set it now
            self.lineage = self.next_lineage()
        lineage = self.lineage
        metrics = plain_numbers(options.get("metrics") or {})
        self._best = self._best_with(step, lineage, metrics)
        self._clear_name(step, lineage)
        return {"lineage": asdict(lineage), "metrics": metrics}

    def _best_with(
        self, step: int, lineage: Lineage, metrics: Mapping[str, Any]
    ) -> BestCheckpoint | None:
        """The best of the run once this step is saved; of equals, the newer."""
        if self.best is None:
            return None
        current = list_run(self.directory).current
        found = [
            (entry.step, entry.manifest.metrics)
            for entry in current
            if entry.step != step and not leaves_behind(lineage, entry.manifest)
        ]
        kept = [Kept(step=number, metrics=values) for number, values in [*found, (step, metrics)]]
        steps = self.best.as_retention().keeps(kept)
        values = {entry.step: finite_metric(entry.metrics.get(self.best.name)) for entry in kept}
        for number in steps:
            value = values[number]
            assert value is not None, "only what has a value is best"
            path = str(self.directory / f"checkpoint-{number}")
            return BestCheckpoint(metric=value, step=number, path=path)
        return None

    def next_lineage(self) -> Lineage:
        """The lineage of the next save; `InvalidInputError` when nobody has resumed."""
        if self.lineage is not None:
            return self.lineage
        listing = list_run(self.directory)
        if self.resume is Resume.NEVER:
            return Lineage(generation=self.new_generation(listing))
        there = listing.committed or listing.torn or [*generations_in(self.mirroring.mirrors)]
        if there or self.resume is not Resume.AUTO:
            raise InvalidInputError(
                f"{self.directory}: call manager.resume(state) before the first save, so that "
                f"resume={self.resume} is carried out; to begin again beside what is there, pass "
                "resume=Resume.NEVER"
            )
        return Lineage()

    def new_generation(self, listing: RunListing) -> int:
        """One above all that the run and its mirrors hold."""
        return max(
            [next_generation(listing), *(g + 1 for g in generations_in(self.mirroring.mirrors))]
        )

    def _clear_name(self, step: int, lineage: Lineage) -> None:
        """Move away what has the step's name and is torn, or of a branch that is left behind."""
        name = f"checkpoint-{step}"
        listing = list_run(self.directory)
        if any(entry.name == name for entry in listing.torn):
            move_to_incomplete(self.directory, name)
        entry = next((entry for entry in listing.committed if entry.name == name), None)
        if entry is not None and (entry.superseded or leaves_behind(lineage, entry.manifest)):
            place = move_aside(self.directory, name, SUPERSEDED_DIRECTORY)
            logger.warning("%s was superseded; moved to %s", entry.path, place)

    # ---- after the commit

    def _lineage_now(self) -> Lineage:
        assert self.lineage is not None, "a save that was opened has one"
        return self.lineage

    def _stand_after(self, report: SaveReport) -> None:
        """The next save descends from this one."""
        if self.lineage is not None:
            self.lineage = replace(self.lineage, parent_id=report.checkpoint_id)

    def _committed(self, talk: Conversation, report: SaveReport, start_s: float) -> SaveReport:
        """What follows a save behind training; collective, in the thread of the save."""
        own: list[str] = []
        try:
            with led(talk, "settled"):
                own = self._settle(report) if talk.is_coordinator else []
            raw = json.dumps(own).encode() if talk.is_coordinator else None
            notes = json.loads(talk.broadcast("notes", raw))
        except (RankError, SaveOutcomeUnknownError) as error:  # the checkpoint is there
            notes = [*own, f"what followed the commit is not known: {error}"]
        self.took(time.monotonic() - start_s)
        return replace(report, notes=(*report.notes, *notes))

    def _settle(self, report: SaveReport) -> list[str]:
        """Mirrors, retention, links and forecast, by the coordinator alone; the save is done, so
        trouble here is a note."""
        self._stand_after(report)
        self.mirroring.add(report.path, report.checkpoint_id)
        notes = self._prune(report.checkpoint_id)
        for note in notes:
            logger.warning("%s", note)
        notes += self.mirroring.take_notes()
        self._saves += 1
        if self._saves > 1:
            return notes
        return notes + forecast(self.directory, report.nbytes, linked=report.linkable_nbytes)

    def _prune(self, *protect: str) -> list[str]:
        """Remove what no policy keeps, then move the links; notes of trouble."""
        copying = self.mirroring.busy
        self._kept_for_mirrors = bool(self.keep and copying)
        resumed = [] if self.resumed_id is None else [self.resumed_id]
        try:
            if self.keep:
                best = [self.best.as_retention()] if self.best is not None else []
                protected = [*resumed, *protect, *copying]
                prune_run(self.directory, [*self.keep, *best], protect=protected)
            return self._point(list_run(self.directory))
        except (CheckpointError, OSError) as error:
            return [f"old checkpoints are still there: {error}"]

    def _point(self, listing: RunListing) -> list[str]:
        targets = {links.LATEST: listing.newest.name} if listing.newest else {}
        if self.best is not None:
            best = best_entry(listing, self.best)
            targets |= {links.BEST: best.name} if best is not None else {}
        found = [links.point(self.directory, name, target) for name, target in targets.items()]
        return [note for note in found if note is not None]


def leaves_behind(lineage: Lineage, manifest: Manifest) -> bool:
    """Whether a save of `lineage` supersedes a checkpoint."""
    beyond = lineage.branch_step is None or manifest.step > lineage.branch_step
    return manifest.generation < lineage.generation and beyond


def history_entry(step: int, epoch: float | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """One line of `log_history`, as the Hugging Face Trainer keeps it."""
    when: dict[str, Any] = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
    return {**when, **values}
