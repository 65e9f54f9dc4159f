"""What a manager does about checkpoints that are there already, and patience with sick mounts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeVar

from milepost.errors import (
    DamagedError,
    ExistsError,
    NotFoundError,
    RankError,
    StorageError,
)
from milepost.layouts.checkpoint import Checkpoint, Severity, VerifyReport
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.storage.fileops import PathLike

T = TypeVar("T")

ATTEMPTS = 3
PAUSE_S = 0.5
_PIECE_NBYTES = 8 * 2**20


class Resume(Enum):
    """Which checkpoint a manager goes on from. A path in its place names that one."""

    AUTO = "auto"
    """The newest that is intact; a fresh run only when there is nothing at all."""
    MUST = "must"
    """The newest that is intact; nothing there is an error."""
    NEVER = "never"
    """Begin again; what is there is left behind, and superseded by the first save."""


ResumeFrom: TypeAlias = Resume | PathLike


def as_resume(resume: ResumeFrom) -> Resume | Path:
    """A path as a `Path`."""
    return resume if isinstance(resume, Resume) else Path(resume)


def patiently(action: Callable[[], T], path: Path) -> T:
    """`action()`, tried again when the file system fails; `StorageError` when it goes on failing.

    A mount that is sick for a moment must not cost a thousand steps.
    """
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except OSError as error:
            if isinstance(error, NotFoundError | ExistsError | RankError):  # answers, not failures
                raise
            if attempt == ATTEMPTS - 1:
                if isinstance(error, StorageError):
                    raise
                where = error.filename or path
                raise StorageError(
                    f"{where}: {error.strerror or error}; it can be neither used nor ruled out: "
                    "see to the file system and start again",
                    path=where,
                    number=error.errno,
                ) from error
            time.sleep(PAUSE_S * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


def require_sound(checkpoint: Checkpoint, threads: int, share: tuple[int, int] = (0, 1)) -> None:
    """Recompute every digest. `DamagedError` for wrong bytes, `OSError` for what cannot be read.

    `share` is (rank, world size): together the ranks hash every byte of a directory once.
    """
    report = _verified(checkpoint, threads, share)
    if report is None or report.ok:
        return
    errors = [problem for problem in report.problems if problem.severity is Severity.ERROR]
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    read_through(directory / problem.file for problem in errors)
    texts = [problem.message for problem in errors]
    raise DamagedError(
        f"{checkpoint.path}: {len(texts)} things are wrong: {'; '.join(texts[:3])}",
        path=checkpoint.path,
    )


def _verified(checkpoint: Checkpoint, threads: int, share: tuple[int, int]) -> VerifyReport | None:
    rank, world_size = share
    if world_size > 1 and isinstance(checkpoint, DirectoryCheckpoint):
        from milepost.layouts.directory_verify import verify_directory

        return verify_directory(checkpoint, threads=threads, on_bytes=None, share=share)
    return checkpoint.verify(threads=threads) if rank == 0 else None


def read_through(paths: Iterable[Path]) -> None:
    """Raise the `OSError` of a file that is there and cannot be read to its end."""
    for path in set(paths):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while os.read(descriptor, _PIECE_NBYTES):
                pass
        finally:
            os.close(descriptor)
