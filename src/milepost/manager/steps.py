"""A training in the directory layout: `checkpoint-<step>` of one run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milepost._warn import warn_user
from milepost.checkpointing.capture import State, check_keys
from milepost.checkpointing.in_flight import saves, settle_earlier
from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.load import Verify
from milepost.checkpointing.load_request import Moments
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse
from milepost.errors import CheckpointWarning, InvalidInputError
from milepost.hf.trainer_state import BestCheckpoint
from milepost.layouts.run import RunEntry, list_run
from milepost.manager.best import BestMetric
from milepost.manager.best_of_run import best_of_run, require_best
from milepost.manager.decide import decide
from milepost.manager.mirror import Mirror, Mirroring
from milepost.manager.nearest import Choice, choice_of, require_mirrors
from milepost.manager.resume import Resume, patiently, require_committed
from milepost.manager.retention import RetentionPolicy
from milepost.manager.saving import SaveMode
from milepost.manager.step_choice import (
    all_damaged,
    cut_off,
    entry_of,
    look_at_run,
    nothing_there,
    require_nothing,
)
from milepost.manager.step_load import Damage, Named, Proof, damage_of, load_from, prove
from milepost.manager.step_save import StepSaver
from milepost.state.other import Kind

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Search:
    """How far a resume has looked for its checkpoint. `found` is the coordinator's.

    `number` is that of the candidate at hand, `passed` says what was passed over and why;
    `is_proven` when the candidate at hand is known to be sound, `is_told` when the log has that
    there is none.
    """

    told: Mapping[str, Any]
    found: list[Choice]
    passed: list[str]
    number: int = 0
    is_proven: bool = False
    is_told: bool = False


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
        self._search: _Search | None = None

    @property
    def _mirrors(self) -> tuple[Mirror, ...]:
        return self.mirroring.mirrors

    def choose(self, moments: Moments) -> Path | None:
        """What `load` will take, proven now, before there is a state; None for a fresh run.

        Collective; refused as `load` is. Nothing changes in the run.
        """
        self._settle_saves()
        at_once = Verify.SIZES if self.verify is Verify.SIZES else Verify.DIGESTS
        proof = Proof(at_once, moments)  # nothing is read yet that could prove itself
        match self.resume:
            case Path():
                path = self.resume
                decide(lambda: patiently(lambda: require_committed(path), path))
                is_proven = prove(path, proof, None) is None
                self._search = _Search(told={}, found=[], passed=[], is_proven=is_proven)
                return path
            case Resume.NEVER:
                return None
        search = self._search = self._search or self._begin_search()
        for named, path in self._rest_of(search):
            got = damage_of(functools.partial(prove, path, proof, named))
            if isinstance(got, Damage):
                search.passed.append(f"{named.name}: {got.text}")
                continue
            search.is_proven = got is None
            return path
        self._require_begun(search)
        return None

    def load(self, state: State, options: dict[str, Any]) -> LoadReport | None:
        """Fill `state` from what `resume` says. `options` are keywords of `milepost.load`.

        Collective: the coordinator's `resume` decides, and only it lists the directory. Waits for
        a save in flight, and raises what one failed with.
        """
        self._settle_saves()
        search, self._search = self._search, None
        report: LoadReport | None
        match self.resume:
            case Path():
                report = self._load_named(self.resume, state, options, search)
            case Resume.NEVER:
                report = decide(self._begin_again)
            case Resume.AUTO | Resume.MUST:
                report = self._load_newest(state, options, search or self._begin_search())
        if report is None:
            return None
        self.load_report = report
        self.saver.resumed_id = report.checkpoint_id
        self.mirroring.protected = set(filter(None, [report.checkpoint_id]))
        self.saver.log_history = _read_history(report)
        for line in report.lines():
            logger.info("%s", line)
        return report

    def load_best(self, state: State, options: dict[str, Any]) -> LoadReport:
        """Fill the models of `state` from the best checkpoint of the run; collective."""
        models = {key: state[key] for key, kind in check_keys(state).items() if kind is Kind.MODEL}
        if not models:
            raise InvalidInputError(
                "load_best takes models, and the state has none; pass {'model': model}"
            )
        self._settle_saves()
        told = decide(lambda: asdict(self._named(require_best(self.directory, self.saver.best))))
        named, proof = Named(**told), Proof(self.verify, Moments.FRESH)
        report = load_from(self.directory / named.name, models, options, proof, named)
        for line in report.lines():
            logger.info("%s", line)
        return report

    def best(self) -> BestCheckpoint | None:
        """The best checkpoint of the run as it is on disk; collective."""
        self._settle_saves()
        found = decide(lambda: _as_document(best_of_run(self.directory, self.saver.best)))
        return None if found is None else BestCheckpoint(**found)

    def _settle_saves(self) -> None:
        saves.drain()
        with converse() as talk:
            settle_earlier(talk)

    def _begin_again(self) -> None:
        self.saver.lineage = self.saver.next_lineage()

    def _begin_search(self) -> _Search:
        found: list[Choice] = []
        told = decide(lambda: self._choice(found))
        return _Search(told=told, found=found, passed=list(told["passed"]))

    def _rest_of(self, search: _Search) -> Iterator[tuple[Named, Path]]:
        """The candidates that were not passed over yet, with where this rank sees them."""
        places = [self.directory, *(mirror.directory for mirror in self._mirrors)]
        candidates = search.told["candidates"]
        while search.number < len(candidates):
            fields, place = candidates[search.number]
            named = Named(**fields)
            path = places[place] / named.name
            if search.found:  # the coordinator, which sees names through an unfinished change
                path = search.found[0].candidates[search.number].entry.path
            yield named, path
            search.number += 1
            search.is_proven = False

    def _require_begun(self, search: _Search) -> None:
        """Return when there is no candidate at all: the run is a fresh one."""
        if search.told["candidates"]:
            raise all_damaged(self.directory, [*search.passed, *search.told["troubles"]])
        if not search.is_told:
            text = "; ".join(["no checkpoint to resume from, a fresh run", *search.passed])
            logger.warning("%s: %s", self.directory, text)
            search.is_told = True

    def _load_newest(
        self, state: State, options: dict[str, Any], search: _Search
    ) -> LoadReport | None:
        told, passed = search.told, search.passed
        for named, path in self._rest_of(search):
            proof = None if search.is_proven else Proof(self.verify, _moments(options))
            got = damage_of(functools.partial(load_from, path, state, options, proof, named))
            if isinstance(got, Damage):
                passed.append(f"{named.name}: {got.text}")
                continue
            if told["candidates"][search.number][1] and named.name not in told["names"]:
                passed.append(f"{named.name}: gone from {self.directory}; {path} is a copy of it")
            got.passed_over = passed
            if search.found:
                self._go_on(search.found[0], search.number, passed)
            return got
        self._require_begun(search)
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
        named = [self._named(each.entry) for each in choice.candidates]
        names: list[str] = []
        passed = [f"{entry.name}: {entry.reason}" for entry in choice.torn]
        if listing is not None:
            newest = choice.candidates[0].entry.step if choice.candidates else 0
            passed += cut_off(listing, newest)
            names += [entry.name for entry in listing.committed]
            names += [entry.name for entry in listing.torn]
        return {
            "candidates": [
                (asdict(name), each.place)
                for name, each in zip(named, choice.candidates, strict=True)
            ],
            "names": names,
            "passed": passed,
            "troubles": choice.troubles,
        }

    @staticmethod
    def _named(entry: RunEntry) -> Named:
        return Named(
            name=entry.name,
            checkpoint_id=entry.manifest.checkpoint_id,
            generation=entry.manifest.generation,
        )

    def _load_named(
        self, path: Path, state: State, options: dict[str, Any], search: _Search | None
    ) -> LoadReport:
        if search is None:
            decide(lambda: patiently(lambda: require_committed(path), path))
        is_proven = search is not None and search.is_proven
        proof = None if is_proven else Proof(self.verify, _moments(options))
        report = load_from(path, state, options, proof, None)

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


def _moments(options: Mapping[str, Any]) -> Moments:
    found = options.get("moments", Moments.RESTORE)
    return found if isinstance(found, Moments) else Moments.RESTORE


def _as_document(best: BestCheckpoint | None) -> dict[str, Any] | None:
    return None if best is None else asdict(best)
