"""A directory that comes into being at once: staging, commit, left-overs.

A checkpoint directory is written under a hidden name in the directory that will hold it, and
renamed when everything in it is durable. What a crash leaves behind is recognised by that name and
removed by the next writer, unless its owner may still live.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from milepost.errors import ExistsError, FormatError
from milepost.storage import atomic, fileops
from milepost.storage.intent import commit_names, finish_intent, read_intent, remove_asides
from milepost.storage.lease import STALE_AFTER_S, Owner, RunLease, filesystem_age_s
from milepost.storage.space import visible_error

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".milepost-staging-"
OWNER_NAME = ".owner.json"
INCOMPLETE_DIRECTORY = "_incomplete_checkpoints"

_in_use: set[str] = set()  # staging directories that a thread of this process is writing


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
        self._stays = False  # what lies at `path` may be the only copy of something
        self._undo: Callable[[], object] | None = None  # once it is published and can be withdrawn

    def __enter__(self) -> StagingDirectory:
        self._lease.__enter__()
        try:
            finish_intent(self.run)
            remove_leftovers(self.run)
            _in_use.add(os.path.realpath(self.path))
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
            if not self._stays and not self._is_recorded():
                with suppress(OSError):  # the next writer removes what is left
                    fileops.remove_tree(self.path)
        finally:
            _in_use.discard(os.path.realpath(self.path))
            self._lease.__exit__(None, None, None)

    def _is_recorded(self) -> bool:
        """Whether an intent record says that this directory is to get its name."""
        try:
            intent = read_intent(self.run)
        except (OSError, FormatError):
            return True  # it may be; the next writer finds out
        return intent is not None and any(name == self.path.name for name, _ in intent.renames)

    def commit(self) -> None:
        """Publish: every file in it is durable already. `ExistsError` when the name is taken."""
        self._settle()
        try:
            fileops.rename_no_replace(self.path, self.target)
        except OSError as error:
            if not self._renamed_after_all(error):
                raise
        self._undo = lambda: fileops.rename_no_replace(self.target, self.path)
        self._sync_or_undo(self._undo)

    def commit_replacing(self) -> None:
        """Publish in place of the directory that has the name now, which is removed afterwards."""
        self._settle()
        fileops.sync_directory(self.run)
        if fileops.exchange(self.path, self.target):
            # Leaving the staging directory removes what lies there: the old content.
            self._undo = lambda: fileops.exchange(self.path, self.target)
            self._sync_or_undo(self._undo)
            return
        commit_names(
            self.run, removes=(self.target.name,), renames=((self.path.name, self.target.name),)
        )

    def withdraw(self) -> None:
        """Take back what was published, as long as this context lasts; nothing when nothing was.

        A directory that was replaced through an intent record is gone, and the new one stays.
        """
        if self._undo is not None:
            self._undo()
            fileops.sync_directory(self.run)
            self._undo = None

    def _sync_or_undo(self, undo: Callable[[], object]) -> None:
        """Make the new name durable, or take it back: a save that raises has published nothing.

        When that fails too, nothing is removed: a power cut may bring back either name.
        """
        try:
            fileops.sync_directory(self.run)
        except OSError as error:
            self._stays = True
            try:
                undo()
            except OSError:
                raise visible_error(error, self.target) from error
            with suppress(OSError):
                fileops.sync_directory(self.run)
                self._stays = False
            raise

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


@contextmanager
def left_alone(path: Path) -> Iterator[None]:
    """Let no thread of this process take the directory `path` for what a dead writer left."""
    place = os.path.realpath(path)
    _in_use.add(place)
    try:
        yield
    finally:
        _in_use.discard(place)


def remove_leftovers(run: Path) -> None:
    """Remove what dead writers left in `run`; what may be alive is kept and reported."""
    remove_asides(run)
    found = [entry for entry in os.scandir(run) if entry.name.startswith(STAGING_PREFIX)]
    if found:  # one may be the old half of an exchange that a power cut would undo
        fileops.sync_directory(run)
    for entry in found:
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False) or os.path.realpath(path) in _in_use:
            continue
        if _may_be_alive(path):
            logger.warning("%s may belong to a job that still runs on another host; kept", path)
            continue
        logger.info("removing %s, left by a save that did not finish", path)
        fileops.remove_tree(path)


def is_left_over(staging: Path) -> bool:
    """Whether a staging directory is of no use to anybody: its writer is known to be dead."""
    if os.path.realpath(staging) in _in_use:
        return False
    owner = _owner_of(staging)
    if owner is not None and owner.is_on_this_host():
        return owner.is_dead()
    return not _may_be_alive(staging)


def _may_be_alive(staging: Path) -> bool:
    """The lease is ours, so a writer of this host that still has a staging directory is dead."""
    owner = _owner_of(staging)
    if owner is None or owner.is_on_this_host():
        return False
    return filesystem_age_s(staging / OWNER_NAME) < STALE_AFTER_S


def _owner_of(staging: Path) -> Owner | None:
    try:
        return Owner.from_bytes((staging / OWNER_NAME).read_bytes())
    except FileNotFoundError:
        return None


def move_to_incomplete(run: Path, name: str) -> Path:
    """Move a torn or foreign entry of `run` out of the way, its data kept; where it lies now."""
    place = move_aside(run, name, INCOMPLETE_DIRECTORY)
    logger.warning("%s was not a committed checkpoint; moved to %s", run / name, place)
    return place


def move_aside(run: Path, name: str, shelf_name: str) -> Path:
    """Move an entry of `run` into its directory `shelf_name`, its data kept; where it lies now."""
    shelf = run / shelf_name
    fileops.make_directories(shelf)
    place, number = shelf / name, 0
    while os.path.lexists(place):
        number += 1
        place = shelf / f"{name}.{number}"
    fileops.rename_no_replace(run / name, place)
    fileops.sync_directory(shelf)
    fileops.sync_directory(run)
    return place
