"""Hard links to committed files: further names, for content that is not written again."""

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
    """Give the file at `source` the further name `place`; False where that cannot be, or it is
    gone."""
    try:
        fileops.link(source, place)
    except OSError as error:
        if error.errno not in NO_LINKS and error.errno != errno.ENOENT:
            raise
        return False
    try:
        if stat.S_IMODE(place.stat().st_mode) != LINKED_MODE:
            fileops.change_mode(place, LINKED_MODE)
    except PermissionError:  # it belongs to another user
        fileops.unlink(place)
        return False
    return True


def sync_committed(path: Path) -> None:
    """Make the bytes of a file durable that another save wrote, perhaps without."""
    descriptor = fileops.open_file(path, os.O_RDONLY)
    try:
        fileops.sync_data(descriptor)
    finally:
        fileops.close_file(descriptor)
