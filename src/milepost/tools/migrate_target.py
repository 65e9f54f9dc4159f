"""Where a migration writes: what is there already, and writing under a temporary name first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from milepost.engine.write import WriteOptions
from milepost.errors import RunInUseError, StorageError
from milepost.layouts.trio_content import PreparedTrio
from milepost.layouts.trio_names import look, trio_names
from milepost.layouts.trio_write import staged_trio
from milepost.storage import fileops
from milepost.storage.attributes import FileAttributes
from milepost.storage.lease import LOCK_NAME, Owner
from milepost.storage.space import storage_error
from milepost.tools.migrate_content import Content, trio_content
from milepost.tools.migrate_trio import trio_of

BACKUP_SUFFIX = ".bak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Files that go when the new ones are there: `renames` into backups, `removes` for good."""

    directory: Path
    renames: tuple[tuple[str, str], ...] = ()
    removes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.renames or self.removes)


class Target(Protocol):
    """One layout at one place. `path` is the stem, file or directory."""

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that it will consist of."""
        ...

    def there(self) -> Sequence[Path]:
        """What is there of it now, or shadows it; nothing may be replaced unless asked for."""
        ...

    def is_whole(self) -> bool:
        """Whether all that is there makes up one checkpoint of this layout."""
        ...

    def content(self) -> AbstractContextManager[Content]:
        """What is there, read."""
        ...

    def prepare(self, content: Content, attributes: FileAttributes) -> int:
        """Check and lay out everything; about how many bytes it will take."""
        ...

    def write(
        self, options: WriteOptions, proof: Callable[[Content], bool] | None, leaving: Leaving
    ) -> int | None:
        """Write, prove, publish; the bytes written. None, and nothing is there, without proof."""
        ...


class TrioTarget:
    """Three files; the source leaves in the same step in which they appear."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.stem = stem
        self.path = directory / stem
        self._prepared: tuple[PreparedTrio, FileAttributes] | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.directory / name for name in trio_names(self.stem))

    def there(self) -> Sequence[Path]:
        if not self.directory.is_dir():
            return []
        found = look(self.directory, trio_names(self.stem))
        return [self.directory / name for name in found]

    def is_whole(self) -> bool:
        return len(self.there()) == len(self.files)

    def content(self) -> AbstractContextManager[Content]:
        return trio_content(self.path)

    def prepare(self, content: Content, attributes: FileAttributes) -> int:
        trio = PreparedTrio(trio_of(content, mtime_ns=attributes.times_ns[1]))
        self._prepared = (trio, attributes)
        return trio.nbytes

    def write(
        self, options: WriteOptions, proof: Callable[[Content], bool] | None, leaving: Leaving
    ) -> int | None:
        assert self._prepared is not None, "what is written was prepared first"
        trio, like = self._prepared
        here = os.path.realpath(leaving.directory) == os.path.realpath(self.directory)
        with staged_trio(self.directory, [self.stem], trio, options, like=like) as staged:
            if proof is not None:
                with trio_content(staged.path) as written:
                    if not proof(written):
                        return None
            if here:
                staged.publish(renames=leaving.renames, removes=leaving.removes)
            else:
                staged.publish()
        if not here:
            leave(leaving)
        return staged.nbytes


def leave(leaving: Leaving) -> None:
    """Take the files away, each by one rename or removal."""
    if not leaving:
        return
    try:
        for source, name in leaving.renames:
            fileops.rename_no_replace(leaving.directory / source, leaving.directory / name)
        for name in leaving.removes:
            fileops.unlink(leaving.directory / name)
    except OSError as error:
        raise StorageError(
            f"{leaving.directory}: {error.strerror or error}: what was written is complete, the "
            "source could not be taken away; remove it by hand, or migrate again",
            path=leaving.directory,
            number=error.errno,
        ) from error
    with suppress(OSError):  # after a power cut the source may be there again, which does no harm
        fileops.sync_directory(leaving.directory)


def backup_name(path: Path) -> str:
    """A free name for a backup of `path`: `<name>.bak`, `<name>.bak.1`, ..."""
    for number in itertools.count():
        name = f"{path.name}{BACKUP_SUFFIX}" + (f".{number}" if number else "")
        if not os.path.lexists(path.with_name(name)):
            return name
    raise AssertionError("counting does not end")


@contextmanager
def backups_of(files: Sequence[Path]) -> Iterator[list[Path]]:
    """A second name for each file while it is replaced; taken back when the block raises."""
    made: list[Path] = []
    try:
        for file in files:
            backup = file.with_name(backup_name(file))
            try:
                fileops.link(file, backup)
            except OSError as error:
                raise storage_error(error, backup) from error
            made.append(backup)
        yield made
    except BaseException:
        for backup in made:
            with suppress(OSError):
                fileops.unlink(backup)
        raise


def require_writable(directory: Path) -> None:
    """What a write there would meet, found without one: no permission, another job's lease."""
    place = existing_parent(directory / "x")
    if not place.is_dir():
        raise StorageError(
            f"{place}: not a directory, so nothing can be written below it", path=place
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(
            f"{place}: may not be written to; see to its permissions, or write elsewhere",
            path=place,
        )
    try:
        owner = Owner.from_bytes((directory / LOCK_NAME).read_bytes())
    except OSError:
        return
    if owner is not None and not owner.is_dead() and owner != Owner.this_process():
        raise RunInUseError(
            f"{directory}: {owner} is writing checkpoints here; wait until it has ended, or write "
            "elsewhere",
            path=directory,
        )


def existing_parent(path: Path) -> Path:
    """The nearest directory above `path` that is there."""
    place = path.parent
    while not place.exists():
        place = place.parent
    return place
