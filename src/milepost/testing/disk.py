"""A directory tree as a value: what a file system held at one moment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_IMODE
from typing import TypeAlias

from milepost.storage.fileops import PathLike


@dataclass(slots=True, eq=False)
class FileNode:
    """A file; two names of one file are two entries with one node."""

    data: bytes
    mode: int = 0o644


@dataclass(slots=True, eq=False)
class LinkNode:
    content: str


@dataclass(slots=True, eq=False)
class DirectoryNode:
    entries: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = FileNode | LinkNode | DirectoryNode


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryTree:
    """Everything below `root`, in memory; the copy does not change with the disk."""

    root: Path
    top: DirectoryNode

    @classmethod
    def of(cls, root: PathLike) -> DirectoryTree:
        """What lies at `root` now; an empty tree when nothing does."""
        path = Path(root)
        return cls(root=path, top=_read(path, {}) if path.is_dir() else DirectoryNode())

    def write_to(self, place: PathLike) -> None:
        """Make the new directory `place` with this content, names of one file as hard links."""
        _write(self.top, Path(place), {})

    def paths(self) -> Iterator[tuple[str, bytes]]:
        """Every path below the root, directories with a `/` at the end, and the bytes there."""
        yield from _paths(self.top, "")

    def files(self) -> Mapping[str, bytes]:
        """The bytes of each file and symlink by its path below the root, with `/`."""
        return {path: data for path, data in self.paths() if not path.endswith("/")}


def _read(path: Path, seen: dict[tuple[int, int], FileNode]) -> DirectoryNode:
    node = DirectoryNode()
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_symlink():
            node.entries[entry.name] = LinkNode(os.readlink(entry.path))
        elif entry.is_dir():
            node.entries[entry.name] = _read(Path(entry.path), seen)
        else:
            status = entry.stat()
            identity = (status.st_dev, status.st_ino)
            if identity not in seen:
                data = Path(entry.path).read_bytes()
                seen[identity] = FileNode(data, S_IMODE(status.st_mode))
            node.entries[entry.name] = seen[identity]
    return node


def _write(node: DirectoryNode, place: Path, done: dict[int, Path]) -> None:
    place.mkdir()
    for name, child in node.entries.items():
        target = place / name
        match child:
            case DirectoryNode():
                _write(child, target, done)
            case LinkNode():
                target.symlink_to(child.content)
            case FileNode() if id(child) in done:
                target.hardlink_to(done[id(child)])
            case FileNode():
                target.write_bytes(child.data)
                target.chmod(child.mode)
                done[id(child)] = target


def _paths(node: DirectoryNode, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name, child in sorted(node.entries.items()):
        match child:
            case DirectoryNode():
                yield f"{prefix}{name}/", b""
                yield from _paths(child, f"{prefix}{name}/")
            case LinkNode():
                yield f"{prefix}{name}", os.fsencode(child.content)
            case FileNode():
                yield f"{prefix}{name}", child.data
