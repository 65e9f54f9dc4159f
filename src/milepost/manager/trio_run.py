"""Which trios a directory of epochs holds: `latest`, `best` and `epoch_<N>`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import CheckpointError
from milepost.layouts.checkpoint import CheckpointInfo
from milepost.layouts.single_file import SingleFileCheckpoint
from milepost.layouts.trio import TrioCheckpoint, find_trio, remove_trio
from milepost.layouts.trio_names import LEGACY_SUFFIX, split_suffix
from milepost.manager.pins import pins_of
from milepost.manager.retention import Kept, RetentionPolicy, age_s, union
from milepost.storage.intent import read_intent, resolve_name

LATEST = "latest"
BEST = "best"
EPOCH_NAME = re.compile(r"epoch_([1-9][0-9]*)")
_ADAPTER = re.compile(r"peft_adapter_.+\.bin")
_CHECKPOINT_DIRECTORY = re.compile(r"checkpoint-[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioEntry:
    """A name of the run and what lies under it; `problem` instead of `info` when it is damaged."""

    name: str
    path: Path
    info: CheckpointInfo | None = None
    problem: CheckpointError | None = None

    @property
    def number(self) -> int | None:
        """N of `epoch_<N>`."""
        match = EPOCH_NAME.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def metrics(self) -> dict[str, Any]:
        """What can be chosen by: the loss and every recorded metric."""
        assert self.info is not None, "a damaged entry has no metrics"
        return {"loss": self.info.loss, **self.info.metrics}


def open_training(path: Path) -> TrioCheckpoint | SingleFileCheckpoint:
    """The trio at the stem `path`, or the `.pt` of that name; any sidecar makes the trio count.

    `NotFoundError` when neither is there.
    """
    stem = split_suffix(path.name)[0]
    legacy = path.with_name(stem + LEGACY_SUFFIX)
    is_there = path.parent.is_dir() and resolve_name(path.parent, legacy.name).is_file()
    trio = find_trio(legacy if is_there else path)
    return trio if trio is not None else SingleFileCheckpoint(legacy)


def look_at(directory: Path, name: str) -> TrioEntry:
    """One name of the run; its documents are read, no tensor is."""
    path = directory / name
    try:
        return TrioEntry(name=name, path=path, info=open_training(path).info)
    except CheckpointError as error:
        return TrioEntry(name=name, path=path, problem=error)


def names_there(directory: Path) -> list[str]:
    """The names of the run that have at least one file, `latest` first, then by epoch, newest
    first, then `best`."""
    found = {split_suffix(name)[0] for name in _files(directory) if split_suffix(name)[1]}
    numbers = sorted((int(m[1]) for n in found if (m := EPOCH_NAME.fullmatch(n))), reverse=True)
    return [
        *([LATEST] if LATEST in found else []),
        *(f"epoch_{number}" for number in numbers),
        *([BEST] if BEST in found else []),
    ]


def _files(directory: Path) -> set[str]:
    if not directory.is_dir():
        return set()
    names = {place.name for place in directory.iterdir() if not place.name.startswith(".")}
    intent = read_intent(directory)
    return names if intent is None else names | {target for _, target in intent.renames}


def foreign_names(directory: Path, ours: Collection[str]) -> list[str]:
    """Checkpoints of other names or layouts that lie here; a fresh run beside them is a mistake."""
    return sorted(
        name
        for name in _files(directory)
        if (split_suffix(name)[1] and split_suffix(name)[0] not in ours)
        or (_CHECKPOINT_DIRECTORY.fullmatch(name) and (directory / name).is_dir())
        if not _ADAPTER.fullmatch(name)
    )


def numbered(directory: Path) -> list[TrioEntry]:
    """The numbered epochs that can be read, oldest first."""
    names = [name for name in reversed(names_there(directory)) if EPOCH_NAME.fullmatch(name)]
    entries = [look_at(directory, name) for name in names]
    return [entry for entry in entries if entry.info is not None]


def prune_epochs(
    directory: Path, policies: Sequence[RetentionPolicy], *, protect: Collection[str]
) -> list[str]:
    """Remove the numbered epochs that no policy keeps, and return their names.

    Never goes: the newest, pinned epochs, and the `save_id`s in `protect` (the best, the one
    resumed from). What cannot be read neither counts nor is removed. Reads the disk, so it holds
    over restarts.
    """
    entries = numbered(directory)
    kept_of = [
        Kept(step=entry.number or 0, metrics=entry.metrics, age_s=age_s(entry.info.created) or 0.0)
        for entry in entries
        if entry.info is not None
    ]
    kept = set(union(policies, kept_of)) | pins_of(directory)
    going = [
        entry.name
        for entry in entries[:-1]
        if entry.number not in kept and _identity(entry) not in protect
    ]
    if going:
        remove_trio(directory, going)
    return going


def _identity(entry: TrioEntry) -> str | None:
    return None if entry.info is None else entry.info.checkpoint_id
