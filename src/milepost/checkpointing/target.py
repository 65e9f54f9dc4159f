"""What a save finds at its target, and what it may do there."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from milepost.errors import DamagedError, ExistsError, InvalidInputError, NotFoundError
from milepost.format.manifest import MANIFEST_NAME, Manifest
from milepost.layouts.directory import DirectoryCheckpoint, check_step_name, require_intact
from milepost.layouts.run import STEP_NAME
from milepost.storage.intent import resolve_name


class OnExisting(Enum):
    """What a save does when its directory holds a committed checkpoint already."""

    ERROR = "error"
    KEEP = "keep"
    """Leave the old one and return, for callers that save their last step twice."""
    REPLACE = "replace"
    """Exchange old and new at once; a reader sees all of one or all of the other."""


def check_step(target: Path, step: int) -> int:
    """`step`, once it is known to be one and to be what the name of `target` states."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InvalidInputError(f"step={step!r}: expected an integer from 0 up")
    if target.name in ("", ".", ".."):
        raise InvalidInputError(f"{target}: name the checkpoint's own directory, checkpoint-{step}")
    check_step_name(target, step)
    return step


def committed_at(target: Path) -> Manifest | None:
    """The manifest of a committed checkpoint at `target`; None when nothing there counts.

    A damaged one does not count: a file that matters is absent or of another size. One that cannot
    be read, or that a newer version wrote, is an error: it may count.
    """
    place = resolve_name(target.parent, target.name)
    try:
        checkpoint = DirectoryCheckpoint(place)
        require_intact(checkpoint, ["weights", "state"])
    except (NotFoundError, DamagedError):
        return None
    return checkpoint.manifest


def check_target(target: Path, on_existing: OnExisting) -> Manifest | None:
    """The committed checkpoint that is there, after `ExistsError` for what may not be touched.

    What lies under the name of a step and is no committed checkpoint is ours or torn, and may be
    moved aside; what lies under another name is somebody's.
    """
    existing = committed_at(target)
    if existing is not None:
        if on_existing is OnExisting.ERROR:
            raise taken(target, existing)
        return existing
    is_ours = STEP_NAME.fullmatch(target.name) or (target / MANIFEST_NAME).is_file()
    if os.path.lexists(target) and not is_ours:
        raise ExistsError(
            f"{target}: something is there that is no checkpoint; save to a name that is free, "
            "such as checkpoint-<step> in a run directory",
            path=target,
        )
    return None


def taken(target: Path, existing: Manifest) -> ExistsError:
    """The error for a name that holds a committed checkpoint."""
    return ExistsError(
        f"{target}: a committed checkpoint of step {existing.step} is there; pass "
        "on_existing=OnExisting.REPLACE to exchange it, or OnExisting.KEEP to leave it",
        path=target,
    )
