"""Saves that go on behind training: one thread of this process finishes them, one after another.

Every rank has such a thread, and they talk to each other through connections of their own. What
goes wrong there is logged at once, belongs to the handle, and is raised on every rank by the next
save. The interpreter does not exit before they are done.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from milepost.checkpointing.pace import Pace
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.world import forget_behind
from milepost.engine.rendezvous import Conversation
from milepost.engine.verdicts import pack_error, shared_error, unpack_error
from milepost.errors import CheckpointError, InvalidInputError

logger = logging.getLogger(__name__)

_NICE = 10


class InFlight(Enum):
    """What a save does when an earlier one is still being written. Rank 0 decides for all."""

    WAIT = "wait"
    """It waits until that one has ended."""
    QUEUE = "queue"
    """Its state is copied now and written when that one has ended; with one waiting already, it
    waits."""
    SKIP = "skip"
    """It is left out, and the report says so."""
    ERROR = "error"
    """`SaveInFlightError`."""


class SaveHandle:
    """A save that may still be under way.

    `held_s` is how long training was held, in seconds: from the call until the state may change.
    """

    def __init__(self, path: Path, step: int, report: SaveReport | None = None) -> None:
        self.path, self.step = path, step
        self.held_s = 0.0
        self.pace = Pace()
        self.not_written = report
        """The report of a save that wrote nothing, known at once: left out, or there already."""
        self._future: Future[SaveReport] = Future()
        self._told = False
        if report is not None:
            self._future.set_result(report)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> SaveReport:
        """Return when the checkpoint is committed on all ranks; raise what the save failed with.

        `TimeoutError` after `timeout_s` seconds; the save goes on. `InvalidInputError` in a process
        that was forked meanwhile: the save is the parent's.
        """
        saves.hurry(self)
        wait([self._future], timeout_s)
        if not self._future.done():
            raise TimeoutError(f"{self.path}: still being written after {timeout_s} s")
        self._told = True
        return self._future.result()

    def _end(self, outcome: SaveReport | BaseException) -> None:
        """The save has ended: with its report, or with what it failed with."""
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def _leave_to_parent(self) -> None:
        """In a forked child: the thread that would end the save is not here."""
        self._future, self._told = Future(), True  # a lock of the old one may be held for ever
        self._future.set_exception(
            InvalidInputError(
                f"{self.path}: step {self.step} is being saved by process {os.getppid()}; this "
                f"process, {os.getpid()}, was forked from it and never hears how that ends; "
                "wait for the handle in the parent, or before the fork"
            )
        )

    @property
    def is_untold(self) -> bool:
        """Whether it has failed and nobody was told."""
        return self.done() and not self._told and self._future.exception() is not None

    def take_untold(self) -> BaseException | None:
        """What an ended save failed with, unless somebody was told."""
        error = None if self._told else self._future.exception()
        self._told = True
        return error


@dataclass(slots=True, eq=False)
class _Job:
    """A save that was handed over, and what is left of it."""

    handle: SaveHandle
    talk: Conversation
    action: Callable[[], SaveReport]


class SaveThread:
    """Finishes saves in the order in which they were handed over; the thread lives while it has
    something to do."""

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._guard = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._ended: deque[_Job] = deque()  # not yet asked whether they failed
        self._talks: list[Conversation] = []
        self._thread: threading.Thread | None = None
        self._handed_over = self._count_ended = self._taken = 0

    def _leave_to_parent(self) -> None:
        """In a forked child: the saves are the parent's, and so is the thread."""
        for job in self._jobs:
            job.handle._leave_to_parent()
        self._start_afresh()

    @property
    def count(self) -> int:
        """Saves that have not ended."""
        with self._guard:
            return len(self._jobs)

    def submit(
        self, handle: SaveHandle, talk: Conversation, action: Callable[[], SaveReport]
    ) -> None:
        """Finish `handle` by `action`, in which the thread talks through `talk`."""
        with self._guard:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="milepost-save")
                thread.start()  # it waits for the guard; when it cannot start, nothing was taken
                self._thread = thread
            self._jobs.append(_Job(handle, talk, action))
            self._handed_over += 1

    def _work(self) -> None:
        _leave_cores_to_training()
        while True:
            with self._guard:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            outcome = self._outcome_of(job)
            with self._guard:  # who sees that the save has ended finds that it is not under way
                job.handle._end(outcome)
                self._ended.append(self._jobs.popleft())
                self._count_ended += 1
                self._guard.notify_all()
            del job, outcome

    def _outcome_of(self, job: _Job) -> SaveReport | BaseException:
        handle = job.handle
        try:
            return job.action()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the save
            logger.error("step %d was not saved: %s: %s", handle.step, handle.path, error)
            if isinstance(error, CheckpointError):
                more = f"{error} (step {handle.step} was not saved behind training)"
                error.args = (more, *error.args[1:])
            return error
        finally:
            job.action = _nothing_left  # and with it the plans, and what they refer to

    def drain(self, left: int = 0, timeout_s: float | None = None) -> bool:
        """Return when at most `left` saves have not ended, or after the time; whether they have."""
        with self._guard:
            self._hurry(len(self._jobs) - left)
            return self._guard.wait_for(lambda: len(self._jobs) <= left, timeout_s)

    def hurry(self, handle: SaveHandle) -> None:
        """Somebody waits for `handle`, and so for all that go before it."""
        with self._guard:
            handles = [job.handle for job in self._jobs]
            if handle in handles:
                self._hurry(handles.index(handle) + 1)

    def _hurry(self, count: int) -> None:
        """Somebody waits for the first `count` of the saves under way."""
        for number, job in enumerate(self._jobs):
            if number < count:
                job.handle.pace.hurry()

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed that nobody was told of, so that the next one will raise it."""
        with self._guard:
            return any(job.handle.is_untold for job in self._ended)

    @property
    def count_ended(self) -> int:
        """Saves that have ended, of all that this process handed over."""
        with self._guard:
            return self._count_ended

    def drain_first(self, count: int) -> None:
        """Return when the first `count` saves of this process have ended."""
        with self._guard:
            wanted = min(count, self._handed_over)
            self._hurry(wanted - self._count_ended)
            self._guard.wait_for(lambda: self._count_ended >= wanted)

    def take_failure(self, count: int) -> BaseException | None:
        """The first failure among the first `count` saves that nobody was told of."""
        while self._taken < count and self._ended:
            with self._guard:
                job = self._ended.popleft()
                self._taken += 1
            self._talks.append(job.talk)
            failure = job.handle.take_untold()
            if failure is not None:
                return failure
        return None

    def forget_taken(self) -> None:
        """All ranks have ended the saves that were asked for failures: their keys can go."""
        forget_behind(self._talks)
        self._talks.clear()


def _leave_cores_to_training() -> None:
    """Lower the priority of this thread, and of the threads that it starts, where threads have one
    of their own (Linux)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _nothing_left() -> SaveReport:
    raise AssertionError("a save is finished once")


saves = SaveThread()


def settle_earlier(talk: Conversation) -> bool:
    """Raise, on all ranks, what earlier saves failed with behind training; collective.

    Rank 0 says how many saves have ended, and every rank waits for its own share of those. Returns
    whether others are still under way at rank 0.
    """
    view = json.dumps([saves.count_ended, saves.count]).encode() if talk.is_coordinator else None
    ended, busy = json.loads(talk.broadcast("ended", view))
    saves.drain_first(ended)
    failure = saves.take_failure(ended)
    if failure is not None and talk.world_size == 1:
        raise failure
    own = b"" if failure is None else pack_error(shared_error(failure, talk.rank)).encode()
    reports = talk.gather("failed", own)
    first = next(filter(None, reports), b"") if talk.is_coordinator else None
    told = talk.broadcast("earlier", first)
    if told:
        raise unpack_error(told) from failure
    saves.forget_taken()
    return bool(busy)


def wait_for_saves() -> None:
    """Return when no save of this process is under way; what failed is raised by the next save.

    Call it before `torch.distributed.destroy_process_group()`: ranks that send each other columns
    do so through a group that is destroyed with all others.
    """
    saves.drain()


# Before the threads of pools are told to end: a save in flight still needs them.
getattr(threading, "_register_atexit", atexit.register)(saves.drain)
os.register_at_fork(after_in_child=saves._leave_to_parent)
