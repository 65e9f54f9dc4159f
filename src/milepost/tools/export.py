"""`export_checkpoint`: a checkpoint of any layout, written anew in another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path

from milepost.engine.write import WriteOptions
from milepost.errors import DamagedError, ExistsError, InvalidInputError
from milepost.layouts.checkpoint import Checkpoint, Severity
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.directory_verify import verify_directory
from milepost.layouts.trio_names import look, split_suffix, trio_names
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.storage.fileops import PathLike


class ExportTarget(StrEnum):
    """The layout that an export writes."""

    DIRECTORY = "directory"
    TRIO = "trio"
    SINGLE_FILE = "single-file"


class TrainingState(Enum):
    """Whether optimizer, schedule and other training state go along."""

    LEAVE_OUT = "leave-out"
    INCLUDE = "include"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written: `nbytes` in the files of these names; `notes` say what was left out."""

    path: Path
    target: ExportTarget
    files: tuple[str, ...]
    nbytes: int
    notes: tuple[str, ...] = ()


def export_checkpoint(
    path: PathLike,
    out: PathLike,
    *,
    to: ExportTarget = ExportTarget.DIRECTORY,
    training_state: TrainingState = TrainingState.LEAVE_OUT,
    max_shard_size: int | str = DEFAULT_PART_NBYTES,
    options: WriteOptions | None = None,
) -> ExportReport:
    """Write the checkpoint at `path` as `out`: all of it, or nothing.

    A directory is complete for `from_pretrained` when the source has a configuration; its weights
    are streamed, by the frame of all rewrites. A trio or single file holds the weights under their
    names. What is exported is verified, so that damage is not sealed by new digests.

    Raises `ExistsError` when `out` is there, `InvalidInputError` when the weights need sidecars
    that would be left out, `DamagedError`, `NoSpaceError`, `StorageError`.
    """
    checkpoint = Checkpoint.open(path)
    target = Path(out)
    _check_free(target, to)
    _check_source(checkpoint, to, training_state)
    if to is ExportTarget.DIRECTORY:
        from milepost.tools.export_directory import export_directory

        return export_directory(
            checkpoint,
            target,
            training_state=training_state,
            max_shard_size=max_shard_size,
            options=options or WriteOptions(),
        )
    from milepost.tools.export_files import export_single_file, export_trio

    export = export_trio if to is ExportTarget.TRIO else export_single_file
    return export(checkpoint, target, training_state=training_state)


def _check_free(target: Path, to: ExportTarget) -> None:
    """`ExistsError` when something would be replaced; a wrong name for the layout is refused."""
    if to is ExportTarget.SINGLE_FILE and target.suffix != ".pt":
        raise InvalidInputError(f"{target}: a single file has a name that ends in .pt")
    taken = [target] if os.path.lexists(target) else []
    if to is not ExportTarget.DIRECTORY and target.parent.is_dir():
        stem = split_suffix(target.name)[0]
        taken += [place.path for place in look(target.parent, trio_names(stem)).values()]
    if taken:
        raise ExistsError(
            f"{taken[0]}: is there already; an export replaces nothing: choose another name, or "
            "remove it first",
            path=taken[0],
        )


def _check_source(checkpoint: Checkpoint, to: ExportTarget, training_state: TrainingState) -> None:
    """`DamagedError` when bytes that are to be exported are not those that were saved.

    Weights that go to a directory are proven where they are opened and copied.
    """
    if isinstance(checkpoint, DirectoryCheckpoint):
        unread = _unread(checkpoint, to, training_state)
        threads = WriteOptions().threads
        report = verify_directory(checkpoint, threads=threads, on_bytes=None, leave_out=unread)
    else:
        report = checkpoint.verify(threads=WriteOptions().threads)
    roles = {file.name: file.role for file in checkpoint.files()}
    with_state = training_state is TrainingState.INCLUDE
    errors = [
        problem.message
        for problem in report.problems
        if problem.severity is Severity.ERROR
        and (with_state or roles.get(problem.file, "weights") == "weights")
    ]
    if errors:
        raise DamagedError(
            f"{checkpoint.path}: {len(errors)} things are wrong: {'; '.join(errors[:3])}; nothing "
            "was exported; use another checkpoint",
            path=checkpoint.path,
        )


def _unread(
    checkpoint: DirectoryCheckpoint, to: ExportTarget, training_state: TrainingState
) -> set[str]:
    """Files that the export does not read, or proves itself; a sidecar that is not listed is
    refused as such."""
    weights = {info.file for info in checkpoint.tensors().values()}
    listed = {entry.name for entry in checkpoint.manifest.files}
    needs = set(checkpoint.manifest.needs)
    unread = needs - listed
    if to is ExportTarget.DIRECTORY:
        unread |= weights
    if training_state is TrainingState.LEAVE_OUT:
        unread |= listed - weights - needs - _index_of(checkpoint)
    return unread


def _index_of(checkpoint: DirectoryCheckpoint) -> set[str]:
    """The name of the index of the weights, by which they are read."""
    if not checkpoint.manifest.models:
        return set()
    return {checkpoint.weights().index_path.relative_to(checkpoint.path).as_posix()}
