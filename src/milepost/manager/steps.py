"""A training in the directory layout: `checkpoint-<step>` of one run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost._warn import warn_user
from milepost.checkpointing.capture import State
from milepost.checkpointing.load import Verify, load
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.save import save
from milepost.checkpointing.save_run import Lineage, SaveReport
from milepost.engine.read import ReadOptions
from milepost.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    InvalidInputError,
    LoadTornError,
)
from milepost.format.manifest import Manifest
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.run import RunEntry, RunListing, list_run
from milepost.layouts.trio_meta import plain_numbers
from milepost.manager import links
from milepost.manager.best import BestMetric
from milepost.manager.prune import kept_entries, prune_run
from milepost.manager.resume import Resume, patiently, require_sound
from milepost.manager.retention import RetentionPolicy
from milepost.manager.schedules import schedule_notes, settings_of
from milepost.manager.space_forecast import forecast
from milepost.manager.step_choice import (
    all_damaged,
    candidates,
    entry_of,
    look_at_run,
    newer_torn,
    next_generation,
    nothing_there,
)
from milepost.storage.staging import move_aside, move_to_incomplete

logger = logging.getLogger(__name__)

SUPERSEDED_DIRECTORY = "_superseded_checkpoints"


class StepRun:
    """What `CheckpointManager` does in the directory layout; see there."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: Sequence[RetentionPolicy],
        resume: Resume | Path,
        best: BestMetric | None,
        verify: Verify,
    ) -> None:
        self.directory, self.keep, self.resume = directory, keep, resume
        self.best, self.verify = best, verify
        self.log_history: list[dict[str, Any]] = []
        self.load_report: LoadReport | None = None
        self._lineage: Lineage | None = None
        self._resumed_id: str | None = None
        self._saves = 0

    # ---- saving

    def save(self, step: int, state: State, options: dict[str, Any]) -> SaveReport:
        """`options` are keywords of `milepost.save`, all but `lineage` and `log_history`."""
        lineage = self._next_lineage()
        metrics = plain_numbers(options.get("metrics") or {})
        history = list(self.log_history)
        if metrics:
            history.append(history_entry(step, options.get("epoch"), metrics))
        self._clear_name(step, lineage)
        report = save(
            self.directory / f"checkpoint-{step}",
            state,
            step=step,
            log_history=history,
            lineage=lineage,
            **options,
        )
        self._lineage = replace(lineage, parent_id=report.checkpoint_id)
        if not report.written:
            return report
        self.log_history = history
        notes = [*report.notes, *self._settle(report)]
        self._saves += 1
        return replace(report, notes=tuple(notes))

    def _next_lineage(self) -> Lineage:
        if self._lineage is not None:
            return self._lineage
        listing = list_run(self.directory)
        if self.resume is Resume.NEVER:
            return Lineage(generation=next_generation(listing))
        if listing.committed or listing.torn or self.resume is not Resume.AUTO:
            raise InvalidInputError(
                f"{self.directory}: call manager.resume(state) before the first save, so that "
                f"resume={self.resume} is carried out; to begin again beside what is there, pass "
                "resume=Resume.NEVER"
            )
        return Lineage()

    def _clear_name(self, step: int, lineage: Lineage) -> None:
        """Move away what has the step's name and is torn, or of a branch that is left behind."""
        name = f"checkpoint-{step}"
        listing = list_run(self.directory)
        if any(entry.name == name for entry in listing.torn):
            move_to_incomplete(self.directory, name)
        entry = next((entry for entry in listing.committed if entry.name == name), None)
        if entry is not None and (entry.superseded or _leaves_behind(lineage, entry.manifest)):
            place = move_aside(self.directory, name, SUPERSEDED_DIRECTORY)
            logger.warning("%s was superseded; moved to %s", entry.path, place)

    def _settle(self, report: SaveReport) -> list[str]:
        """Retention, links and forecast; the save is done, so trouble here is a note."""
        notes: list[str] = []
        protect = [name for name in (self._resumed_id, report.checkpoint_id) if name is not None]
        try:
            if self.keep:
                best = [self.best.as_retention()] if self.best is not None else []
                prune_run(self.directory, [*self.keep, *best], protect=protect)
            notes += self._point(list_run(self.directory))
        except (CheckpointError, OSError) as error:
            notes.append(f"old checkpoints are still there: {error}")
        for note in notes:
            logger.warning("%s", note)
        return notes + (forecast(self.directory, report.nbytes) if self._saves == 0 else [])

    def _point(self, listing: RunListing) -> list[str]:
        targets = {links.LATEST: listing.newest.name} if listing.newest else {}
        if self.best is not None:
            kept = self.best.as_retention().keeps(kept_entries(listing))
            best = [entry.name for entry in listing.current if entry.step in kept]
            targets |= {links.BEST: best[-1]} if best else {}
        found = [links.point(self.directory, name, target) for name, target in targets.items()]
        return [note for note in found if note is not None]

    # ---- resuming

    def load(self, state: State, options: dict[str, Any]) -> LoadReport | None:
        """Fill `state` from what `resume` says. `options` are keywords of `milepost.load`."""
        match self.resume:
            case Resume.NEVER:
                self._lineage = self._next_lineage()
                return None
            case Path():
                report = self._load_from(self.resume, state, options)
                self._lineage = self._lineage_after_named(self.resume, report)
            case Resume.AUTO | Resume.MUST:
                found = self._load_newest(self.resume, state, options)
                if found is None:
                    self._lineage = Lineage()
                    return None
                report = found
        self.load_report = report
        self._resumed_id = report.checkpoint_id
        self.log_history = _read_history(report)
        for line in report.lines():
            logger.info("%s", line)
        return report

    def _load_newest(
        self, resume: Resume, state: State, options: dict[str, Any]
    ) -> LoadReport | None:
        listing = look_at_run(self.directory)
        if listing is None:
            if resume is Resume.MUST:
                raise nothing_there(self.directory)
            return None
        found = candidates(self.directory, listing, resume)
        passed = [f"{entry.name}: {entry.reason}" for entry in newer_torn(listing)]
        for entry in found:
            try:
                report = self._load_from(entry.path, state, options)
            except DamagedError as error:
                passed.append(f"{entry.name}: {error}")
                continue
            except LoadTornError as error:
                if not isinstance(error.__cause__, DamagedError):
                    raise
                passed.append(f"{entry.name}: {error.__cause__}")
                continue
            report.passed_over = passed
            for text in passed:
                warn_user(f"{entry.path} is resumed from, not {text}", CheckpointWarning)
            self._lineage = _lineage_after(entry, listing, is_newest=not passed)
            return report
        if found:
            raise all_damaged(self.directory, passed)
        return None

    def _load_from(self, path: Path, state: State, options: dict[str, Any]) -> LoadReport:
        """Verify, then load: only the load touches the state."""
        before = {key: settings_of(value) for key, value in state.items()}
        if self.verify is Verify.DIGESTS:
            threads = ReadOptions().threads
            patiently(lambda: require_sound(Checkpoint.open(path), threads), path)
        report = patiently(lambda: load(path, state, verify=Verify.SIZES, **options), path)
        for key, settings in before.items():
            report.notes += schedule_notes(key, settings, settings_of(state[key]))
        return report

    def _lineage_after_named(self, path: Path, report: LoadReport) -> Lineage:
        """After a resume from a path that the caller named, in this run or from elsewhere."""
        listing = list_run(self.directory)
        entry = entry_of(listing, path)
        if entry is not None:
            return _lineage_after(entry, listing, is_newest=entry == listing.newest)
        return Lineage(parent_id=report.checkpoint_id, generation=next_generation(listing))


def _leaves_behind(lineage: Lineage, manifest: Manifest) -> bool:
    """Whether a save of `lineage` supersedes a checkpoint."""
    beyond = lineage.branch_step is None or manifest.step > lineage.branch_step
    return manifest.generation < lineage.generation and beyond


def _lineage_after(entry: RunEntry, listing: RunListing, *, is_newest: bool) -> Lineage:
    """The next save's: the same generation after the newest, a new one after any other."""
    manifest = entry.manifest
    if is_newest:
        return Lineage(
            parent_id=manifest.checkpoint_id,
            generation=manifest.generation,
            branch_step=manifest.branch_step,
        )
    return Lineage(
        parent_id=manifest.checkpoint_id,
        generation=next_generation(listing),
        branch_step=manifest.step,
    )


def history_entry(step: int, epoch: float | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """One line of `log_history`, as the Hugging Face Trainer keeps it."""
    when: dict[str, Any] = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
    return {**when, **values}


def _read_history(report: LoadReport) -> list[dict[str, Any]]:
    """What was logged until the checkpoint; the file only informs, so trouble is a note."""
    path = report.path / "trainer_state.json"
    try:
        history = json.loads(path.read_bytes())["log_history"]
        return [dict(entry) for entry in history]
    except (OSError, ValueError, KeyError, TypeError) as error:
        report.notes.append(f"{path}: the history of the run begins anew: {error!r:.100}")
        return []
