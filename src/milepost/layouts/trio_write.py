"""Writing and removing trios: each file once, all names changed as one.

The three files are written under temporary names (`StagedTrio`), hard-linked for each further name
(copied where the file system refuses links) and made durable. Then one intent record renames them
all and removes a `.pt` of the same name, so that a crash at any instant leaves the old checkpoints
or the new ones.
Files with more than one name are read-only (mode 0444): writing into one would change them all.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import FormatError, InvalidInputError, StorageError
from milepost.layouts.trio_content import PreparedTrio, TrioContent
from milepost.layouts.trio_meta import StateDigest, WeightDigests, encode_meta
from milepost.layouts.trio_names import (
    LEGACY_SUFFIX,
    WEIGHTS_SUFFIX,
    TrioNames,
    check_stem,
    trio_names,
)
from milepost.storage import atomic, fileops
from milepost.storage.attributes import FileAttributes
from milepost.storage.fileops import PathLike
from milepost.storage.intent import INTENT_NAME, commit_names, finish_intent, read_intent
from milepost.storage.lease import RunLease
from milepost.storage.links import LINKED_MODE, NO_LINKS
from milepost.storage.space import require_space, storage_error
from milepost.storage.staging import remove_leftovers

if TYPE_CHECKING:
    from milepost.engine.write import WriteOptions

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".milepost-trio-"
_COPY_NBYTES = 8 * 2**20
_LEFTOVER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+|\.{re.escape(INTENT_NAME)}\..+\.tmp")
# The lease is one for the process; two threads of it must not clean each other's files away.
_writing = threading.RLock()
_in_use: set[str] = set()  # the save_id of each trio that a thread of this process has staged


class StaleFile(Enum):
    """What becomes of a `.pt` that has the name of a trio being written."""

    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioWritten:
    """What `write_trio` did. `nbytes` went to disk; `linked` tells that further names cost none."""

    save_id: str
    paths: tuple[Path, ...]
    nbytes: int
    linked: bool


def write_trio(
    directory: PathLike,
    names: Sequence[str],
    content: TrioContent,
    options: WriteOptions | None = None,
    *,
    stale: StaleFile = StaleFile.REMOVE,
) -> TrioWritten:
    """Save `content` under every name of `names`, replacing what had them, as one change.

    Everything is durable when this returns. An error leaves the old files as they were. What could
    not be loaded back is refused before a byte is written: `UnencodableError` with its key.
    `RunInUseError` when another process writes into `directory`, `NoSpaceError` when it is full.
    """
    run = Path(directory)
    _check_names(names)
    trio = PreparedTrio(content)
    with _writing, staged_trio(run, names, trio, options) as staged:
        old = [name + LEGACY_SUFFIX for name in names] if stale is StaleFile.REMOVE else []
        staged.publish(removes=[file for file in old if _is_file(run / file)])
        return staged.written()


@dataclass(slots=True, kw_only=True)
class StagedTrio:
    """A trio that is complete and durable under temporary names, and can be read there.

    `path` is its directory and temporary stem.
    """

    run: Path
    names: tuple[str, ...]
    trio: PreparedTrio
    temporary: list[TrioNames]
    nbytes: int = 0
    linked: bool = True
    is_published: bool = False

    @property
    def path(self) -> Path:
        return self.run / self.temporary[0].weights.removesuffix(WEIGHTS_SUFFIX)

    def publish(
        self, *, renames: Sequence[tuple[str, str]] = (), removes: Sequence[str] = ()
    ) -> None:
        """Give the files their names; further files of the directory change in the same step."""
        own = [
            pair
            for source, name in zip(self.temporary, self.names, strict=True)
            for pair in zip(source, trio_names(name), strict=True)
        ]
        with _writing:
            commit_names(self.run, renames=[*renames, *own], removes=removes)
        self.is_published = True
        logger.info("saved %s (%d bytes) in %s", ", ".join(self.names), self.nbytes, self.run)

    def written(self) -> TrioWritten:
        return TrioWritten(
            save_id=self.trio.save_id,
            paths=tuple(self.run / name for name in self.names),
            nbytes=self.nbytes if self.linked else self.nbytes * len(self.names),
            linked=self.linked,
        )


@contextmanager
def staged_trio(
    run: Path,
    names: Sequence[str],
    trio: PreparedTrio,
    options: WriteOptions | None = None,
    *,
    like: FileAttributes | None = None,
) -> Iterator[StagedTrio]:
    """Write `trio` under temporary names; what is not published when the block ends is removed.

    The lease of `run` is held meanwhile; threads may do this side by side. Errors and refusals are
    those of `write_trio`. The files get the mode and times of `like`.
    """
    _check_names(names)
    temporary = [trio_names(f"{TEMPORARY_PREFIX}{trio.save_id}-{n}") for n in range(len(names))]
    staged = StagedTrio(run=run, names=tuple(names), trio=trio, temporary=temporary)
    with _writing_into(run, needed_nbytes=trio.nbytes):
        with _writing:
            _remove_leftovers(run)
            _in_use.add(trio.save_id)
        try:
            require_space(run, trio.nbytes)
            staged.nbytes = _write_files(run, temporary[0], trio, options)
            staged.linked = _give_names(run, temporary)
            if like is not None:
                for name in temporary[0]:
                    like.give(run / name)
            yield staged
        except BaseException as error:
            _abandon(staged, error)
            raise
        else:
            if not staged.is_published:
                _remove_all(staged)
        finally:
            _in_use.discard(trio.save_id)


def remove_trio(directory: PathLike, names: Sequence[str]) -> list[str]:
    """Remove all files of these trios, and a `.pt` of the same name, as one change.

    Returns the names of the files that were there.
    """
    run = Path(directory)
    for name in names:
        check_stem(name)
    with _writing, _writing_into(run):
        files = [file for name in names for file in (*trio_names(name), name + LEGACY_SUFFIX)]
        there = [file for file in files if _is_file(run / file)]
        if there:
            commit_names(run, renames=(), removes=there)
    return there


def finish_changes(directory: Path) -> None:
    """Carry out what a dead writer had recorded and readers see already, if there is anything."""
    if directory.is_dir() and read_intent(directory) is not None:
        with _writing, _writing_into(directory):
            pass


def publish_file(directory: Path, temporary: str, name: str, removes: Sequence[str]) -> None:
    """Rename a durable temporary file to `name` and remove other names, as one change."""
    with _writing, _writing_into(directory):
        commit_names(directory, renames=((temporary, name),), removes=removes)


@contextmanager
def _writing_into(run: Path, *, needed_nbytes: int | None = None) -> Iterator[None]:
    """The lease of `run`, with what a dead writer recorded carried out; errors become ours."""
    try:
        with RunLease.of(run):
            finish_intent(run)
            yield
    except OSError as error:
        raise storage_error(error, run, needed_nbytes=needed_nbytes) from error


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        check_stem(name)
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(f"names={list(names)!r}: expected at least one, each once")


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and not (path.is_dir() and not path.is_symlink())


def _remove_leftovers(run: Path) -> None:
    """What dead writers left; the lease is ours, so nobody else is writing here."""
    remove_leftovers(run)
    for entry in list(os.scandir(run)):
        if _LEFTOVER.fullmatch(entry.name) and not any(own in entry.name for own in _in_use):
            logger.info("removing %s, left by a save that did not finish", entry.path)
            fileops.unlink(entry.path)


def _write_files(
    run: Path, names: TrioNames, trio: PreparedTrio, options: WriteOptions | None
) -> int:
    from milepost.engine.write import WriteOptions, write_files
    from milepost.layouts.torch_archive import write_archive

    weights = trio.weights_file(run / names.weights)
    (extents,) = write_files([weights], options or WriteOptions())
    written = write_archive(run / names.extra_state, trio.state)
    meta = replace(
        trio.meta,
        weights=WeightDigests.of(extents),
        extra_state=StateDigest(nbytes=written.nbytes, digest=written.digest),
    )
    document = encode_meta(meta)
    atomic.write_new_file(run / names.meta, document)
    return weights.nbytes + written.nbytes + len(document)


def _give_names(run: Path, temporary: Sequence[TrioNames]) -> bool:
    """Further names for the files just written; True unless a file had to be copied."""
    first, *others = temporary
    linked = True
    for other in others:
        for source, target in zip(first, other, strict=True):
            try:
                fileops.link(run / source, run / target)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                _copy(run / source, run / target)
                linked = False
    for source in first:
        if (run / source).stat().st_nlink > 1:
            fileops.change_mode(run / source, LINKED_MODE)
    return linked


def _copy(source: Path, target: Path) -> None:
    require_space(target.parent, source.stat().st_size)
    descriptor = fileops.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(source, "rb") as file:
            at = 0
            while data := file.read(_COPY_NBYTES):
                fileops.write_at(descriptor, data, at)
                at += len(data)
        fileops.sync_data(descriptor)
    finally:
        fileops.close_file(descriptor)


def _abandon(staged: StagedTrio, error: BaseException) -> None:
    """Remove the temporary files, unless the record that needs them is already written."""
    run = staged.run
    try:
        is_recorded = _is_promised(staged)
    except (OSError, FormatError):
        is_recorded = True  # it may be; the next writer finds out
    if is_recorded and isinstance(error, OSError):
        raise StorageError(
            f"{run}: {error.strerror} after the save was recorded: readers see it already, and the "
            "next save completes it",
            path=run,
            number=error.errno,
        ) from error
    if not is_recorded:
        _remove_all(staged)


def _is_promised(staged: StagedTrio) -> bool:
    """Whether an intent record says that these files are to become the real ones."""
    intent = read_intent(staged.run)
    return intent is not None and staged.temporary[0].weights in {s for s, _ in intent.renames}


def _remove_all(staged: StagedTrio) -> None:
    for names in staged.temporary:
        for name in names:
            atomic.remove_quietly(staged.run / name)
