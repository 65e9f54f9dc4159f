"""What may be on the disk after a power cut: recorded operations, with what was not synced lost.

The model is simple and stricter than most file systems:

- the bytes of a file are durable when that file has been fsynced after they were written; before
  that they may be there, or be zeros, or be missing;
- a change of names (create, rename, exchange, link, remove) is durable when every directory that it
  touches has been fsynced after it; before that it may have happened or not, independently of every
  other change, but it never happens by half.

So nothing is promised by order alone, as journals do; only by an fsync.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from milepost.testing.disk import DirectoryNode, DirectoryTree, FileNode, LinkNode
from milepost.testing.faults import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLoss:
    """A disk after a power cut that came when `done` operations of the record had returned.

    `finished` is True when all had, so that what they promised must hold.
    """

    done: int
    finished: bool
    tree: DirectoryTree
    story: str

    def __str__(self) -> str:
        return f"power cut after {self.done} operations, {self.story}"


class _Fate(Enum):
    """What became of bytes that were not synced."""

    MISSING = "missing"
    ZEROS = "zeros"
    THERE = "there"


@dataclass(slots=True, eq=False)
class _File:
    data: bytearray
    durable: bytes | None = None
    mode: int = 0o644

    def after(self, fate: _Fate) -> bytes:
        kept = self.durable or b""
        match fate:
            case _Fate.THERE:
                return bytes(self.data)
            case _Fate.ZEROS:
                return kept + bytes(max(0, len(self.data) - len(kept)))
            case _Fate.MISSING:
                return kept

    @property
    def is_synced(self) -> bool:
        return self.durable is not None and self.durable == self.data


@dataclass(slots=True, eq=False)
class _Directory:
    base: dict[str, _Node] = field(default_factory=dict)
    """What it held when the record began, all of it durable."""
    entries: dict[str, _Node] = field(default_factory=dict)
    """What a running process sees."""


@dataclass(slots=True, eq=False)
class _Link:
    content: str


_Node: TypeAlias = _File | _Directory | _Link


@dataclass(slots=True, eq=False)
class _Change:
    """Names that change together; None for a name that goes."""

    names: list[tuple[_Directory, str, _Node | None]]
    unsynced: set[int] = field(default_factory=set)


def power_loss_states(
    operations: Sequence[Operation],
    before: DirectoryTree,
    *,
    first: int = 0,
    samples: int = 2,
    seed: int = 0,
) -> Iterator[PowerLoss]:
    """Disks that a power cut after `first` operations or later may leave, each different one once.

    `before` is the directory below which they happened, as it was, all of it durable. At each
    operation: nothing that was not synced is there; all names but no bytes; all names and zeros;
    and `samples` mixtures at random. A cut between two writes of one file tells nothing new.
    """
    disk = _Disk(before)
    seen: set[bytes] = set()
    chance = random.Random(seed)
    for done in range(len(operations) + 1):
        if done:
            disk.apply(operations[done - 1])
        if done < first or _goes_on(operations[max(0, done - 1) : done + 1]):
            continue
        for story, tree in disk.outcomes(samples, chance):
            key = _fingerprint(tree)
            finished = done == len(operations)
            if finished or key not in seen:
                seen.add(key)
                yield PowerLoss(done=done, finished=finished, tree=tree, story=story)


def tree_after(operations: Iterable[Operation], before: DirectoryTree) -> DirectoryTree:
    """What the operations made of the directory, without any loss: what a kill leaves."""
    disk = _Disk(before)
    for operation in operations:
        disk.apply(operation)
    return disk.tree(lambda _: True, lambda _: _Fate.THERE)


def _goes_on(around: Sequence[Operation]) -> bool:
    """Whether the operations before and after a cut are writes of one file."""
    kinds = {(one.name, one.target) for one in around}
    return len(around) == 2 and len(kinds) == 1 and around[0].name == "write"


class _Disk:
    """A file system in memory that knows what of it is durable."""

    def __init__(self, before: DirectoryTree) -> None:
        self.root = before.root
        self.top = _started(before.top, {})
        self.changes: list[_Change] = []
        self.files: dict[str, _File] = {}

    def apply(self, operation: Operation) -> None:
        """Carry out what was recorded; what did not happen changes nothing."""
        if not operation.happened:
            return
        arguments = operation.arguments
        match operation.name:
            case "open":
                self.files[operation.target] = self._opened(*arguments[:2])
            case "write":
                self._write(self.files[operation.target], arguments[1], arguments[2])
            case "reserve":
                data = self.files[operation.target].data
                data.extend(bytes(max(0, arguments[1] - len(data))))
            case "truncate":
                data = self.files[operation.target].data
                data[arguments[1] :] = bytes(max(0, arguments[1] - len(data)))
            case "fsync":
                file = self.files[operation.target]
                file.durable = bytes(file.data)
            case "fsync-directory":
                self._sync(self._directory(arguments[0]))
            case "mkdir":
                self._change([(arguments[0], _Directory())])
            case "clone":
                source = self._node(arguments[1])
                assert isinstance(source, _File), arguments[1]
                self.files[operation.target].data[:] = source.data
            case "symlink":
                self._change([(arguments[1], _Link(arguments[0]))])
            case "link":
                self._change([(arguments[1], self._node(arguments[0]))])
            case "rename":
                self._rename(*arguments[:2])
            case "exchange":
                first, second = arguments
                self._change([(first, self._node(second)), (second, self._node(first))])
            case "unlink" | "rmdir":
                if self._node_or_none(arguments[0]) is not None:
                    self._change([(arguments[0], None)])
            case "chmod" | "utime":
                pass
            case other:
                raise AssertionError(f"the model does not know {other}")

    def _opened(self, path: str | os.PathLike[str], flags: int) -> _File:
        node = self._node_or_none(path)
        if node is None:
            node = _File(bytearray())
            self._change([(path, node)])
        assert isinstance(node, _File) and not flags & os.O_TRUNC
        return node

    def _write(self, file: _File, data: bytes, offset: int) -> None:
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(data)] = data

    def _rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        node = self._node(source)
        if node is not self._node_or_none(target):  # of two names of one file, both stay
            self._change([(source, None), (target, node)])

    def _sync(self, directory: _Directory) -> None:
        for change in self.changes:
            change.unsynced.discard(id(directory))

    def _change(self, wanted: list[tuple[str | os.PathLike[str], _Node | None]]) -> None:
        names = [(self._directory(Path(path).parent), Path(path).name, to) for path, to in wanted]
        for directory, name, node in names:
            if node is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = node
        self.changes.append(_Change(names, {id(directory) for directory, _, _ in names}))

    def _directory(self, path: str | os.PathLike[str]) -> _Directory:
        node = self._node(path)
        assert isinstance(node, _Directory), path
        return node

    def _node(self, path: str | os.PathLike[str]) -> _Node:
        node = self._node_or_none(path)
        assert node is not None, f"{path} is not there"
        return node

    def _node_or_none(self, path: str | os.PathLike[str]) -> _Node | None:
        node: _Node | None = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(node, _Directory), path
            node = node.entries.get(part)
        return node

    def outcomes(self, samples: int, chance: random.Random) -> Iterator[tuple[str, DirectoryTree]]:
        fates = list(_Fate)
        yield "no name, no byte", self.tree(lambda _: False, lambda _: _Fate.MISSING)
        yield "names without bytes", self.tree(lambda _: True, lambda _: _Fate.MISSING)
        yield "names and zeros", self.tree(lambda _: True, lambda _: _Fate.ZEROS)
        for number in range(samples):
            tree = self.tree(lambda _: chance.random() < 0.5, lambda _: chance.choice(fates))
            yield f"mixture {number}", tree

    def tree(
        self, happened: Callable[[_Change], bool], fate: Callable[[_File], _Fate]
    ) -> DirectoryTree:
        """The disk, when `happened` and `fate` decide what is not durable."""
        entries: dict[int, dict[str, _Node]] = {}
        for change in self.changes:
            if change.unsynced and not happened(change):
                continue
            for directory, name, node in change.names:
                names = entries.setdefault(id(directory), dict(directory.base))
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return DirectoryTree(root=self.root, top=_ended(self.top, entries, fate, {}))


def _started(node: DirectoryNode, seen: dict[int, _File]) -> _Directory:
    found: dict[str, _Node] = {}
    for name, child in node.entries.items():
        match child:
            case DirectoryNode():
                found[name] = _started(child, seen)
            case LinkNode():
                found[name] = _Link(child.content)
            case FileNode():
                file = _File(bytearray(child.data), child.data, child.mode)
                found[name] = seen.setdefault(id(child), file)
    return _Directory(dict(found), found)


def _ended(
    directory: _Directory,
    entries: dict[int, dict[str, _Node]],
    fate: Callable[[_File], _Fate],
    done: dict[int, FileNode],
) -> DirectoryNode:
    node = DirectoryNode()
    for name, child in sorted(entries.get(id(directory), directory.base).items()):
        match child:
            case _Directory():
                node.entries[name] = _ended(child, entries, fate, done)
            case _Link():
                node.entries[name] = LinkNode(child.content)
            case _File():
                if id(child) not in done:
                    data = bytes(child.data) if child.is_synced else child.after(fate(child))
                    done[id(child)] = FileNode(data, child.mode)
                node.entries[name] = done[id(child)]
    return node


def _fingerprint(tree: DirectoryTree) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for path, data in tree.paths():
        state.update(f"{path}\0{len(data)}\0".encode())
        state.update(data)
    return state.digest()
