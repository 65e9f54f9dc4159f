"""Seconds of one run and how far anonymous memory rises meanwhile. Standard library only: it also
runs in the environments of rivals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def measured(
    run: Callable[[], object], above: int | None = None, pause_s: float = 0.002
) -> dict[str, float]:
    """`seconds`, and as `extra` the most bytes above those before, or `above` so many; samples are
    `pause_s` apart. Each takes the interpreter's lock from `run`."""
    before = anonymous_nbytes() if above is None else above
    peak, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(pause_s):
            peak[0] = max(peak[0], anonymous_nbytes())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    try:
        run()
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        thread.join()
    return {"seconds": seconds, "extra": peak[0] - before}


def anonymous_nbytes() -> int:
    with open("/proc/self/status", "rb", buffering=0) as file:
        text = file.read(4096)
    line = next(line for line in text.splitlines() if line.startswith(b"RssAnon:"))
    return int(line.split()[1]) * 1024
