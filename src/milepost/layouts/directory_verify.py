"""Everything that `verify` checks in a checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.engine.verify import BadExtent, find_bad_extents, tensor_at
from milepost.errors import CheckpointError, DamagedError, FormatError
from milepost.format import manifest as manifests
from milepost.format.digests import (
    RECORD_NBYTES,
    Extent,
    digest_of,
    root_digest,
    unpack_records,
)
from milepost.format.header import read_header
from milepost.format.manifest import FileEntry
from milepost.layouts.checkpoint import Problem, Severity, VerifyReport
from milepost.layouts.tensor_set import TensorSet
from milepost.storage.space import human

if TYPE_CHECKING:
    from milepost.layouts.directory import DirectoryCheckpoint


def verify_directory(
    checkpoint: DirectoryCheckpoint,
    *,
    threads: int,
    on_bytes: Callable[[int], None] | None,
    share: tuple[int, int] = (0, 1),
    leave_out: Collection[str] = (),
) -> VerifyReport:
    """Sizes, digests of every file, indices against headers, and files that do not belong.

    `share` is (rank, world size): each of these ranks hashes other extents, and together all.
    Nothing is said of the files in `leave_out`, which the caller does not read.
    """
    problems: list[Problem] = []
    damaged = {entry.name for entry, _ in checkpoint.damage} | set(leave_out)
    for entry, how in checkpoint.damage:
        problems.append(_problem(entry, f"{entry.name} {how}"))
    jobs: dict[Path, list[Extent]] = {}
    for entry in checkpoint.manifest.files:
        if entry.name in damaged:
            continue
        if entry.records is None:
            problems += _check_whole(checkpoint.path, entry, on_bytes)
            continue
        extents, found = _records(checkpoint.path, entry)
        problems += found
        jobs[checkpoint.path / entry.name] = extents[share[0] :: share[1]]
    bad = find_bad_extents(jobs, threads=threads, on_bytes=on_bytes)
    problems += [_traced(checkpoint, extent) for extent in bad]
    problems += _structure(checkpoint, leave_out)
    problems += _strangers(checkpoint)
    return VerifyReport(
        path=checkpoint.path,
        problems=tuple(problem for problem in problems if problem.file not in leave_out),
        checked_nbytes=sum(entry.nbytes for entry in checkpoint.manifest.files),
        has_digests=True,
    )


def _problem(entry: FileEntry, message: str, tensor: str | None = None) -> Problem:
    severity = Severity.WARNING if entry.role == "info" else Severity.ERROR
    return Problem(severity=severity, file=entry.name, message=message, tensor=tensor)


def _check_whole(
    path: Path, entry: FileEntry, on_bytes: Callable[[int], None] | None
) -> Iterator[Problem]:
    try:
        data = (path / entry.name).read_bytes()
    except OSError as error:
        yield _problem(entry, f"{entry.name} cannot be read: {error.strerror}")
        return
    if on_bytes is not None:
        on_bytes(len(data))
    if digest_of(data) != entry.digest:
        yield _problem(entry, f"{entry.name}: its bytes are not those that were saved")


def _records(path: Path, entry: FileEntry) -> tuple[list[Extent], list[Problem]]:
    """The extents of a file, proven by the root in the manifest and complete, or the problem."""
    assert entry.records is not None
    first, count = entry.records
    place = path / manifests.DIGESTS_NAME
    try:
        if (first + count) * RECORD_NBYTES > place.stat().st_size:
            raise FormatError(f"ends before the {count} records from {first} on of {entry.name}")
        with open(place, "rb") as file:
            file.seek(first * RECORD_NBYTES)
            raw = file.read(count * RECORD_NBYTES)
        if root_digest(raw) != entry.digest:
            message = f"{manifests.DIGESTS_NAME}: the digests of {entry.name} were changed"
            return [], [_problem(entry, message)]
        extents = unpack_records(raw, str(place))
    except (OSError, CheckpointError) as error:
        return [], [_problem(entry, f"{manifests.DIGESTS_NAME}: {error}")]
    covered = 0
    for extent in extents:
        if extent.start != covered:
            break
        covered = extent.end
    if covered != entry.nbytes:
        message = f"{entry.name}: digests cover {covered} of {entry.nbytes} bytes"
        return extents, [_problem(entry, message)]
    return extents, []


def recorded_extents(path: Path, entry: FileEntry) -> list[Extent]:
    """The recorded extents of a file, in order; empty when its one digest is in the manifest.

    `DamagedError` when the records are not those that were saved.
    """
    if entry.records is None:
        return []
    extents, problems = _records(path, entry)
    if problems:
        raise DamagedError(f"{path}: {problems[0].message}", path=path)
    return extents


def _traced(checkpoint: DirectoryCheckpoint, bad: BadExtent) -> Problem:
    name = bad.path.relative_to(checkpoint.path).as_posix()
    entry = checkpoint.manifest.file(name)
    assert entry is not None
    tensor = None
    with suppress(CheckpointError):  # the header is what was damaged; the file is named
        tensor = tensor_at(read_header(bad.path), bad.start, bad.end)
    what = f"tensor {tensor}" if tensor is not None else "the header"
    if bad.error is not None:
        return _problem(entry, f"{name}: {what} cannot be read: {bad.error}", tensor)
    return _problem(
        entry,
        f"{name}: {what}: bytes {bad.start} to {bad.end} ({human(bad.end - bad.start)}) are not "
        "those that were saved",
        tensor,
    )


def _structure(checkpoint: DirectoryCheckpoint, leave_out: Collection[str]) -> Iterator[Problem]:
    listed = {entry.name for entry in checkpoint.manifest.files}
    for name in checkpoint.manifest.needs:
        if name not in listed:
            message = f"{name}: the weights need it, the manifest does not list it"
            yield Problem(severity=Severity.ERROR, file=name, message=message)
    for key, entry in checkpoint.manifest.models.items():
        yield from _check_set(checkpoint.weights(key), entry.prefix, listed)
    for key in checkpoint.manifest.state:
        tensors = checkpoint.state_set(key)
        left_out = tensors is not None and any(
            name.startswith((f"training/{tensors.stem}.", f"training/{tensors.stem}-"))
            for name in leave_out
        )
        if tensors is not None and not left_out:
            yield from _check_set(tensors, "training", listed)


def _check_set(tensors: TensorSet, prefix: str, listed: set[str]) -> Iterator[Problem]:
    try:
        for part in tensors.headers:
            name = f"{prefix}/{part}" if prefix else part
            if name not in listed:
                message = f"{name}: the index names this part, the manifest does not list it"
                yield Problem(severity=Severity.ERROR, file=name, message=message)
    except (CheckpointError, OSError) as error:
        name = f"{prefix}/{tensors.stem}" if prefix else tensors.stem
        yield Problem(severity=Severity.ERROR, file=f"{name}.safetensors", message=str(error))


def _strangers(checkpoint: DirectoryCheckpoint) -> Iterator[Problem]:
    """Files that the manifest does not list; weights among them would be picked up by a glob."""
    listed = {entry.name for entry in checkpoint.manifest.files} | {manifests.MANIFEST_NAME}
    for directory, _, names in os.walk(checkpoint.path):
        for name in names:
            relative = (Path(directory) / name).relative_to(checkpoint.path).as_posix()
            if relative in listed:
                continue
            weighty = relative.endswith((".safetensors", ".bin", ".safetensors.index.json"))
            yield Problem(
                severity=Severity.ERROR if weighty and "/" not in relative else Severity.WARNING,
                file=relative,
                message=f"{relative} was not part of this save",
            )
