"""A second tier: committed checkpoints are copied elsewhere while training goes on.

The copy is made by one thread of the coordinator, after the commit, with every byte proven against
the manifest (`milepost.layouts.directory_copy`), and kept by a retention of its own. Trouble with a
mirror never stops training: it is logged at once and noted in the report of the next save.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpointing.in_flight import wait_for_saves
from milepost.engine.write import WriteOptions
from milepost.errors import CheckpointError, InvalidInputError, StorageError
from milepost.layouts.directory_copy import copy_checkpoint
from milepost.manager.mirror_owner import claim
from milepost.manager.prune import prune_run
from milepost.manager.retention import RetentionPolicy
from milepost.storage import fileops
from milepost.storage.fileops import PathLike

logger = logging.getLogger(__name__)

_MANY = 3
"""So many checkpoints that wait to be copied are worth a note: they stay in the run meanwhile."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where to copy committed checkpoints, and which of the copies to keep (all when left out).

    `path` is a run directory on another disk or file system, of this run alone: one that belongs to
    another run is refused. A resume looks there too: when a checkpoint is damaged or gone from the
    run, its copy is taken.
    """

    path: PathLike
    keep: RetentionPolicy | Sequence[RetentionPolicy] | None = None

    @property
    def directory(self) -> Path:
        """`path` as a `Path`."""
        return Path(self.path)

    @property
    def policies(self) -> list[RetentionPolicy]:
        """`keep` as a list; empty when everything is kept."""
        if self.keep is None:
            return []
        return list(self.keep) if isinstance(self.keep, Sequence) else [self.keep]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A checkpoint that is to be copied."""

    path: Path
    checkpoint_id: str


class Mirroring:
    """The copies of one manager, made by a thread that ends when there is nothing to copy."""

    def __init__(
        self, run: Path, mirrors: Sequence[Mirror], options: WriteOptions | None = None
    ) -> None:
        places = [os.path.realpath(run)]
        for mirror in mirrors:
            place = os.path.realpath(mirror.directory)
            if place in places:
                raise InvalidInputError(
                    f"{mirror.directory}: a mirror needs a directory of its own, neither that of "
                    "the run nor of another mirror"
                )
            places.append(place)
        self.mirrors, self._run_directory = tuple(mirrors), Path(run)
        self.protected: set[str] = set()
        """Ids of checkpoints that the retention of a mirror leaves alone."""
        self._options = options or WriteOptions()
        self._work: deque[_Copy] = deque()  # the first is under way
        self._notes: list[str] = []
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        _all.add(self)

    def claim(self) -> None:
        """See to it that the mirrors that exist are those of this run; by the coordinator.

        `InvalidInputError` for one of another run. One that cannot be looked at is asked again
        before something is copied there.
        """
        for mirror in self.mirrors:
            with suppress(StorageError, OSError):
                if mirror.directory.is_dir():
                    claim(self._run_directory, mirror.directory)

    def add(self, checkpoint: Path, checkpoint_id: str) -> None:
        """Copy this committed checkpoint to every mirror, behind those that wait already."""
        if not self.mirrors:
            return
        with self._turn:
            self._work.append(_Copy(checkpoint, checkpoint_id))
            if len(self._work) > _MANY:
                self._note(
                    f"{len(self._work)} checkpoints wait to be copied and stay in the run until "
                    "then: mirrors are slower than saves"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="milepost-mirror")
                try:
                    thread.start()  # it waits for its turn
                except RuntimeError as error:  # the next one tries again
                    self._note(f"nothing is copied to mirrors now: {error}")
                else:
                    self._thread = thread

    @property
    def busy(self) -> list[str]:
        """Ids of checkpoints that are being copied or wait for it: they must not be removed."""
        with self._turn:
            return [each.checkpoint_id for each in self._work]

    def take_notes(self) -> list[str]:
        """What went wrong since the last call."""
        with self._turn:
            notes, self._notes = self._notes, []
            return notes

    def close(self, timeout_s: float | None = None) -> bool:
        """Return when everything is copied, or after the time; whether it is."""
        with self._turn:
            is_done = self._turn.wait_for(lambda: not self._thread, timeout_s)
            return is_done and not self._work

    def _note(self, text: str) -> None:
        logger.warning("%s", text)
        self._notes.append(text)

    def _run(self) -> None:
        while True:
            with self._turn:
                if not self._work:
                    self._thread = None
                    self._turn.notify_all()
                    return
                copy = self._work[0]
            try:
                for mirror in self.mirrors:
                    self._copy(copy, mirror)
            finally:
                with self._turn:
                    self._work.popleft()

    def _copy(self, copy: _Copy, mirror: Mirror) -> None:
        target, start_s = mirror.directory / copy.path.name, time.monotonic()
        try:
            fileops.make_directories(mirror.directory)
            claim(self._run_directory, mirror.directory)
            nbytes = copy_checkpoint(copy.path, target, self._options)
            seconds = time.monotonic() - start_s
            logger.info("%s copied to %s, %d bytes, %.1f s", copy.path, target, nbytes, seconds)
            if mirror.policies:
                protect = self.protected | {copy.checkpoint_id}
                prune_run(mirror.directory, mirror.policies, protect=protect)
        except Exception as error:  # noqa: BLE001 - the next copies need this thread
            said = error if isinstance(error, CheckpointError | OSError) else repr(error)
            with self._turn:
                self._note(f"mirror {mirror.directory}: {copy.path.name}: {said}")

    def _start_afresh(self) -> None:
        """In a forked child: the copies are the parent's, and so is the thread."""
        self._turn = threading.Condition()
        self._work.clear()
        self._thread = None


_all: weakref.WeakSet[Mirroring] = weakref.WeakSet()


def _finish_all() -> None:
    """At the end of the process, before the threads of pools are told to end."""
    wait_for_saves()
    for mirroring in list(_all):
        mirroring.close()


def _after_fork() -> None:
    for mirroring in list(_all):
        mirroring._start_afresh()


getattr(threading, "_register_atexit", atexit.register)(_finish_all)
os.register_at_fork(after_in_child=_after_fork)
