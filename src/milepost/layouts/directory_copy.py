"""A committed checkpoint copied elsewhere: byte for byte, proven on the way, committed like a save.

Every byte is hashed as it passes and compared with the digests of the manifest, so a copy is never
worse than what was saved: damage in the source is found and named, and nothing is published.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from milepost.engine.open_files import OpenFiles, in_groups_of_files
from milepost.engine.read import read_fully
from milepost.engine.source import Scratch, memory_of
from milepost.engine.verify import find_bad_extents
from milepost.engine.write import (
    Durability,
    FileWrite,
    Piece,
    WriteOptions,
    create_files,
    fill_files,
)
from milepost.errors import CheckpointError, DamagedError, NotFoundError, ReplacedError
from milepost.format.digests import EXTENT_NBYTES, Extent, digest_of
from milepost.format.manifest import MANIFEST_NAME, FileEntry
from milepost.layouts.directory import DirectoryCheckpoint, read_manifest
from milepost.layouts.directory_verify import recorded_extents
from milepost.layouts.run import RunEntry, list_run
from milepost.storage import atomic, fileops
from milepost.storage.links import link_committed, sync_committed
from milepost.storage.space import storage_error
from milepost.storage.staging import StagingDirectory


class _FileRange:
    """Bytes of an open file as a source."""

    def __init__(self, descriptor: int, path: Path, start: int, nbytes: int) -> None:
        self._descriptor, self._path, self._start = descriptor, path, start
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        memory = memory_of(scratch.tensor())
        for begin in range(start, end, memory.nbytes):
            view = memory[: min(memory.nbytes, end - begin)]
            read_fully(self._descriptor, view, self._start + begin, self._path)
            yield view


def copy_checkpoint(source: Path, target: Path, options: WriteOptions) -> int:
    """Copy the checkpoint directory `source` to `target`, which appears whole or not at all.

    Bytes copied; 0 when `target` holds that checkpoint already, each file with its stated size.
    What else has the name, such as a torn copy, is replaced. Files that are links in `source`
    become links to an earlier copy beside `target`, where that has them and their bytes are proven
    there. What `source` holds beyond the files of its manifest stays behind. `DamagedError` when
    its bytes are not those that were saved, `NoSpaceError`, `StorageError`.
    """
    raw = _manifest_bytes(source)
    checkpoint = DirectoryCheckpoint(source)
    checkpoint_id = checkpoint.manifest.checkpoint_id
    if _is_whole_at(target, raw):
        return 0
    if checkpoint.damage:
        name, how = checkpoint.damage[0]
        raise DamagedError(f"{source}: {name.name} {how}; it was not copied", path=source)
    fileops.make_directories(target.parent)
    staging = StagingDirectory(
        target,
        unique=f"{checkpoint_id}-{target.name}",
        owns=lambda path: _id_at(path) == checkpoint_id,
    )
    needed = checkpoint.manifest.nbytes
    try:
        with staging:
            linked = _link_files(checkpoint, staging.path, options)
            entries = [entry for entry in checkpoint.manifest.files if entry.name not in linked]
            _copy_files(checkpoint, entries, staging.path, options)
            if _manifest_bytes(source) != raw:
                raise ReplacedError(
                    f"{source}: it was replaced while it was being copied; copy it again",
                    path=source,
                )
            atomic.write_new_file(staging.path / MANIFEST_NAME, raw)
            if os.path.lexists(target):
                staging.commit_replacing()
            else:
                staging.commit()
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(error, target, needed_nbytes=needed) from error
    return sum(entry.nbytes for entry in entries)


def _manifest_bytes(source: Path) -> bytes:
    try:
        return (source / MANIFEST_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{source}: no checkpoint to copy", path=source) from None


def _id_at(path: Path) -> str | None:
    try:
        return read_manifest(path).checkpoint_id
    except CheckpointError:
        return None


def _is_whole_at(target: Path, raw: bytes) -> bool:
    """Whether the checkpoint with this manifest is at `target`, each file with its stated size."""
    try:
        return _manifest_bytes(target) == raw and not DirectoryCheckpoint(target).damage
    except (CheckpointError, OSError):  # a copy that cannot be looked at is none
        return False


def _link_files(checkpoint: DirectoryCheckpoint, into: Path, options: WriteOptions) -> set[str]:
    """Link what an earlier copy has of the linked files; the names of those that it has."""
    linked: set[str] = set()
    if not checkpoint.manifest.linked:
        return linked
    _make_parents(checkpoint.manifest.linked, into)
    copies = list_run(into.parent).committed
    for name in checkpoint.manifest.linked:
        wanted = checkpoint.manifest.file(name)
        assert wanted is not None, "a linked file is listed"
        extents = recorded_extents(checkpoint.path, wanted) or [_whole(wanted)]
        for path in (path for copy in reversed(copies) for path in _equals(copy, wanted)):
            if find_bad_extents({path: extents}, threads=options.threads):
                continue
            if link_committed(path, into / name):
                if options.durability is Durability.DURABLE:
                    sync_committed(into / name)
                linked.add(name)
            break
    return linked


def _whole(entry: FileEntry) -> Extent:
    return Extent(digest=bytes.fromhex(entry.digest), start=0, nbytes=entry.nbytes)


def _equals(copy: RunEntry, wanted: FileEntry) -> Iterator[Path]:
    """Files of a checkpoint with the size and digest of `wanted`."""
    for entry in copy.manifest.files:
        is_same = (entry.nbytes, entry.digest) == (wanted.nbytes, wanted.digest)
        if is_same and (entry.records is None) == (wanted.records is None):
            yield copy.path / entry.name


def _make_parents(names: Iterable[str], into: Path) -> None:
    for parent in sorted({name.rpartition("/")[0] for name in names} - {""}):
        for depth in range(parent.count("/") + 1):
            directory = into / "/".join(parent.split("/")[: depth + 1])
            if not directory.is_dir():
                fileops.make_directory(directory)


def _copy_files(
    checkpoint: DirectoryCheckpoint,
    entries: Sequence[FileEntry],
    into: Path,
    options: WriteOptions,
) -> None:
    _make_parents((entry.name for entry in entries), into)
    create_files([_file_write(into, entry) for entry in entries])
    for some in in_groups_of_files(entries, lambda entry: checkpoint.path / entry.name):
        expected = [recorded_extents(checkpoint.path, entry) for entry in some]
        with OpenFiles([checkpoint.path / entry.name for entry in some]) as files:
            writes = [
                _file_write(into, entry, _pieces(files, checkpoint.path, entry, extents))
                for entry, extents in zip(some, expected, strict=True)
            ]
            found = fill_files(writes, options)
        for entry, wanted, got in zip(some, expected, found, strict=True):
            _compare(checkpoint.path, entry, wanted, got)


def _file_write(into: Path, entry: FileEntry, pieces: tuple[Piece, ...] = ()) -> FileWrite:
    return FileWrite(path=into / entry.name, pieces=pieces, file_nbytes=entry.nbytes)


def _pieces(
    files: OpenFiles, source: Path, entry: FileEntry, extents: Sequence[Extent]
) -> tuple[Piece, ...]:
    """One piece for each recorded extent, so that what is hashed is what was recorded."""
    place = source / entry.name
    descriptor = files.descriptor(place)
    spans = [(extent.start, extent.nbytes) for extent in extents] or [(0, entry.nbytes)]
    return tuple(
        Piece(start=start, source=_FileRange(descriptor, place, start, nbytes))
        for start, nbytes in spans
        if nbytes
    )


def _compare(
    source: Path, entry: FileEntry, wanted: Sequence[Extent], found: Sequence[Extent]
) -> None:
    if wanted:
        bad = [w for w, f in zip(wanted, found, strict=True) if w.digest != f.digest]
        if bad:
            raise _damaged(source, entry, bad[0].start, bad[0].start + bad[0].nbytes)
        return
    if entry.nbytes <= EXTENT_NBYTES:
        digest = found[0].digest.hex() if found else digest_of(b"")
    else:  # a document of one digest that is longer than an extent: the records themselves
        digest = digest_of((source / entry.name).read_bytes())
    if digest != entry.digest:
        raise _damaged(source, entry, 0, entry.nbytes)


def _damaged(source: Path, entry: FileEntry, start: int, end: int) -> DamagedError:
    return DamagedError(
        f"{source / entry.name}: bytes {start} to {end} are not those that were saved; the "
        "checkpoint was not copied",
        path=source / entry.name,
    )
