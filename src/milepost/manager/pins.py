"""Pinned steps: checkpoints of a run that retention never removes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from milepost.errors import FormatError, NotFoundError
from milepost.layouts.run import PINS_NAME, list_run
from milepost.storage import atomic


def pins_of(run: Path) -> frozenset[int]:
    """The pinned steps. `FormatError` when the file cannot be understood: then nothing may go."""
    path = run / PINS_NAME
    try:
        document = json.loads(path.read_bytes())
        steps = document["steps"]
        if not all(isinstance(step, int) and not isinstance(step, bool) for step in steps):
            raise ValueError("steps: expected whole numbers")
    except FileNotFoundError:
        return frozenset()
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: not a list of pinned steps ({error}); correct it, or remove it and pin again",
            path=path,
        ) from error
    return frozenset(steps)


def pin_steps(run: Path, steps: Iterable[int]) -> frozenset[int]:
    """Add steps to the pinned ones and return them all. `NotFoundError` for one that is not there.

    Needs no lease: a running job sees the pin the next time it removes something.
    """
    wanted = set(steps)
    there = {entry.step for entry in list_run(run).committed}
    missing = sorted(wanted - there)
    if missing:
        raise NotFoundError(
            f"{run}: no committed checkpoint of step {', '.join(map(str, missing))}; it holds "
            f"{', '.join(map(str, sorted(there))) or 'none'}",
            path=run,
        )
    with _exclusive(run):
        return _replace(run, pins_of(run) | wanted)


def unpin_steps(run: Path, steps: Iterable[int]) -> frozenset[int]:
    """Take steps off the pinned ones, whether they are there or not, and return what is left."""
    list_run(run)
    with _exclusive(run):
        return _replace(run, pins_of(run) - set(steps))


def _replace(run: Path, steps: frozenset[int]) -> frozenset[int]:
    if steps != pins_of(run):
        document = json.dumps({"steps": sorted(steps)}, indent=1) + "\n"
        atomic.replace_file(run / PINS_NAME, document.encode())
    return steps


@contextmanager
def _exclusive(run: Path) -> Iterator[None]:
    """One change of the pins at a time, as far as the file system has locks."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
