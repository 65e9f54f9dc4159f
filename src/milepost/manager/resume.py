"""What a manager does about checkpoints that are there already, and patience with sick mounts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeVar

from milepost.errors import (
    DamagedError,
    ExistsError,
    NotCommittedError,
    NotFoundError,
    RankError,
    StorageError,
)
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.checkpoint import Checkpoint, Layout, Severity, VerifyReport
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.storage.fileops import PathLike

T = TypeVar("T")

TRAINER_STATE_NAME = "trainer_state.json"
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


ResumeFrom: TypeAlias = Resume | PathLike | bool
"""A policy, the path of a checkpoint, or what `resume_from_checkpoint` is in configurations: true
for the newest there is, false to begin again."""


def as_resume(resume: ResumeFrom) -> Resume | Path:
    """The policy that a configuration means, or a path as a `Path`."""
    if isinstance(resume, bool):
        return Resume.AUTO if resume else Resume.NEVER
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


def require_committed(path: Path) -> None:
    """Return when there is a checkpoint at a path that somebody named, of whatever layout.

    Weights alone are no checkpoint: a directory of them has lost its manifest, or never had one.
    """
    checkpoint = Checkpoint.open(path)
    if checkpoint.layout is not Layout.HUGGING_FACE or not path.is_dir():
        return
    if not (path / TRAINER_STATE_NAME).is_file():
        raise NotCommittedError(
            f"{path}: weights, but neither {MANIFEST_NAME} nor {TRAINER_STATE_NAME}, one of which "
            "is written last: the save was cut off, or the directory was copied incompletely; name "
            "another checkpoint, or begin from its weights alone (milepost.load, or "
            "model_name_or_path)",
            path=path,
        )


def require_sound(
    checkpoint: Checkpoint,
    threads: int,
    share: tuple[int, int] = (0, 1),
    leave_out: Collection[str] = (),
) -> None:
    """Recompute every digest. `DamagedError` for wrong bytes, `OSError` for what cannot be read.

    `share` is (rank, world size): together the ranks hash every byte of a directory once. Files of
    it in `leave_out` are not asked for.
    """
    report = _verified(checkpoint, threads, share, leave_out)
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


def _verified(
    checkpoint: Checkpoint, threads: int, share: tuple[int, int], leave_out: Collection[str]
) -> VerifyReport | None:
    if isinstance(checkpoint, DirectoryCheckpoint):
        from milepost.layouts.directory_verify import verify_directory

        return verify_directory(
            checkpoint, threads=threads, on_bytes=None, share=share, leave_out=leave_out
        )
    return checkpoint.verify(threads=threads) if share[0] == 0 else None


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
