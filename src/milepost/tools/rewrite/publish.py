"""The output appears whole and durable under its name, or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from milepost.errors import ExistsError
from milepost.storage import fileops
from milepost.storage.lease import RunLease
from milepost.storage.owned_names import owned_name, remove_dead
from milepost.storage.space import visible_error


class OutputDirectory:
    """A hidden directory beside `target` that `commit` renames; left without it, it is removed.

    What a process that died left for the same target is removed first. With `replaces`, `target`
    is a directory that is exchanged for the new one, under the lease of the run it belongs to.
    """

    def __init__(self, target: Path, *, replaces: bool = False) -> None:
        self.target = target
        self.path = owned_name(target)
        self._replaces = replaces
        self._stack = ExitStack()

    def __enter__(self) -> OutputDirectory:
        fileops.make_directories(self.target.parent)
        if self._replaces:
            self._stack.enter_context(RunLease.of(self.target.parent))
        try:
            remove_dead(self.target)
            fileops.make_directory(self.path)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # the next writer of this name removes what is left
            fileops.remove_tree(self.path)
        self._stack.close()

    def commit(self, *, is_durable: bool) -> None:
        """Publish: every file is durable already. `ExistsError` when the name was taken."""
        parent = self.target.parent
        if is_durable:
            for directory, _, _ in os.walk(self.path, topdown=False):
                fileops.sync_directory(directory)
            fileops.sync_directory(parent)
        if self._replaces:
            self._exchange()
        else:
            self._rename()
        if is_durable:
            try:
                fileops.sync_directory(parent)
            except OSError as error:
                raise visible_error(error, self.target) from error

    def _rename(self) -> None:
        try:
            fileops.rename_no_replace(self.path, self.target)
        except FileExistsError:
            raise ExistsError(
                f"{self.target}: the name was taken meanwhile; nothing was replaced",
                path=self.target,
            ) from None

    def _exchange(self) -> None:
        """Swap old and new; what leaves with this context is the old one then."""
        if fileops.exchange(self.path, self.target):
            return
        aside = owned_name(self.target)  # the file system cannot swap: two renames
        fileops.rename_no_replace(self.target, aside)
        try:
            fileops.rename_no_replace(self.path, self.target)
        except OSError:
            fileops.rename_no_replace(aside, self.target)
            raise
        fileops.remove_tree(aside)
