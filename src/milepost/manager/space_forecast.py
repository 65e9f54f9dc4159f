"""Whether the next saves will fit, told at the first one."""

from __future__ import annotations

import logging
from pathlib import Path

from milepost.storage.space import free_nbytes, human

logger = logging.getLogger(__name__)
SAVES_AHEAD = 2


def forecast(directory: Path, nbytes: int, *, linked: int = 0) -> list[str]:
    """A note, logged as a warning, when two more saves of `nbytes` do not fit the disk now.

    Of these, `linked` will be links to what is there.
    """
    try:
        free, new = free_nbytes(directory), nbytes - linked
    except OSError as error:  # the save is done
        return [f"{directory}: whether the next saves fit is not known: {error.strerror}"]
    if free >= SAVES_AHEAD * new:
        return []
    shared = f" ({human(linked)} of it once for all)" if linked else ""
    note = (
        f"{directory}: a checkpoint takes {human(nbytes)}{shared} and {human(free)} are free: the "
        f"next {SAVES_AHEAD} saves do not fit; free space, or keep fewer (keep=KeepLast(1) needs "
        "room for two)"
    )
    logger.warning("%s", note)
    return [note]
