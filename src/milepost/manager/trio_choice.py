"""Which trio a training resumes from, read whole; damaged ones are passed over aloud."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from milepost._warn import warn_user
from milepost.checkpointing.functions import warn_legacy
from milepost.errors import (
    CheckpointWarning,
    DamagedError,
    InvalidInputError,
    NotFoundError,
)
from milepost.layouts.payload import Dialect, Payload
from milepost.layouts.single_file import SingleFileCheckpoint
from milepost.manager.resume import Resume, patiently
from milepost.manager.trio_run import (
    LATEST,
    TrioEntry,
    foreign_names,
    look_at,
    names_there,
    open_training,
)

_CURRENT = (Dialect.TRIO, Dialect.MODERN_LLM, Dialect.STATE_DICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A checkpoint that was read whole, and the newer ones that could not be."""

    path: Path
    payload: Payload
    passed_over: list[str] = field(default_factory=list)


def read_whole(path: Path) -> Payload:
    """All of a trio or `.pt`, every digest and checksum compared."""

    def read() -> Payload:
        checkpoint = open_training(path)
        if isinstance(checkpoint, SingleFileCheckpoint) and checkpoint.dialect not in _CURRENT:
            warn_legacy(checkpoint.path, checkpoint.dialect)
        return checkpoint.payload()

    return patiently(read, path)


def choose(directory: Path, resume: Resume | Path) -> Chosen | None:
    """What to resume from by `resume`; None for a fresh run.

    `NotFoundError` when there is nothing where something was asked for, or only what is foreign;
    `DamagedError` when nothing of what is there can be used.
    """
    match resume:
        case Resume.NEVER:
            return None
        case Path():
            return _named(resume)
        case Resume.AUTO | Resume.MUST:
            return _newest(directory, resume)


def _named(path: Path) -> Chosen:
    if path.is_dir():
        raise InvalidInputError(
            f"{path}: a directory; the trio layout resumes from a stem or a file, such as "
            f"{path / LATEST}; directories are for layout=Layout.DIRECTORY"
        )
    try:
        return Chosen(path=path, payload=read_whole(path))
    except DamagedError as error:
        raise type(error)(
            f"{error}; for the weights alone, call milepost.load_checkpoint({str(path)!r})",
            path=error.path,
        ) from error


def _newest(directory: Path, resume: Resume) -> Chosen | None:
    names = names_there(directory)
    if not names:
        _refuse_foreign(directory)
        if resume is Resume.MUST:
            raise NotFoundError(
                f"{directory}: nothing to resume from: no latest, best or epoch_<N>; correct the "
                "directory, or pass resume=Resume.AUTO to begin when there is nothing",
                path=directory,
            )
        return None
    passed: list[str] = []
    if names[0] != LATEST:
        passed.append(f"{LATEST}: missing")
    first: DamagedError | None = None
    for name in _in_order(directory, names):
        try:
            payload = read_whole(directory / name)
        except DamagedError as error:
            first = first or error
            passed.append(f"{name}: {error}")
            continue
        for text in passed:
            warn_user(f"{directory / name} is resumed from, not {text}", CheckpointWarning)
        return Chosen(path=directory / name, payload=payload, passed_over=passed)
    assert first is not None, "there was a name, and it was damaged"
    raise type(first)(
        f"{directory}: none of {len(names)} checkpoints can be resumed from: {'; '.join(passed)}; "
        f"for the weights alone, call milepost.load_checkpoint({str(directory / names[0])!r})",
        path=first.path,
    ) from first


def _in_order(directory: Path, names: list[str]) -> list[str]:
    """`latest`, then the others by epoch, newest first; what cannot be opened by its number."""
    if len(names) == 1:
        return names
    rest = [look_at(directory, name) for name in names if name != LATEST]
    rest.sort(key=_epoch_of, reverse=True)
    return [*(name for name in names if name == LATEST), *(entry.name for entry in rest)]


def _epoch_of(entry: TrioEntry) -> float:
    if entry.info is not None:
        return entry.info.epoch or 0.0
    return -1.0 if entry.number is None else entry.number - 1.0


def _refuse_foreign(directory: Path) -> None:
    foreign = foreign_names(directory, ())
    if foreign:
        raise NotFoundError(
            f"{directory}: no latest, best or epoch_<N> to resume from, but {len(foreign)} other "
            f"checkpoint files ({', '.join(foreign[:5])}); name one with resume=path, or pass "
            "resume=Resume.NEVER to begin again beside them",
            path=directory,
        )
