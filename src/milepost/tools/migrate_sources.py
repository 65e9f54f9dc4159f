"""Which files a migration is about: paths, stems, directories and patterns become tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milepost.errors import CheckpointError, InvalidInputError, NotFoundError
from milepost.format.manifest import MANIFEST_NAME
from milepost.hf.sidecar_files import SIDECARS
from milepost.layouts.dcp_metadata import METADATA_NAME
from milepost.layouts.trio_names import (
    EXTRA_STATE_SUFFIX,
    LEGACY_SUFFIX,
    META_SUFFIX,
    look,
    split_suffix,
    trio_names,
)
from milepost.storage.fileops import PathLike
from milepost.tools.migrate_options import MigrateTarget, Search

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
"""Of sources, in the order in which they are tried for a bare stem."""

_OF_A_TRAINER = re.compile(
    r"training_args\.bin|(?:optimizer|scheduler|scaler)\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|"
    + "|".join(map(re.escape, SIDECARS))
)
_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One source and the directory and stem that it becomes.

    `problem` keeps it from being tried; `skip` says why there is nothing to do. `searched` tells
    that nobody named the file: it need not be a checkpoint at all.
    """

    source: Path
    directory: Path
    stem: str
    is_trio: bool = False
    searched: bool = False
    problem: CheckpointError | None = None
    skip: str | None = None


def find_tasks(
    paths: Sequence[PathLike], *, to: MigrateTarget, out: Path | None, search: Search
) -> list[Task]:
    """The tasks of all paths, each source once, in order; two that would become one are refused."""
    finder = _Finder(to, out, search)
    tasks: dict[Path, Task] = {}
    for path in paths:
        for task in finder.of(os.fspath(path)):
            tasks.setdefault(place_of(task.source), task)
    return list(_without_collisions(tasks.values()))


def task_of(path: Path, *, to: MigrateTarget) -> Task:
    """The task of one file or stem, taken literally, with its target beside it."""
    return _Finder(to, None, Search.TOP).given(path)


def _without_collisions(tasks: Iterable[Task]) -> Iterator[Task]:
    first: dict[tuple[str, str], Task] = {}
    for task in tasks:
        key = (os.path.realpath(task.directory), task.stem)
        other = first.setdefault(key, task)
        if other is task or task.problem is not None or task.skip is not None:
            yield task
            continue
        error = InvalidInputError(
            f"{task.source}: would become {task.directory / task.stem}, as {other.source} does; "
            "rename one of them, or migrate them into different directories (--out)",
            path=task.source,
        )
        yield replace(task, problem=error)


def place_of(path: Path) -> Path:
    """Where a path is, itself not followed if it is a link."""
    return path.parent.resolve() / path.name


def stem_of(name: str) -> str:
    """The stem of a source's name; only a suffix of a checkpoint file is taken off.

    >>> stem_of("run.v2.pt"), stem_of("run.v2.ckpt"), stem_of("run.v2")
    ('run.v2', 'run.v2', 'run.v2')
    """
    stem, suffix = split_suffix(name)
    if suffix:
        return stem
    found = next((end for end in SUFFIXES if name.endswith(end) and name != end), "")
    return name.removesuffix(found)


class _Finder:
    def __init__(self, to: MigrateTarget, out: Path | None, search: Search) -> None:
        self.to = to
        self.out = out
        self.search = search

    def of(self, text: str) -> Iterator[Task]:
        path = Path(text)
        if _PATTERN.search(text) and not os.path.lexists(text):
            yield from self._matching(text)
        elif path.is_dir():
            yield from self._given_directory(path)
        else:
            yield self.given(path)

    def _matching(self, pattern: str) -> Iterator[Task]:
        base = Path(Path(pattern).anchor or ".")
        tasks = []
        for path in sorted(base.glob(pattern.removeprefix(base.anchor))):
            if path.is_dir():
                tasks += list(self._in_directory(path, path))
            elif self._is_candidate(path):
                tasks.append(self._task(path, path.parent, searched=True))
        if not tasks:
            yield self._problem(
                Path(pattern), NotFoundError(f"{pattern}: matches no checkpoint file", path=pattern)
            )
        yield from tasks

    def _given_directory(self, path: Path) -> Iterator[Task]:
        what = _checkpoint_kind(path)
        if what is not None:
            yield self._problem(
                path,
                InvalidInputError(
                    f"{path}: {what}, not files of an old layout; milepost export writes it in "
                    "another layout",
                    path=path,
                ),
            )
            return
        tasks = list(self._in_directory(path, path))
        if not tasks:
            deeper = "" if self.search is Search.RECURSIVE else " (--recursive looks deeper)"
            error = NotFoundError(
                f"{path}: holds no {', '.join(SUFFIXES)} file to migrate{deeper}", path=path
            )
            tasks = [self._problem(path, error)]
        yield from tasks

    def _in_directory(self, path: Path, base: Path) -> Iterator[Task]:
        directories = []
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                directories.append(entry)
            elif self._is_candidate(entry):
                yield self._task(entry, base, searched=True)
        for entry in directories if self.search is Search.RECURSIVE else ():
            if not entry.is_symlink() and _checkpoint_kind(entry) is None:
                yield from self._in_directory(entry, base)

    def _is_candidate(self, path: Path) -> bool:
        """Whether a file that nobody named may be a source."""
        if path.name.startswith(".") or not path.is_file():
            return False
        stem, suffix = split_suffix(path.name)
        if self.to is MigrateTarget.SINGLE_FILE and suffix in (META_SUFFIX, LEGACY_SUFFIX):
            meta = path.with_name(trio_names(stem).meta)  # the trio counts before a .pt
            return suffix == META_SUFFIX or not meta.exists()
        if path.name.endswith(EXTRA_STATE_SUFFIX) or _OF_A_TRAINER.fullmatch(path.name):
            return False
        return path.suffix in SUFFIXES

    def given(self, path: Path) -> Task:
        """A file, a stem, or any file of a trio."""
        stem, suffix = split_suffix(path.name)
        if path.is_file() and suffix in ("", LEGACY_SUFFIX):
            return self._task(path, path.parent)
        beside = path.with_name(stem if suffix else path.name)
        for end in SUFFIXES:
            place = beside.with_name(beside.name + end)
            if suffix != LEGACY_SUFFIX and place.is_file() and not self._wants_trio(beside):
                return self._task(place, path.parent)
        beside = path.with_name(stem_of(path.name))
        if path.parent.is_dir() and look(path.parent, trio_names(beside.name)):
            return self._trio_task(beside, path.parent)
        return self._problem(path, _not_found(path, beside, suffix))

    def _wants_trio(self, beside: Path) -> bool:
        """Back into one file: the trio counts before a `.pt` of its name."""
        to_file = self.to is MigrateTarget.SINGLE_FILE
        return to_file and bool(look(beside.parent, trio_names(beside.name)))

    def _task(self, path: Path, base: Path, *, searched: bool = False) -> Task:
        if path.name.endswith(META_SUFFIX):
            return replace(
                self._trio_task(path.with_name(split_suffix(path.name)[0]), base),
                searched=searched,
            )
        directory, stem = self._directory(path, base), stem_of(path.name)
        task = Task(source=path, directory=directory, stem=stem, searched=searched)
        same = self.to is MigrateTarget.SINGLE_FILE and path.name == stem + LEGACY_SUFFIX
        if same and os.path.realpath(directory) == os.path.realpath(path.parent):
            return replace(task, skip="it is one file already; --out writes it anew elsewhere")
        return task

    def _trio_task(self, beside: Path, base: Path) -> Task:
        task = Task(
            source=beside, directory=self._directory(beside, base), stem=beside.name, is_trio=True
        )
        if self.to is MigrateTarget.TRIO:
            return replace(task, skip="it is a trio already")
        return task

    def _directory(self, path: Path, base: Path) -> Path:
        if self.out is None:
            return path.parent
        return self.out / path.parent.relative_to(base)

    def _problem(self, path: Path, error: CheckpointError) -> Task:
        return Task(source=path, directory=path.parent, stem=path.name, problem=error)


def _checkpoint_kind(path: Path) -> str | None:
    if (path / MANIFEST_NAME).is_file():
        return "a checkpoint directory"
    if (path / METADATA_NAME).is_file():
        return "a directory of torch's distributed checkpoint"
    return "a Hugging Face model" if (path / "config.json").is_file() else None


def _not_found(path: Path, beside: Path, suffix: str) -> NotFoundError:
    tried = "" if suffix == LEGACY_SUFFIX else f", and no {beside.name}.pt beside it"
    there = ""
    if path.parent.is_dir():
        names = sorted(e.name for e in path.parent.iterdir() if e.suffix in SUFFIXES)
        there = f"; {path.parent} holds {', '.join(names[:5]) or 'no such file'}"
    return NotFoundError(f"{path}: nothing is there{tried}{there}", path=path)
