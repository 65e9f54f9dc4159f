"""Removing the checkpoints of a run that no retention policy keeps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from milepost.errors import InvalidInputError, StorageError
from milepost.layouts.run import RunEntry, RunListing, list_run
from milepost.manager.pins import pins_of
from milepost.manager.retention import Kept, RetentionPolicy, age_s, union
from milepost.storage.intent import finish_intent, remove_entry
from milepost.storage.lease import RunLease

logger = logging.getLogger(__name__)


class Superseded(Enum):
    """What happens to checkpoints of an older generation beyond the step it was left at."""

    KEEP = "keep"
    REMOVE = "remove"


class PruneMode(Enum):
    REMOVE = "remove"
    DRY_RUN = "dry-run"
    """Say what would go; change nothing and take no lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A checkpoint that goes. `nbytes` is what that frees: files that a later checkpoint links, or
    anybody else, stay on disk until their last name goes."""

    entry: RunEntry
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was removed, or would be, oldest first; `kept` maps the other steps to the reasons."""

    run: Path
    mode: PruneMode
    removed: tuple[Removal, ...]
    kept: dict[int, tuple[str, ...]]
    pins: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes freed."""
        return sum(removal.nbytes for removal in self.removed)


def kept_entries(listing: RunListing, now: datetime | None = None) -> list[Kept]:
    """The checkpoints that retention counts: committed and not superseded, the newest last."""
    now = now or datetime.now(UTC)
    return [
        Kept(
            step=entry.step,
            metrics=entry.manifest.metrics,
            age_s=age_s(entry.manifest.created, now) or 0.0,
        )
        for entry in listing.current
    ]


def reasons_to_keep(
    listing: RunListing,
    policies: Sequence[RetentionPolicy],
    *,
    pinned: Collection[int],
    protect: Collection[str],
    superseded: Superseded,
    now: datetime | None = None,
) -> dict[int, list[str]]:
    """Why each step stays; a committed step that is not in here may go. Pure.

    The newest stays whatever the policies say, and so do pinned steps and the checkpoint ids in
    `protect` (the one resumed from, the one just written).
    """
    reasons: dict[int, list[str]] = {}
    for entry in listing.committed:
        found = reasons.setdefault(entry.step, [])
        found += ["newest"] if entry is listing.newest else []
        found += ["pinned"] if entry.step in pinned else []
        found += ["protected"] if entry.manifest.checkpoint_id in protect else []
        if entry.superseded and superseded is Superseded.KEEP:
            found.append("superseded, not asked for")
    for step, names in union(policies, kept_entries(listing, now)).items():
        reasons[step] += names
    return {step: found for step, found in reasons.items() if found}


def prune_run(
    run: Path,
    policies: Sequence[RetentionPolicy],
    *,
    protect: Collection[str] = (),
    superseded: Superseded = Superseded.KEEP,
    mode: PruneMode = PruneMode.REMOVE,
    now: datetime | None = None,
) -> PruneReport:
    """Remove the checkpoints of `run` that no policy keeps, oldest first.

    Never goes: the newest, pinned steps, the checkpoint ids in `protect`, superseded checkpoints
    unless asked for, and whatever is not a committed checkpoint (torn or foreign directories,
    trios, `.pt` files). Each one is renamed out of the way before its files are removed. Holds the
    lease of the run: `RunInUseError` while another process writes there.
    """
    if not policies:
        raise InvalidInputError(
            f"{run}: no retention policy, which would keep the newest checkpoint alone; "
            "say what to keep, for instance KeepLast(3)"
        )
    listing = list_run(run)
    if mode is PruneMode.DRY_RUN:
        return _planned(listing, policies, protect, superseded, mode, now)
    try:
        with RunLease.of(run):
            finish_intent(run)
            report = _planned(list_run(run), policies, protect, superseded, mode, now)
            return _removed(report)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{error.filename or run}: {error.strerror}; nothing was removed, all checkpoints of "
            f"{run} are untouched",
            path=run,
            number=error.errno,
        ) from error


def _planned(
    listing: RunListing,
    policies: Sequence[RetentionPolicy],
    protect: Collection[str],
    superseded: Superseded,
    mode: PruneMode,
    now: datetime | None,
) -> PruneReport:
    pinned = pins_of(listing.run)
    reasons = reasons_to_keep(
        listing, policies, pinned=pinned, protect=protect, superseded=superseded, now=now
    )
    gone: Counter[tuple[int, int]] = Counter()
    return PruneReport(
        run=listing.run,
        mode=mode,
        removed=tuple(
            Removal(entry=entry, nbytes=_nbytes_freed(entry.path, gone))
            for entry in listing.committed
            if entry.step not in reasons
        ),
        kept={step: tuple(found) for step, found in reasons.items()},
        pins=pinned,
    )


def _removed(report: PruneReport) -> PruneReport:
    """Carry it out; a step that was pinned meanwhile stays."""
    removed: list[Removal] = []
    kept = dict(report.kept)
    for removal in report.removed:
        entry = removal.entry
        if entry.step in pins_of(report.run):
            kept[entry.step] = ("pinned",)
            continue
        try:
            remove_entry(report.run, entry.name)
        except OSError as error:
            raise StorageError(
                f"{error.filename or entry.path}: {error.strerror} while removing {entry.name}; "
                f"{len(removed)} of {len(report.removed)} checkpoints were removed, the others "
                "are untouched",
                path=entry.path,
                number=error.errno,
            ) from error
        logger.info("removed %s: no retention policy keeps it", entry.path)
        removed.append(removal)
    return PruneReport(
        run=report.run, mode=report.mode, removed=tuple(removed), kept=kept, pins=report.pins
    )


def _nbytes_freed(path: Path, gone: Counter[tuple[int, int]]) -> int:
    """Bytes of the files below `path` whose last name goes; `gone` counts names by file."""
    freed = 0
    for place in path.rglob("*"):
        if not place.is_dir():
            status = place.lstat()
            file = status.st_dev, status.st_ino
            gone[file] += 1
            freed += status.st_size if gone[file] == status.st_nlink else 0
    return freed
