"""Files that are open at a time: never more than a process may surely open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from milepost.errors import StorageError

MAX_OPEN_FILES = 256  # many systems let a process open 1024

T = TypeVar("T")


def in_groups_of_files(reads: Iterable[T], path_of: Callable[[T], Path]) -> Iterator[list[T]]:
    """The reads, file by file, in groups of no more files than a process may surely open."""
    by_path: dict[Path, list[T]] = {}
    for read in reads:
        by_path.setdefault(path_of(read), []).append(read)
    paths = list(by_path)
    for start in range(0, len(paths), MAX_OPEN_FILES):
        yield [read for path in paths[start : start + MAX_OPEN_FILES] for read in by_path[path]]


class OpenFiles:
    """Read descriptors of some files, closed together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._descriptors: dict[Path, int] = {}
        try:
            for path in paths:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.__exit__()
            raise StorageError(
                f"{error.filename}: {error.strerror}", path=error.filename, number=error.errno
            ) from error

    def descriptor(self, path: Path) -> int:
        return self._descriptors[path]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
