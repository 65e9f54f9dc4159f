"""Pausing Python's cyclic garbage collector while plans are made.

A plan is some hundred thousand tuples and no cycle. The collector runs after so many new objects
and walks all that the process has, torch's and the user's too: for a first plan of 18,867 tensors
on 8,192 ranks that was a third of the time, in a process that held little else.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_guard = threading.Lock()
_depth = 0
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of this process, for seconds at most; it is left as it was found.

    Calls may be nested and come from several threads: the last one to leave turns it on again.
    """
    global _depth, _was_on
    with _guard:
        if _depth == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _guard:
            _depth -= 1
            if _depth == 0 and _was_on:
                gc.enable()


def _in_forked_child() -> None:
    """The threads that paused it are not in the child."""
    global _guard, _depth
    _guard = threading.Lock()
    if _depth and _was_on:
        gc.enable()
    _depth = 0


os.register_at_fork(after_in_child=_in_forked_child)
