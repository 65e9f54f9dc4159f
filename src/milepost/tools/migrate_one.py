"""One source from its file to its target: look, check, write, prove, take away."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost.errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    FormatError,
    InvalidInputError,
)
from milepost.layouts.trio_names import TrioNames, look, trio_names
from milepost.layouts.trio_write import finish_changes
from milepost.storage.attributes import FileAttributes
from milepost.storage.intent import resolve_name
from milepost.storage.space import storage_error
from milepost.tools.migrate_compare import Comparison
from milepost.tools.migrate_content import (
    Content,
    NotACheckpointError,
    file_content,
    trio_content,
)
from milepost.tools.migrate_directory import DirectoryTarget
from milepost.tools.migrate_options import (
    Backup,
    Existing,
    MigrateTarget,
    Migration,
    Original,
    Outcome,
    Request,
)
from milepost.tools.migrate_single import SingleFileTarget
from milepost.tools.migrate_sources import Task, place_of
from milepost.tools.migrate_target import (
    Leaving,
    Target,
    TrioTarget,
    backup_name,
    backups_of,
    leave,
    require_writable,
)
from milepost.tools.migrate_verify import differences

logger = logging.getLogger(__name__)

DONE = "it was migrated before"
_BEGINNINGS = (b"PK", b"\x80")  # of an archive of torch, and of a pickle


def migrate_one(task: Task, request: Request) -> Migration:
    """Everything about one source; what goes wrong is in the result, not raised."""
    blank = Migration(source=task.source, outcome=Outcome.FAILED)
    try:
        if request.writes:
            finish_changes(task.source.parent)
            finish_changes(task.directory)
        if task.problem is not None:
            return replace(blank, error=task.problem)
        if task.skip is not None:
            return replace(blank, outcome=Outcome.SKIPPED, notes=(task.skip,))
        if _has_left(task):
            return replace(blank, outcome=Outcome.SKIPPED, notes=(DONE,))
        with _opened(task, request) as source:
            return _Run(task, request, source).result()
    except (NotACheckpointError, DamagedError) as error:
        if task.searched and _is_something_else(task.source, error):
            return replace(blank, outcome=Outcome.SKIPPED, notes=(_short(error),))
        return replace(blank, error=error)
    except CheckpointError as error:
        return replace(blank, error=error)
    except OSError as error:
        return replace(blank, error=storage_error(error, task.source))


def _has_left(task: Task) -> bool:
    """Whether a migration that was cut short had taken the source away already."""
    place = resolve_name(task.source.parent, task.source.name)
    return not task.is_trio and not place.exists() and bool(look(*_trio_of(task)))


def _trio_of(task: Task) -> tuple[Path, TrioNames]:
    return task.directory, trio_names(task.stem)


def _opened(task: Task, request: Request) -> AbstractContextManager[Content]:
    if task.is_trio:
        return trio_content(task.source, request.reading)
    return file_content(task.source, request.reading)


def _is_something_else(path: Path, error: CheckpointError) -> bool:
    """Whether a file that nobody named is no checkpoint, rather than a damaged one."""
    if isinstance(error, NotACheckpointError):
        return True
    if not isinstance(error, FormatError) or not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.read(2)
    return bool(first) and not first.startswith(_BEGINNINGS)


def _short(error: CheckpointError) -> str:
    return f"no checkpoint: {str(error).removeprefix(f'{error.path}: ')}"


class _Run:
    """One source that was opened, on its way into its target."""

    def __init__(self, task: Task, request: Request, source: Content) -> None:
        self.task = task
        self.request = request
        self.source = source
        self.files = _files_of(task)
        self.target = _target(task, request.to)
        self.differences: list[str] = []
        self.base = Migration(
            source=task.source,
            outcome=Outcome.FAILED,
            target=self.target.path,
            files=self.target.files,
            source_nbytes=sum(path.stat().st_size for path in self.files),
            dialect=str(source.dialect),
            notes=tuple(source.notes),
        )

    def result(self) -> Migration:
        self._refuse_shadowed()
        own = {place_of(path) for path in self.files}
        there = [path for path in self.target.there() if place_of(path) not in own]
        if there and self.request.existing is not Existing.OVERWRITE:
            return self._met(there)
        require_writable(self.task.directory)
        if self.request.original is Original.REMOVE:
            require_writable(self.files[0].parent)
        self.source.check()
        nbytes = self.target.prepare(self.source, FileAttributes.of(self.files[0]))
        self.base = replace(self.base, notes=tuple(self.source.notes))
        if not self.request.writes:
            return replace(self.base, outcome=Outcome.PLANNED, nbytes=nbytes, **self._leaves())
        try:
            return self._write(there)
        except _UnprovenError:
            return self._mismatch()

    def _refuse_shadowed(self) -> None:
        """A `.pt` beside the trio that it was made of would never be read."""
        here = os.path.realpath(self.files[0].parent) == os.path.realpath(self.task.directory)
        is_file = self.request.to is MigrateTarget.SINGLE_FILE
        if self.task.is_trio and is_file and here and self.request.original is Original.KEEP:
            raise InvalidInputError(
                f"{self.task.source}: a trio counts before a .pt of its name, so nothing would "
                "read that: migrate in place (--in-place), or write elsewhere (--out)",
                path=self.task.source,
            )

    def _mismatch(self) -> Migration:
        return replace(self.base, outcome=Outcome.MISMATCH, differences=tuple(self.differences))

    # ---- the target is there

    def _met(self, there: Sequence[Path]) -> Migration:
        names = ", ".join(path.name for path in there)
        if self.request.existing is Existing.ERROR or not self.target.is_whole():
            raise ExistsError(
                f"{self.target.path}: {names} exist already and nothing was changed; overwrite "
                "them (--overwrite), or write elsewhere",
                path=there[0],
            )
        if not self.request.proves and self._is_recorded():
            return self._passed_over(proven=False)
        self.source.check()
        self.differences = self._compared()
        if self.differences:
            return self._mismatch()
        leaving = self._leaving()
        if self.request.writes:
            leave(leaving)
        return replace(
            self._passed_over(proven=True),
            backups=tuple(leaving.directory / name for _, name in leaving.renames),
            **self._leaves(),
        )

    def _passed_over(self, *, proven: bool) -> Migration:
        return replace(self.base, outcome=Outcome.SKIPPED, notes=(DONE,), proven=proven)

    def _is_recorded(self) -> bool:
        """Whether what is there says that it was made of this very file."""
        try:
            with self.target.content() as written:
                return Comparison().same(written.recorded, self.source.origin)
        except DamagedError:
            return False

    def _compared(self) -> list[str]:
        """How what is there differs from the source; damage is a difference."""
        try:
            with self.target.content() as written:
                return differences(self.source, written)
        except DamagedError as error:
            return [str(error)]

    # ---- writing

    def _write(self, there: Sequence[Path]) -> Migration:
        kept = there if self.request.backup is Backup.KEEP else ()
        with backups_of(kept) as backups:
            proof = self._holds_all if self.request.proves else None
            leaving = self._leaving()
            nbytes = self.target.write(self.request.options, proof, leaving)
            if nbytes is None:
                raise _UnprovenError
        done = replace(self.base, outcome=Outcome.MIGRATED, nbytes=nbytes, **self._leaves())
        return replace(
            done,
            proven=self.request.proves,
            backups=(*backups, *(leaving.directory / name for _, name in leaving.renames)),
        )

    def _holds_all(self, written: Content) -> bool:
        self.differences = differences(self.source, written)
        return not self.differences

    # ---- the source leaves

    def _leaves(self) -> dict[str, Any]:
        return {"removed": self.request.original is Original.REMOVE}

    def _leaving(self) -> Leaving:
        directory = self.files[0].parent
        own = {place_of(path) for path in self.target.files}
        going = [path for path in self.files if place_of(path) not in own]
        if self.request.original is Original.KEEP or not going:
            return Leaving(directory=directory)
        if self.request.backup is Backup.KEEP:
            renames = tuple((path.name, backup_name(path)) for path in going)
            return Leaving(directory=directory, renames=renames)
        return Leaving(directory=directory, removes=tuple(path.name for path in going))


def _target(task: Task, to: MigrateTarget) -> Target:
    match to:
        case MigrateTarget.TRIO:
            return TrioTarget(task.directory, task.stem)
        case MigrateTarget.SINGLE_FILE:
            return SingleFileTarget(task.directory, task.stem)
        case MigrateTarget.DIRECTORY:
            return DirectoryTarget(task.directory, task.stem)


class _UnprovenError(Exception):
    """What was written did not hold what the source holds; nothing of it was published."""


def _files_of(task: Task) -> list[Path]:
    if not task.is_trio:
        return [task.source]
    return [task.source.with_name(name) for name in trio_names(task.source.name)]
