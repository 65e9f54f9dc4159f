"""Where the tensors of a checkpoint lie, proven: streams compare the bytes of tensors alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from milepost.engine.verify import find_bad_extents
from milepost.errors import DamagedError
from milepost.format.digests import Extent
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.directory_verify import recorded_extents
from milepost.layouts.tensor_set import TensorSet
from milepost.tools.rewrite.lone_adapter import extra_files

_DIGEST = re.compile(r"[0-9a-f]{32}")


def prove_layout(
    checkpoint: DirectoryCheckpoint, weights: TensorSet, extents_of: Callable[[Path], list[Extent]]
) -> None:
    """Compare index and headers of `weights` with their digests, a few KiB of each file.

    A part that has one digest for all of it is compared whole: it has no more than 64 MiB. So are
    the sidecars that the weights need, and the files beside an adapter that belong to it.
    `extents_of` gives what is recorded for a part.
    `DamagedError` names what is not as it was saved, or was not saved at all.
    """
    jobs: dict[Path, list[Extent]] = {}
    if weights.index is not None or _is_listed(checkpoint, weights.index_path):
        jobs[weights.index_path] = _all_of(checkpoint, weights.index_path)
    for part, header in weights.headers.items():
        path = weights.directory / part
        extents = extents_of(path) or _all_of(checkpoint, path)
        jobs[path] = [extent for extent in extents if extent.start < header.data_start]
    sidecars = [name for name in checkpoint.manifest.needs if checkpoint.manifest.file(name)]
    for name in [*sidecars, *extra_files(checkpoint)]:
        jobs[checkpoint.path / name] = _all_of(checkpoint, checkpoint.path / name)
    for bad in find_bad_extents(jobs):
        what = "the header: " if bad.path.name in weights.headers else ""
        problem = f"cannot be read: {bad.error}" if bad.error else "are not those that were saved"
        raise DamagedError(
            f"{bad.path}: {what}bytes {bad.start} to {bad.end} {problem}; nothing was written; use "
            "another checkpoint",
            path=bad.path,
        )


def _name_of(checkpoint: DirectoryCheckpoint, path: Path) -> str:
    return path.relative_to(checkpoint.path).as_posix()


def _is_listed(checkpoint: DirectoryCheckpoint, path: Path) -> bool:
    return checkpoint.manifest.file(_name_of(checkpoint, path)) is not None


def _all_of(checkpoint: DirectoryCheckpoint, path: Path) -> list[Extent]:
    """All extents of a file that the manifest lists, one where it has one digest."""
    entry = checkpoint.manifest.file(_name_of(checkpoint, path))
    if entry is None:
        raise DamagedError(
            f"{path}: was not part of this save, though weights are read by it; nothing was "
            "written; remove it, or use another checkpoint",
            path=path,
        )
    if entry.records is not None:
        return recorded_extents(checkpoint.path, entry)
    digest = bytes.fromhex(entry.digest) if _DIGEST.fullmatch(entry.digest) else b""
    return [Extent(digest=digest, start=0, nbytes=entry.nbytes)]
