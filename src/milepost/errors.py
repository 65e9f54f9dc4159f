"""Every error that Milepost raises on purpose, sorted by what the caller would do about it.

    CheckpointError
    |-- NotFoundError (FileNotFoundError)       nothing is there: check the path
    |   `-- NotCommittedError                   something is there, but no save of it ever finished
    |-- DamagedError (ValueError)               the bytes are not those that were saved: use another
    |   |-- FormatError                         a document or header is malformed
    |   |-- DigestMismatchError                 a digest does not fit
    |   `-- CheckpointIncompleteError           files of one checkpoint are missing or disagree
    |       |-- InconsistentError               they carry the stamps of different saves
    |       `-- ReplacedError                   another save took the name meanwhile: open it again
    |-- UnsupportedVersionError (ValueError)    written by a newer Milepost: upgrade
    |-- UnsafePickleError (ValueError)          a pickle wants more than plain data; nothing was run
    |-- InvalidInputError (ValueError)          an argument cannot be right: change the call
    |   `-- UnencodableError (TypeError)        a value in the state cannot be stored losslessly
    |-- MismatchError (ValueError, RuntimeError) checkpoint and live state do not fit each other
    |   |-- KeyMismatchError                    names missing or unexpected
    |   |-- ShapeMismatchError, DtypeMismatchError
    |   `-- ConfigMismatchError                 the recorded configuration differs
    |-- ExistsError (FileExistsError)           the target is taken: choose another or say replace
    |-- SaveInFlightError                       an earlier save is still being written: wait
    |-- StateChangedError (RuntimeError)        something wrote to the state while it was copied
    |-- RunInUseError                           a live process is writing into this run
    |-- StorageError (OSError)                  the file system said no: retry, free space, remount
    |   `-- NoSpaceError                        too little room, found before or during a write
    |-- LoadTornError (RuntimeError)            live state is half loaded: load again before use
    |-- RankError (RuntimeError)                a rank failed in code that is not Milepost's
    |   `-- RankTimeoutError (TimeoutError)     some ranks never answered
    |-- SaveOutcomeUnknownError (RuntimeError)  rank 0 fell silent: look at the run before going on
    |-- CheckpointMigrationError (RuntimeError) a legacy file could not be converted
    |-- PublishError (RuntimeError)             the Hub refused, or was not reached: nothing changed
    `-- MissingExtraError (ImportError)         an optional dependency is needed

Each class has a `code`, a short stable word for logs and `--json`; codes are append-only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any


class CheckpointError(Exception):
    """Base of all errors of Milepost. `code` is stable; `path` is the file concerned, if any.

    `rank` is the one on which it began, in a call that several ranks made together: all of them
    raise the same class and message.
    """

    code = "checkpoint-error"
    rank: int | None = None

    def __init__(self, message: str, *, path: str | PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotFoundError(CheckpointError, FileNotFoundError):
    code = "not-found"


class NotCommittedError(NotFoundError):
    code = "not-committed"


class DamagedError(CheckpointError, ValueError):
    code = "damaged"


class FormatError(DamagedError):
    code = "malformed"


class DigestMismatchError(DamagedError):
    code = "digest-mismatch"


class CheckpointIncompleteError(DamagedError):
    code = "incomplete"


class InconsistentError(CheckpointIncompleteError):
    code = "inconsistent"


class ReplacedError(CheckpointIncompleteError):
    code = "replaced"


class UnsupportedVersionError(CheckpointError, ValueError):
    code = "unsupported-version"


class UnsafePickleError(CheckpointError, ValueError):
    """`global_name` is the refused `module.name`, when there is one."""

    code = "unsafe-pickle"

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        global_name: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.global_name = global_name


class InvalidInputError(CheckpointError, ValueError):
    code = "invalid-input"


class UnencodableError(InvalidInputError, TypeError):
    """`key` is the dotted place of the value inside the state."""

    code = "unencodable"

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class MismatchError(CheckpointError, ValueError, RuntimeError):
    code = "mismatch"


class KeyMismatchError(MismatchError):
    code = "key-mismatch"

    def __init__(
        self, message: str, *, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class ShapeMismatchError(MismatchError):
    code = "shape-mismatch"


class DtypeMismatchError(MismatchError):
    code = "dtype-mismatch"


class ConfigMismatchError(MismatchError):
    """`differences` maps a field to (value in the checkpoint, value now)."""

    code = "config-mismatch"

    def __init__(self, message: str, *, differences: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(message)
        self.differences = dict(differences)


class ExistsError(CheckpointError, FileExistsError):
    code = "exists"


class SaveInFlightError(CheckpointError):
    """An earlier save is still being written."""

    code = "save-in-flight"


class StateChangedError(CheckpointError, RuntimeError):
    """State changed while it was being copied; the save is abandoned."""

    code = "state-changed"


class RunInUseError(CheckpointError):
    code = "run-in-use"


class StorageError(CheckpointError, OSError):
    """`errno` is that of the system call."""

    code = "storage"

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.errno = number
        self.strerror = None if number is None else os.strerror(number)


class NoSpaceError(StorageError):
    """`needed_nbytes` and `free_nbytes` are what was asked for and what the file system has."""

    code = "no-space"

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        needed_nbytes: int | None = None,
        free_nbytes: int | None = None,
    ) -> None:
        super().__init__(message, path=path, number=errno.ENOSPC)
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes


class LoadTornError(CheckpointError, RuntimeError):
    code = "load-torn"


class CheckpointMigrationError(CheckpointError, RuntimeError):
    code = "migration"


class PublishError(CheckpointError, RuntimeError):
    """`status` is the HTTP status that was answered, None when there was no answer."""

    code = "publish"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class MissingExtraError(CheckpointError, ImportError):
    code = "missing-extra"


class CheckpointWarning(UserWarning):
    """Something of a checkpoint could not be used, and the call went on without it."""


class RankError(CheckpointError, RuntimeError):
    """Raised on every rank when one failed with an error that is not Milepost's, or fell silent.

    `rank` began; `failed` are all that reported.
    """

    code = "rank-failed"

    def __init__(
        self, message: str, *, rank: int | None = None, failed: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.failed = tuple(failed)


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks did not answer in time; `failed` names them."""

    code = "rank-missing"


class SaveOutcomeUnknownError(CheckpointError, RuntimeError):
    """The coordinator fell silent and the checkpoint is not (yet) on disk."""

    code = "outcome-unknown"
