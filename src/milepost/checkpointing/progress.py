"""A progress bar of saves, for a person who watches a terminal."""

from __future__ import annotations

import sys
import threading
from typing import Any

from milepost.checkpointing.events import EventKind, SaveEvent

_ENDS = (EventKind.COMMITTED, EventKind.FAILED)


class ProgressBar:
    """Shows how far the saves of this rank are, on standard error; see `progress_bar`.

    Give it as `on_event`, which tells it the size of a save, or as `on_bytes`.
    """

    def __init__(self) -> None:
        self._shown: Any = None
        self._task: Any = None
        self._guard = threading.Lock()

    def __call__(self, told: SaveEvent | int) -> None:
        """Move on by an event, or by bytes; does nothing where standard error is no terminal."""
        if not sys.stderr.isatty():
            return
        with self._guard:
            if isinstance(told, int):
                self._begin("saving", None)
                self._shown.advance(self._task, told)
            elif told.kind is EventKind.STARTED:
                self._begin(f"step {told.step}", told.nbytes)
            elif told.kind is EventKind.WRITTEN and self._shown is not None:
                self._shown.advance(self._task, told.nbytes)
            elif told.kind in _ENDS:
                self._end()

    def close(self) -> None:
        """Leave the bar as it is; the next event begins another."""
        with self._guard:
            self._end()

    def _begin(self, text: str, total: int | None) -> None:
        if self._shown is None:
            self._shown = _bar()
            self._task = self._shown.add_task(text, total=total)
            self._shown.start()
        elif total is not None:
            self._shown.update(self._task, description=text, total=total, completed=0)

    def _end(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


def progress_bar() -> ProgressBar:
    """A bar for `on_event=` of saves, or for `on_bytes=` of `WriteOptions`.

    Bytes, rate and time left, on standard error; nothing at all where that is no terminal, as in a
    batch job. One bar serves all saves of a run.
    """
    return ProgressBar()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
