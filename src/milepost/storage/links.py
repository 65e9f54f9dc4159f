"""Content that is not written again: further names of committed files, or clones of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from milepost.storage import fileops

LINKED_MODE = 0o444
"""Of a file with several names: who opens one of them for writing would change all."""
NO_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)
"""What a file system says that cannot link these two names."""


def link_committed(source: Path, place: Path) -> bool:
    """Give the file at `source` the further name `place`, or make a clone of it there.

    A clone is a file of its own that shares the bytes on disk, where the file system can do that.
    False where neither can be, or the file is gone.
    """
    try:
        fileops.link(source, place)
    except OSError as error:
        if error.errno not in NO_LINKS and error.errno != errno.ENOENT:
            raise
        return error.errno in NO_LINKS and _clone(source, place)
    try:
        if stat.S_IMODE(place.stat().st_mode) != LINKED_MODE:
            fileops.change_mode(place, LINKED_MODE)
    except PermissionError:  # it belongs to another user
        fileops.unlink(place)
        return _clone(source, place)
    return True


def _clone(source: Path, place: Path) -> bool:
    descriptor = fileops.open_file(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        is_cloned = fileops.clone_file(descriptor, source)
    finally:
        fileops.close_file(descriptor)
    if not is_cloned:
        fileops.unlink(place)
    return is_cloned


def sync_committed(path: Path) -> None:
    """Make the bytes of a file durable that another save wrote, perhaps without."""
    descriptor = fileops.open_file(path, os.O_RDONLY)
    try:
        fileops.sync_data(descriptor)
    finally:
        fileops.close_file(descriptor)
