"""What tests of the engine share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt`, in a process too that was started to ignore it."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)
