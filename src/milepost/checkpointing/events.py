"""What a save tells while it goes on: to a callback, a progress bar, a tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)


class EventKind(Enum):
    """What a `SaveEvent` tells."""

    STARTED = "started"
    """Writing begins; `nbytes` is what this rank will write."""
    WRITTEN = "written"
    """This rank has written `nbytes` more."""
    PHASE = "phase"
    """`phase` took `seconds`, and moved `nbytes` of this rank."""
    COMMITTED = "committed"
    """The checkpoint is durable: `nbytes` of all ranks, `seconds` of all phases."""
    FAILED = "failed"
    """It will never exist; `error` says why."""
    LEFT_OUT = "left-out"
    """An earlier save was still being written, and the policy is to skip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """One thing that happened in a save, as one rank sees it; `seconds` are of the wall clock."""

    kind: EventKind
    step: int
    path: Path
    rank: int = 0
    phase: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    error: BaseException | None = None

    @property
    def gib_per_s(self) -> float | None:
        """The rate, None where nothing was moved or no time is told."""
        return self.nbytes / 2**30 / self.seconds if self.nbytes and self.seconds else None


OnEvent: TypeAlias = Callable[[SaveEvent], None]


class Events:
    """Tells the events of one save to a callback, from whichever thread they happen in.

    A callback that raises is called no more: telling about a save must not fail it.
    """

    def __init__(self, callback: OnEvent | None, *, step: int, path: Path, rank: int) -> None:
        self._callback = callback
        self._step, self._path, self._rank = step, path, rank
        self._guard = threading.Lock()

    def tell(self, kind: EventKind, **details: Any) -> None:
        """Call the callback, one thread at a time."""
        with self._guard:
            if self._callback is None:
                return
            place: dict[str, Any] = {"step": self._step, "path": self._path, "rank": self._rank}
            try:
                self._callback(SaveEvent(kind=kind, **place, **details))
            except Exception:  # a user's code may raise what it likes
                logger.exception(
                    "on_event raised in the save of step %d; not called again", self._step
                )
                self._callback = None

    def written(self, nbytes: int) -> None:
        self.tell(EventKind.WRITTEN, nbytes=nbytes)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Tell of an exception that ends the block."""
        try:
            yield
        except BaseException as error:
            self.tell(EventKind.FAILED, error=error)
            raise
