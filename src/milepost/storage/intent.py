"""Several names changed as one: the intent record.

A change of more than one name (three files of a trio, three names of one save, an old directory
aside and a new one in) is written down first, in one durable file `.milepost-intent.json` of the
run directory. From then on it has happened: a reader that finds the record resolves names through
it in memory, and the next writer that holds the lease carries out what is left. Each item can be
repeated, so a crash in the middle costs nothing.

The record is a JSON object `{"milepost_intent": 1, "removes": [names], "renames": [[from, to]]}`;
names are plain names inside the run directory.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import FormatError, StorageError
from milepost.storage import atomic, fileops
from milepost.storage.space import visible_error

INTENT_NAME = ".milepost-intent.json"
_ASIDE = ".milepost-aside-"
_UNFINISHED_RECORD = re.compile(re.escape(f".{INTENT_NAME}.") + r"[0-9a-f]{16}\.tmp")
# The lease keeps other processes away; this keeps the threads of one from finishing a record twice.
_changing = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a record says: names to remove, then names to move."""

    removes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def resolve(self, run: Path, name: str) -> Path:
        """Where the content that `name` stands for lies now; it need not exist."""
        for source, target in self.renames:
            if target == name and os.path.lexists(run / source):
                return run / source
        if name in self.removes and name not in {target for _, target in self.renames}:
            return run / f"{_ASIDE}removed"  # a name that never exists
        return run / name

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"milepost_intent": 1, "removes": self.removes, "renames": self.renames}, indent=1
        ).encode()


def read_intent(run: Path) -> Intent | None:
    """The record of `run`, if it has one.

    `FormatError` when it cannot be understood; then nothing may be concluded from the names.
    """
    path = run / INTENT_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data: Any = json.loads(raw)
        if data["milepost_intent"] != 1:
            raise ValueError(f"version {data['milepost_intent']!r}")
        intent = Intent(
            removes=tuple(str(name) for name in data["removes"]),
            renames=tuple((str(source), str(target)) for source, target in data["renames"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: not an intent record of this version ({error}); if no job is writing here, "
            "look at the files it names and remove it by hand",
            path=path,
        ) from error
    for name in (*intent.removes, *(name for pair in intent.renames for name in pair)):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise FormatError(f"{path}: {name!r} is not a plain name; refusing it", path=path)
    return intent


def resolve_name(run: Path, name: str) -> Path:
    """`run / name`, seen through the intent record if there is one."""
    intent = read_intent(run)
    return run / name if intent is None else intent.resolve(run, name)


def commit_names(
    run: Path, *, renames: Sequence[tuple[str, str]], removes: Sequence[str] = ()
) -> None:
    """Make all renames and removals happen, or none. The caller holds the lease of `run`.

    The sources are complete and durable. A `StorageError` comes after the change: readers see it,
    and the next writer finishes it. After any other `OSError` nothing has changed.
    """
    with _changing:
        finish_intent(run)
        if not removes and len(renames) == 1:
            ((source, target),) = renames
            rename_and_sync(run / source, run / target)
            return
        intent = Intent(removes=tuple(removes), renames=tuple(renames))
        # The names of the sources must be durable before the record that relies on them.
        fileops.sync_directory(run)
        try:
            atomic.replace_file(run / INTENT_NAME, intent.to_bytes())
            _carry_out(run, intent)
        except OSError as error:
            if not _may_have_record(run):
                raise
            raise StorageError(
                f"{error.filename or run}: {error.strerror or error} after the change was recorded "
                f"in {INTENT_NAME}: readers see it already, and the next save completes it",
                path=run,
                number=error.errno,
            ) from error


def rename_and_sync(source: Path, target: Path) -> None:
    """Rename within a directory, durably. A `StorageError` comes after it: readers see it."""
    fileops.rename(source, target)
    try:
        fileops.sync_directory(target.parent)
    except OSError as error:
        raise visible_error(error, target) from error


def _may_have_record(run: Path) -> bool:
    try:
        return read_intent(run) is not None
    except (OSError, FormatError):
        return True


def finish_intent(run: Path) -> None:
    """Carry out what a dead writer wrote down. The caller holds the lease of `run`."""
    with _changing:
        intent = read_intent(run)
        if intent is not None:
            # Its writer may have died before the record was durable, and what is old goes now.
            fileops.sync_directory(run)
            _carry_out(run, intent)


def _carry_out(run: Path, intent: Intent) -> None:
    targets = {target for _, target in intent.renames}
    for name in intent.removes:
        # A name that something moves to may hold the new content already: its move replaces it.
        if name not in targets:
            remove_entry(run, name)
    for source, target in intent.renames:
        if os.path.lexists(run / source):
            _move(run, source, target)
    fileops.sync_directory(run)
    with suppress(OSError):  # all has happened: a record that stays or comes back changes nothing
        fileops.unlink(run / INTENT_NAME)
        fileops.sync_directory(run)


def _move(run: Path, source: str, target: str) -> None:
    if _is_directory(run / target) or (
        _is_directory(run / source) and os.path.lexists(run / target)
    ):
        remove_entry(run, target)
    fileops.rename(run / source, run / target)
    if os.path.lexists(run / source):  # both were names of one file, where rename does nothing
        fileops.unlink(run / source)


def remove_entry(run: Path, name: str) -> None:
    """Remove a file or a directory of `run`; a directory goes out of the way at once, first."""
    path = run / name
    if not _is_directory(path):
        fileops.unlink(path)
        return
    with _changing:
        aside = run / f"{_ASIDE}{os.urandom(6).hex()}"
        fileops.rename(path, aside)
        fileops.sync_directory(run)
        fileops.remove_tree(aside)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove_asides(run: Path) -> None:
    """Remove what a dead process had renamed away and not yet emptied, or had begun to record.

    The caller holds the lease of `run`.
    """
    with _changing, suppress(FileNotFoundError, NotADirectoryError):
        entries = list(os.scandir(run))
        if any(entry.name.startswith(_ASIDE) for entry in entries):
            # A power cut must not give them their names back when they are half empty.
            fileops.sync_directory(run)
        for entry in entries:
            if entry.name.startswith(_ASIDE) and entry.is_dir(follow_symlinks=False):
                fileops.remove_tree(entry.path)
            elif _UNFINISHED_RECORD.fullmatch(entry.name):
                fileops.unlink(entry.path)
