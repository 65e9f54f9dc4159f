"""How much room there is, told before the bytes are written."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

from milepost.errors import NoSpaceError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_nbytes(path: Path) -> int:
    """Bytes that this user may still write beside `path`; asks its nearest existing parent.

    A file system that tells no size at all counts as endless.
    """
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    if stat.f_blocks == 0:
        return 2**63 - 1
    return (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail) * stat.f_frsize


def human(nbytes: float) -> str:
    """`nbytes` in the largest binary unit that keeps it above 1, such as `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(int(math.log2(nbytes) // 10), 4)
    return f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def require_space(path: Path, needed_nbytes: int) -> None:
    """Raise `NoSpaceError` when the file system of `path` shows less room than is needed.

    Quotas are not seen by this; a write may still fail.
    """
    free = free_nbytes(path)
    if free < needed_nbytes:
        raise no_space(path, needed_nbytes)


def no_space(path: Path, needed_nbytes: int | None) -> NoSpaceError:
    free = free_nbytes(path)
    needed = "more room" if needed_nbytes is None else human(needed_nbytes)
    return NoSpaceError(
        f"{path}: the save needs {needed}, the file system has {human(free)} free (or a quota is "
        "reached); nothing was kept of this save, earlier checkpoints are untouched; free space "
        "or prune the run (milepost prune)",
        path=path,
        needed_nbytes=needed_nbytes,
        free_nbytes=free,
    )


def visible_error(error: OSError, path: Path) -> StorageError:
    """The error for what failed after `path` had got its new content: readers see that already."""
    return StorageError(
        f"{error.filename or path}: {error.strerror or error} after the new {path.name} was in "
        "place: it is complete and readers see it, but it may not survive a power cut; save again "
        "when the disk is well",
        path=path,
        number=error.errno,
    )


def storage_error(error: OSError, path: Path, *, needed_nbytes: int | None = None) -> StorageError:
    """The error of Milepost for a failed system call on `path`."""
    if isinstance(error, StorageError):
        return error
    if error.errno in _FULL:
        return no_space(path, needed_nbytes)
    where = error.filename or path
    text = error.strerror or str(error)
    return StorageError(
        f"{where}: {text} while saving; nothing of this save counts, earlier checkpoints are "
        "untouched",
        path=path,
        number=error.errno,
    )
