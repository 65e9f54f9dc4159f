"""An error of one rank, as all ranks raise it: the same class, the same message, the rank named.

What happens next must not depend on the rank: a caller that handles `NoSpaceError` has to take the
same way everywhere, or the ranks lose each other.
"""

from __future__ import annotations

import json
from typing import Any

from milepost.errors import CheckpointError, RankError, StorageError


def shared_error(error: BaseException, rank: int) -> CheckpointError:
    """What every rank raises for `error` of `rank`: itself, named, when it is one of Milepost's.

    An `OSError` becomes a `StorageError`, anything else a `RankError`.
    """
    if isinstance(error, CheckpointError):
        if error.rank is None:
            error.args = (f"rank {rank}: {error}", *error.args[1:])
            error.rank = rank
        return error
    if isinstance(error, OSError):
        storage = StorageError(f"rank {rank}: {error}", path=error.filename, number=error.errno)
        storage.rank = rank
        return storage
    text = f"rank {rank}: {type(error).__name__}: {error}"
    return RankError(text, rank=rank, failed=[rank])


def pack_error(error: CheckpointError) -> str:
    """`error` as JSON: class, message, its own fields as far as they are plain, and its cause."""
    return json.dumps(_packed(error), default=str)


def unpack_error(text: str | bytes) -> CheckpointError:
    """What `pack_error` was given. A class that this process does not know becomes `RankError`."""
    document = json.loads(text)
    error = _unpacked(document)
    if document["cause"] is not None:
        error.__cause__ = _unpacked(document["cause"])
    return error


def _packed(error: CheckpointError, *, depth: int = 1) -> dict[str, Any]:
    cause = error.__cause__
    inner = cause if depth and isinstance(cause, CheckpointError) else None
    return {
        "class": type(error).__name__,
        "message": str(error),
        "fields": {**vars(error), **{n: getattr(error, n, None) for n in ("errno", "strerror")}},
        "cause": None if inner is None else _packed(inner, depth=0),
    }


def _unpacked(document: dict[str, Any]) -> CheckpointError:
    found = _classes(CheckpointError).get(document["class"], RankError)
    # Past the constructors, which want their own arguments.
    error = OSError.__new__(found) if issubclass(found, OSError) else Exception.__new__(found)
    error.args = (document["message"],)
    for name, value in document["fields"].items():
        if value is not None:
            setattr(error, name, _with_tuples(value))
    return error


def _classes(root: type[CheckpointError]) -> dict[str, type[CheckpointError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_with_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
