"""A training in the directory layout: `checkpoint-<step>` of one run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from milepost._warn import warn_user
from milepost.checkpointing.capture import State
from milepost.checkpointing.in_flight import saves, settle_earlier
from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.load import Verify
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse
from milepost.errors import CheckpointWarning
from milepost.layouts.run import RunEntry, list_run
from milepost.manager.best import BestMetric
from milepost.manager.decide import decide
from milepost.manager.mirror import Mirror, Mirroring
from milepost.manager.nearest import Choice, choice_of, require_mirrors
from milepost.manager.resume import Resume
from milepost.manager.retention import RetentionPolicy
from milepost.manager.saving import SaveMode
from milepost.manager.step_choice import (
    all_damaged,
    entry_of,
    look_at_run,
    nothing_there,
    require_nothing,
)
from milepost.manager.step_load import Named, damage_of, load_from
from milepost.manager.step_save import StepSaver

logger = logging.getLogger(__name__)


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
        mode: SaveMode,
        mirroring: Mirroring,
    ) -> None:
        self.directory, self.resume, self.verify = directory, resume, verify
        self.mirroring = mirroring
        self.saver = StepSaver(
            directory, keep=keep, resume=resume, best=best, mode=mode, mirroring=mirroring
        )
        self.load_report: LoadReport | None = None

    @property
    def _mirrors(self) -> tuple[Mirror, ...]:
        return self.mirroring.mirrors

    def load(self, state: State, options: dict[str, Any]) -> LoadReport | None:
        """Fill `state` from what `resume` says. `options` are keywords of `milepost.load`.

        Collective: the coordinator's `resume` decides, and only it lists the directory. Waits for
        a save in flight, and raises what one failed with.
        """
        saves.drain()
        with converse() as talk:
            settle_earlier(talk)
        report: LoadReport | None
        match self.resume:
            case Path():
                report = self._load_named(self.resume, state, options)
            case Resume.NEVER:
                report = decide(self._begin_again)
            case Resume.AUTO | Resume.MUST:
                report = self._load_newest(state, options)
        if report is None:
            return None
        self.load_report = report
        self.saver.resumed_id = report.checkpoint_id
        self.mirroring.protected = set(filter(None, [report.checkpoint_id]))
        self.saver.log_history = _read_history(report)
        for line in report.lines():
            logger.info("%s", line)
        return report

    def _begin_again(self) -> None:
        self.saver.lineage = self.saver.next_lineage()

    def _load_newest(self, state: State, options: dict[str, Any]) -> LoadReport | None:
        found: list[Choice] = []
        told = decide(lambda: self._choice(found))
        passed: list[str] = told["passed"]
        places = [self.directory, *(mirror.directory for mirror in self._mirrors)]
        for number, (fields, place) in enumerate(told["candidates"]):
            named = Named(**fields)
            path = places[place] / named.name
            if found:  # the coordinator, which sees names through an unfinished change
                path = found[0].candidates[number].entry.path
            got = damage_of(functools.partial(load_from, path, state, options, self.verify, named))
            if isinstance(got, str):
                passed.append(f"{named.name}: {got}")
                continue
            if place and named.name not in told["names"]:
                passed.append(f"{named.name}: gone from {self.directory}; {path} is a copy of it")
            got.passed_over = passed
            if found:
                self._go_on(found[0], number, passed)
            return got
        if told["candidates"]:
            raise all_damaged(self.directory, [*passed, *told["troubles"]])
        self.saver.lineage = Lineage()
        return None

    def _go_on(self, choice: Choice, number: int, passed: Sequence[str]) -> None:
        """The coordinator's: this candidate was loaded."""
        candidate = choice.candidates[number]
        entry = candidate.entry
        for text in passed:
            warn_user(f"{entry.path} is resumed from, not {text}", CheckpointWarning)
        self.saver.lineage = self._lineage_after(entry, is_newest=choice.is_newest(number))
        if candidate.place == 0:  # a mirror may lack it: the last process may have been killed
            self.mirroring.add(entry.path, entry.manifest.checkpoint_id)

    def _choice(self, found: list[Choice]) -> Mapping[str, Any]:
        """The candidates, newest first, kept in `found` too, and what is passed over anyway."""
        listing = look_at_run(self.directory)
        choice = choice_of(listing, self._mirrors)
        assert isinstance(self.resume, Resume), "a path has no candidates"
        if not choice.candidates:
            if listing is not None:
                require_nothing(self.directory, listing, self.resume)
            elif self.resume is Resume.MUST:
                raise nothing_there(self.directory)
            require_mirrors(self.directory, choice)
        found.append(choice)
        named = [
            Named(
                name=each.entry.name,
                checkpoint_id=each.entry.manifest.checkpoint_id,
                generation=each.entry.manifest.generation,
            )
            for each in choice.candidates
        ]
        names: list[str] = []
        if listing is not None:
            names += [entry.name for entry in listing.committed]
            names += [entry.name for entry in listing.torn]
        return {
            "candidates": [
                (asdict(name), each.place)
                for name, each in zip(named, choice.candidates, strict=True)
            ],
            "names": names,
            "passed": [f"{entry.name}: {entry.reason}" for entry in choice.torn],
            "troubles": choice.troubles,
        }

    def _load_named(self, path: Path, state: State, options: dict[str, Any]) -> LoadReport:
        report = load_from(path, state, options, self.verify)

        def stand() -> None:
            self.saver.lineage = self._lineage_after_named(path, report)

        decide(stand)
        return report

    def _lineage_after_named(self, path: Path, report: LoadReport) -> Lineage:
        """After a resume from a path that the caller named, in this run or from elsewhere."""
        listing = list_run(self.directory)
        entry = entry_of(listing, path)
        if entry is not None:
            newest = choice_of(listing, self._mirrors).candidates[0].entry.manifest
            is_newest = entry.manifest.checkpoint_id == newest.checkpoint_id
            return self._lineage_after(entry, is_newest=is_newest)
        generation = self.saver.new_generation(listing)
        return Lineage(parent_id=report.checkpoint_id, generation=generation)

    def _lineage_after(self, entry: RunEntry, *, is_newest: bool) -> Lineage:
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
            generation=self.saver.new_generation(list_run(self.directory)),
            branch_step=manifest.step,
        )


def _read_history(report: LoadReport) -> list[dict[str, Any]]:
    """What was logged until the checkpoint; the file only informs, so trouble is a note."""
    path = report.path / "trainer_state.json"
    try:
        history = json.loads(path.read_bytes())["log_history"]
        return [dict(entry) for entry in history]
    except (OSError, ValueError, KeyError, TypeError) as error:
        report.notes.append(f"{path}: the history of the run begins anew: {error!r:.100}")
        return []
