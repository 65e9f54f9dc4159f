"""`latest` and `best`: relative symlinks for people. Milepost never reads them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from milepost.storage import fileops
from milepost.storage.atomic import remove_quietly, temporary_name

LATEST = "latest"
BEST = "best"


def point(run: Path, name: str, target: str) -> str | None:
    """Make the symlink `run/name` lead to the entry `target` of `run`, at once.

    Returns why it could not, for a note: a checkpoint is no worse without them.
    """
    link = run / name
    if os.path.lexists(link) and not link.is_symlink():
        return f"{link} is no symlink and is left as it is"
    with suppress(OSError):
        if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115
            return None
    temporary = temporary_name(link)
    try:
        _remove_leftovers(run, name)
        fileops.symlink(target, temporary)
        fileops.rename(temporary, link)
        fileops.sync_directory(run)
    except OSError as error:
        remove_quietly(temporary)
        return f"{link}: no symlink to {target}: {error.strerror}"
    return None


def _remove_leftovers(run: Path, name: str) -> None:
    left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in list(os.scandir(run)):
        if entry.is_symlink() and left.fullmatch(entry.name):
            fileops.unlink(entry.path)
