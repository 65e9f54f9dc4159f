"""Memory that the allocator keeps after it was freed, given back to the system."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

TRIM_EVERY_NBYTES = 64 * 2**20


class Heap:
    """Trims the heap each time that so many bytes were allocated and freed again.

    Tensors below 32 MiB come from arenas that grow with each thread and with the alignment that
    torch asks for; without this a rewrite would hold several times what its groups need.
    """

    def __init__(self) -> None:
        self._used = 0
        self._guard = threading.Lock()
        self._trim = _malloc_trim()

    def used(self, nbytes: int) -> None:
        """Told after `nbytes` were allocated and freed."""
        with self._guard:
            self._used += nbytes
            if self._used < TRIM_EVERY_NBYTES:
                return
            self._used = 0
        if self._trim is not None:
            self._trim(0)


def _malloc_trim() -> Callable[[int], int] | None:
    """That of the C library; None for one that has none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
