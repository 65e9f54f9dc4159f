"""How long each phase of a save took, and how much it moved: for the log, the manifest, events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from milepost.checkpointing.events import EventKind, Events
from milepost.checkpointing.files import FilesPlan, PlannedFile
from milepost.engine.write import WriteOptions


class Phases:
    """The phases of one save on one rank: `seconds` and `nbytes` by name."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self._guard = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        seconds = self.seconds[name] = round(time.perf_counter() - start, 6)
        moved = self.nbytes.get(name, 0)
        self.events.tell(EventKind.PHASE, phase=name, seconds=seconds, nbytes=moved)

    def counted(self, options: WriteOptions) -> WriteOptions:
        """Options that count what is written, and tell of it, besides what they do already."""
        return replace(options, on_bytes=self._counter(options.on_bytes))

    def _counter(self, also: Callable[[int], None] | None) -> Callable[[int], None]:
        def count(nbytes: int) -> None:
            with self._guard:
                self.nbytes["write"] = self.nbytes.get("write", 0) + nbytes
            self.events.written(nbytes)
            if also is not None:
                also(nbytes)

        return count


def share_nbytes(plan: FilesPlan, files: list[PlannedFile]) -> int:
    """Bytes that this rank will write: its pieces of `files`, and the chunks of its steps."""
    pieces = sum(piece.source.nbytes for file in files for piece in file.pieces)
    return pieces + sum(end - start for step in plan.steps for start, end, _ in step.chunks)
