"""What a checkpoint holds, proven once for the same files under the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import xxhash

T = TypeVar("T")


class Proven(Generic[T]):
    """Remembers what proofs found, by the files that they were about.

    A matrix leaves the checkpoint from before an action as it was at almost every point: that it
    passes its digests and loads bit for bit is a matter of its bytes, and of how it is found.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, T] = {}

    def of(self, files: Iterable[Path], root: Path, name: str, prove: Callable[[], T]) -> T:
        """What `prove()` finds in a checkpoint of these `files` below `root` that is called `name`;
        called when any of them has other bytes, or lies elsewhere, than in all calls before."""
        hasher = xxhash.xxh3_128(name.encode())
        for path in sorted(files):
            content = path.read_bytes()
            hasher.update(f"\0{path.relative_to(root)}\0{len(content)}\0".encode())
            hasher.update(content)
        key = hasher.digest()
        if key not in self._found:
            self._found[key] = prove()
        return self._found[key]


def files_in(directory: Path) -> list[Path]:
    """All of them, those of directories below it too."""
    return [path for path in directory.rglob("*") if path.is_file()]
