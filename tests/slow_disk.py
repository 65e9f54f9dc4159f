"""A disk that stands still, or fails, while a save goes on behind training."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import milepost as mp
from milepost.storage import fileops


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """Writes behind training wait until the event is set; it is set at the end in any case."""
    gate = threading.Event()

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "write" and threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        return function(*arguments)

    with fileops.hooked(hook):
        try:
            yield gate
        finally:
            gate.set()
            mp.wait_for_saves()


@contextmanager
def failing_writes(number: int = errno.EIO, *, part: str = "") -> Iterator[None]:
    """Writes into paths that hold `part` fail with this error."""

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "write" and part in target:
            raise OSError(number, os.strerror(number), target)
        return function(*arguments)

    with fileops.hooked(hook):
        yield
