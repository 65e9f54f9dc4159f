"""Into one `.pt`: the contract of the single file, for programs that read nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from milepost.engine.write import WriteOptions
from milepost.errors import InvalidInputError
from milepost.layouts.legacy import described
from milepost.layouts.payload import STATE_SLOTS
from milepost.layouts.single_file import RESERVED_KEYS
from milepost.layouts.torch_archive import check_loadable, write_archive
from milepost.layouts.trio_content import tensor_nbytes_below
from milepost.layouts.trio_names import LEGACY_SUFFIX, look, trio_names
from milepost.layouts.trio_write import publish_file
from milepost.storage import atomic, fileops
from milepost.storage.attributes import FileAttributes
from milepost.storage.intent import read_intent
from milepost.storage.owned_names import owned_name, remove_dead
from milepost.storage.space import require_space, storage_error
from milepost.tools.migrate_compare import Comparison
from milepost.tools.migrate_content import DESCRIBED, Content, file_content
from milepost.tools.migrate_target import Leaving, leave
from milepost.tools.migrate_trio import with_versions


class SingleFileTarget:
    """One file. A trio of its stem would count before it, so that goes in the same step."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.stem = stem
        self.path = directory / f"{stem}{LEGACY_SUFFIX}"
        self._payload: dict[str, Any] = {}
        self._nbytes = 0
        self._like: FileAttributes | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def there(self) -> Sequence[Path]:
        if not self.directory.is_dir():
            return []
        trio = [self.directory / name for name in look(self.directory, trio_names(self.stem))]
        return [*([self.path] if self.path.exists() else []), *trio]

    def is_whole(self) -> bool:
        return self.path.is_file()

    def content(self) -> AbstractContextManager[Content]:
        return file_content(self.path)

    def prepare(self, content: Content, attributes: FileAttributes) -> int:
        self._payload = _payload(content)
        check_loadable(self._payload)
        self._nbytes, self._like = tensor_nbytes_below(self._payload), attributes
        return self._nbytes

    def write(
        self, options: WriteOptions, proof: Callable[[Content], bool] | None, leaving: Leaving
    ) -> int | None:
        temporary = owned_name(self.path)
        try:
            fileops.make_directories(self.directory)
            remove_dead(self.path)
            require_space(self.directory, self._nbytes)
            written = write_archive(temporary, self._payload)
            if self._like is not None:
                self._like.give(temporary)
            if proof is not None:
                with file_content(temporary) as content:
                    if not proof(content):
                        return None
            self._publish(temporary, leaving)
        except OSError as error:
            raise storage_error(error, self.path) from error
        finally:
            if not _is_promised(temporary):
                atomic.remove_quietly(temporary)
        return written.nbytes

    def _publish(self, temporary: Path, leaving: Leaving) -> None:
        """Backups are made after it: until then a trio of this stem counts before the file."""
        here = os.path.realpath(leaving.directory) == os.path.realpath(self.directory)
        moving = {self.directory / source for source, _ in leaving.renames} if here else set()
        removes = [path.name for path in self.there() if path not in {self.path, *moving}]
        if here:
            removes += [name for name in leaving.removes if name not in removes]
        publish_file(self.directory, temporary.name, self.path.name, removes)
        leave(Leaving(directory=leaving.directory, renames=leaving.renames) if here else leaving)


def _is_promised(temporary: Path) -> bool:
    if not os.path.lexists(temporary):
        return True
    intent = read_intent(temporary.parent)
    return intent is not None and temporary.name in {source for source, _ in intent.renames}


def _payload(content: Content) -> dict[str, Any]:
    """The file's dict; `InvalidInputError` for metadata under a name that the file needs itself."""
    state, slots = content.load()
    metadata = dict(content.metadata)
    compare, derived = Comparison(), described(metadata)
    for name in DESCRIBED:
        if not compare.same(derived[name], content.described[name]):
            metadata[name] = content.described[name]
    clash = [key for key in metadata if key in (*RESERVED_KEYS, *STATE_SLOTS)]
    if clash:
        raise InvalidInputError(
            f"{content.path}: metadata {clash[0]!r}: a single file keeps something else under this "
            "name; it can become a trio or a directory",
            path=content.path,
        )
    optimizer = slots.pop("optimizer_state", None)
    metadata |= slots
    payload: dict[str, Any] = {"model_state": with_versions(state, content.versions)}
    if optimizer is not None:
        payload["optimizer"] = optimizer
    return payload | {"metadata": metadata} | metadata
