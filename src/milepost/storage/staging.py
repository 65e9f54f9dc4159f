"""A directory that comes into being at once: staging, commit, left-overs.

A checkpoint directory is written under a hidden name in the directory that will hold it, and
renamed when everything in it is durable. What a crash leaves behind is recognised by that name and
removed by the next writer, unless its owner may still live.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from milepost.errors import ExistsError
from milepost.storage import atomic, fileops
from milepost.storage.intent import commit_names, finish_intent, remove_asides, remove_entry
from milepost.storage.lease import STALE_AFTER_S, Owner, RunLease, filesystem_age_s

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".milepost-staging-"
OWNER_NAME = ".owner.json"
INCOMPLETE_DIRECTORY = "_incomplete_checkpoints"


class StagingDirectory:
    """A hidden directory beside `target`, renamed to it by `commit`.

    Used as a context manager under the lease of the run; leaving it without `commit` removes what
    was written. `owns(path)` tells whether a committed directory is the one staged here: after a
    rename that failed with ENOENT or EEXIST on a network file system, it decides what happened.
    """

    def __init__(self, target: Path, *, unique: str, owns: Callable[[Path], bool]) -> None:
        self.target = target
        self.run = target.parent
        self.path = self.run / f"{STAGING_PREFIX}{unique}"
        self._owns = owns
        self._lease = RunLease.of(self.run)

    def __enter__(self) -> StagingDirectory:
        self._lease.__enter__()
        try:
            finish_intent(self.run)
            remove_leftovers(self.run)
            fileops.make_directory(self.path)
            atomic.write_new_file(self.path / OWNER_NAME, Owner.this_process().to_bytes())
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon()

    def _abandon(self) -> None:
        try:
            with suppress(OSError):  # the next writer removes what is left
                fileops.remove_tree(self.path)
        finally:
            self._lease.__exit__(None, None, None)

    def commit(self) -> None:
        """Publish: every file in it is durable already. `ExistsError` when the name is taken."""
        self._settle()
        try:
            fileops.rename_no_replace(self.path, self.target)
        except OSError as error:
            if not self._renamed_after_all(error):
                raise
        fileops.sync_directory(self.run)

    def commit_replacing(self) -> None:
        """Publish in place of the directory that has the name now, which is removed afterwards."""
        self._settle()
        fileops.sync_directory(self.run)
        if fileops.exchange(self.path, self.target):
            fileops.sync_directory(self.run)
            remove_entry(self.run, self.path.name)
            return
        commit_names(
            self.run, removes=(self.target.name,), renames=((self.path.name, self.target.name),)
        )

    def _settle(self) -> None:
        fileops.unlink(self.path / OWNER_NAME)
        for directory, _, _ in os.walk(self.path, topdown=False):
            fileops.sync_directory(directory)

    def _renamed_after_all(self, error: OSError) -> bool:
        if error.errno not in (errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY):
            return False
        if self._owns(self.target):
            return True
        if error.errno == errno.ENOENT:
            return False
        raise ExistsError(
            f"{self.target}: the name was taken while this checkpoint was being written; "
            "nothing was replaced",
            path=self.target,
        ) from error


def remove_leftovers(run: Path) -> None:
    """Remove what dead writers left in `run`; what may be alive is kept and reported."""
    remove_asides(run)
    for entry in list(os.scandir(run)):
        path = Path(entry.path)
        if not (entry.name.startswith(STAGING_PREFIX) and entry.is_dir(follow_symlinks=False)):
            continue
        if _may_be_alive(path):
            logger.warning("%s may belong to a job that still runs on another host; kept", path)
            continue
        logger.info("removing %s, left by a save that did not finish", path)
        fileops.remove_tree(path)


def _may_be_alive(staging: Path) -> bool:
    """The lease is ours, so a writer of this host that still has a staging directory is dead."""
    owner_path = staging / OWNER_NAME
    try:
        owner = Owner.from_bytes(owner_path.read_bytes())
    except FileNotFoundError:
        owner, owner_path = None, staging
    if owner is not None and owner.is_on_this_host():
        return False
    return owner is not None and filesystem_age_s(owner_path) < STALE_AFTER_S


def move_to_incomplete(run: Path, name: str) -> Path:
    """Move a torn or foreign entry of `run` out of the way, its data kept; where it lies now."""
    shelf = run / INCOMPLETE_DIRECTORY
    fileops.make_directories(shelf)
    place, number = shelf / name, 0
    while os.path.lexists(place):
        number += 1
        place = shelf / f"{name}.{number}"
    fileops.rename_no_replace(run / name, place)
    fileops.sync_directory(shelf)
    fileops.sync_directory(run)
    logger.warning("%s was not a committed checkpoint; moved to %s", run / name, place)
    return place
