"""How fast a save is written: with rests behind training on the same cores, at once if awaited."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from milepost.engine.write import WriteOptions

_SHARE = 0.05
"""Of the cores of a host: what all threads that write there keep together."""
_LONGEST_REST_S = 0.1


class Pace:
    """Of one save: whether its writers rest, and whether this rank's part has been written.

    A writer that rests leaves core and memory to training, and a save behind training has time.
    Whoever waits for it calls `hurry`, and nobody rests any more.
    """

    def __init__(self) -> None:
        self._hurry, self._written = threading.Event(), threading.Event()
        self._hurry.set()
        self._of_thread = threading.local()
        self._rests = 0.0  # seconds for each second that a thread has kept a core

    @property
    def rests(self) -> bool:
        """Whether writers rest."""
        return not self._hurry.is_set()

    def ease(self, threads: int) -> None:
        """Let writers rest, where training computes on the processor. `threads` write on this
        host, all ranks of it together."""
        if not torch.accelerator.is_available():
            self._rests = max(0.0, threads / (_SHARE * (os.cpu_count() or 1)) - 1)
            self._hurry.clear()

    def hurry(self) -> None:
        """Write as fast as can be from here on."""
        self._hurry.set()

    def paced(self, options: WriteOptions) -> WriteOptions:
        """Options whose writing threads rest, after whatever else they do at each write."""
        return replace(options, on_bytes=self._resting(options.on_bytes))

    def _resting(self, also: Callable[[int], None] | None) -> Callable[[int], None]:
        def rest(nbytes: int) -> None:
            if also is not None:
                also(nbytes)
            if self.rests:
                now_s = time.thread_time()
                busy_s = now_s - getattr(self._of_thread, "rested_at_s", now_s)
                self._hurry.wait(min(self._rests * busy_s, _LONGEST_REST_S))
                self._of_thread.rested_at_s = time.thread_time()

        return rest

    def finish(self) -> None:
        """This rank's part is in the files, or never will be: live tensors are free."""
        self._written.set()

    def wait(self) -> None:
        """Return when `finish` has been called; in a hurry."""
        self.hurry()
        self._written.wait()
