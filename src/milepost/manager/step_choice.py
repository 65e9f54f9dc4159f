"""Which checkpoint of a run directory a training resumes from, and what it passes over."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from milepost.errors import (
    CheckpointError,
    DamagedError,
    NotCommittedError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.run import STEP_NAME, RunEntry, RunListing, TornEntry, list_run
from milepost.manager.resume import Resume, patiently
from milepost.manager.trio_run import names_there
from milepost.storage.staging import STAGING_PREFIX, is_left_over

_STAGED = re.compile(rf"{re.escape(STAGING_PREFIX)}.*-({STEP_NAME.pattern})")


def look_at_run(run: Path) -> RunListing | None:
    """The listing of a run; None when the directory does not exist.

    What cannot be reached, or was written by a newer version, may be the newest of all: that is
    raised, never taken for damage.
    """
    if not run.is_dir():
        return None

    def look() -> RunListing:
        listing = list_run(run)
        for entry in newer_torn(listing):
            _require_ruled_out(entry)
        return listing

    return patiently(look, run)


def newer_torn(listing: RunListing) -> list[TornEntry]:
    """Torn entries whose step is beyond the newest committed one."""
    newest = -1 if listing.newest is None else listing.newest.step
    return [entry for entry in listing.torn if step_of(entry) > newest]


def cut_off(listing: RunListing, newest: int) -> list[str]:
    """Saves of the step `newest` and later ones that a dead process left unfinished, by name."""
    found: dict[str, str] = {}
    for name in listing.unfinished:
        match = _STAGED.fullmatch(name)
        if match and int(match[2]) >= newest and is_left_over(listing.run / name):
            found[match[1]] = f"{match[1]}: its save was cut off; the next save removes {name}"
    return list(found.values())


def _require_ruled_out(entry: TornEntry) -> None:
    try:
        _ = DirectoryCheckpoint(entry.path).damage
    except (UnsupportedVersionError, StorageError):
        raise
    except CheckpointError:
        return


def step_of(entry: TornEntry) -> int:
    """The step that its name states."""
    match = STEP_NAME.fullmatch(entry.name)
    assert match is not None, "an entry of a run is called checkpoint-<step>"
    return int(match[1])


def require_nothing(run: Path, listing: RunListing, resume: Resume) -> None:
    """Return when a run without committed checkpoints is a fresh one.

    `NotCommittedError` when there are only torn or foreign ones, `NotFoundError` when there is
    nothing and `resume` demands something.
    """
    found = [f"{entry.name} ({entry.reason})" for entry in listing.torn]
    found += [f"{name} (the trio layout)" for name in names_there(run)]
    if found:
        raise NotCommittedError(
            f"{run}: nothing was ever committed, but it holds {'; '.join(found[:5])}; correct the "
            "directory, name a checkpoint with resume=path, or pass resume=Resume.NEVER to begin "
            "again",
            path=run,
        )
    if resume is Resume.MUST:
        raise nothing_there(run)


def nothing_there(run: Path) -> NotFoundError:
    """The error of `Resume.MUST` for an empty place."""
    return NotFoundError(
        f"{run}: no checkpoint to resume from; correct the directory, or pass resume=Resume.AUTO "
        "to begin when there is nothing",
        path=run,
    )


def all_damaged(run: Path, passed: list[str]) -> DamagedError:
    """The error when every committed checkpoint is proven damaged."""
    return DamagedError(
        f"{run}: no checkpoint can be used: {'; '.join(passed)}; a fresh run has to be asked for: "
        "resume=Resume.NEVER",
        path=run,
    )


def next_generation(listing: RunListing) -> int:
    """One more than any generation that shows in a run, in torn checkpoints too."""
    return max(_generations(listing), default=-1) + 1


def _generations(listing: RunListing) -> Iterator[int]:
    for entry in listing.committed:
        yield entry.manifest.generation
    for torn in listing.torn:
        try:
            yield DirectoryCheckpoint(torn.path).manifest.generation
        except (CheckpointError, OSError):
            continue


def entry_of(listing: RunListing, path: Path) -> RunEntry | None:
    """The entry of a run that `path` leads to, however it is spelled."""
    real = os.path.realpath(path)
    return next((e for e in listing.committed if os.path.realpath(e.path) == real), None)
