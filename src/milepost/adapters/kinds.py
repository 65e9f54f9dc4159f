"""What kind of checkpoint a directory is, by its manifest and the names of its files alone.

A marker beside the weights says that an adapter was folded into them, and where it lies unmerged;
nothing else does. Without one, weights of the whole model count before an adapter. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from milepost.errors import FormatError, NotFoundError
from milepost.format import strictjson
from milepost.format.manifest import MANIFEST_NAME, Manifest, check_file_name
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint, read_manifest
from milepost.layouts.tensor_set import TensorSet
from milepost.storage.fileops import PathLike

MARKER_NAME = "resume_adapter.json"
RESUME_ADAPTER = "resume_adapter"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
ADAPTER_PICKLE = f"{ADAPTER_STEM}.bin"
ADAPTER_FILES = (f"{ADAPTER_STEM}.safetensors", ADAPTER_PICKLE)

_WHOLE_STEMS = ("model", "diffusion_pytorch_model")
_WHOLE_FILES = (
    *(f"{stem}.safetensors{ending}" for stem in _WHOLE_STEMS for ending in (".index.json", "")),
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_MARKER_KEY = "adapter_dir"


class CheckpointKind(Enum):
    """What the weights of a checkpoint are, and so what a run that resumes from it has to do."""

    FULL = "full"
    """Weights of the whole model."""
    ADAPTER = "adapter"
    """An adapter alone; the base lies elsewhere."""
    MERGED_ADAPTER = "merged_adapter"
    """Weights with the adapter folded in, and the adapter beside them, to go on training it."""
    MERGED_ADAPTER_MISSING = "merged_adapter_missing"
    """The same, but the adapter that the marker names is not there."""
    INVALID = "invalid"
    """Nothing that a model can be loaded from: no weights, or slices of experts per rank."""


def checkpoint_kind(checkpoint: Checkpoint | PathLike) -> CheckpointKind:
    """The kind of an opened checkpoint, or of what lies at a path; reads no tensor.

    Of a committed checkpoint its manifest says which files count. A file that holds weights is
    `FULL`, or `ADAPTER` by its name. `NotFoundError` when nothing is there, `FormatError` for a
    marker, an index or a manifest that cannot be read.
    """
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else Path(checkpoint)
    if path.name == MANIFEST_NAME:
        path = path.parent
    if path.is_dir():
        return _kind_of(path, _names(path, checkpoint))
    if not isinstance(checkpoint, Checkpoint):
        path = Checkpoint.open(path).path
    return CheckpointKind.ADAPTER if path.name in ADAPTER_FILES else CheckpointKind.FULL


def adapter_directory(path: Path) -> Path | None:
    """The directory that the marker in `path` names; None where there is no marker.

    `FormatError` for a marker that names none, or one outside the checkpoint.
    """
    place = path / MARKER_NAME
    try:
        raw = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    document = strictjson.loads(raw, where=str(place))
    name = document.get(_MARKER_KEY) if isinstance(document, dict) else None
    if not isinstance(name, str):
        raise FormatError(
            f"{place}: expected an object whose {_MARKER_KEY!r} names a directory beside it",
            path=place,
        )
    check_file_name(name, str(place))
    return path / name


def marker_bytes(directory: str = RESUME_ADAPTER) -> bytes:
    """The content of a marker."""
    return strictjson.dumps({_MARKER_KEY: directory}, indent=2) + b"\n"


def adapter_file(directory: Path) -> Path | None:
    """The file of an adapter's tensors in `directory`, safetensors first; None without one."""
    return next((directory / name for name in ADAPTER_FILES if (directory / name).is_file()), None)


def _kind_of(path: Path, names: Collection[str]) -> CheckpointKind:
    if MARKER_NAME in names:
        directory = adapter_directory(path)
        if directory is None or adapter_file(directory) is None:
            return CheckpointKind.MERGED_ADAPTER_MISSING
        return CheckpointKind.MERGED_ADAPTER
    if any(name in names for name in _WHOLE_FILES) and not _is_sliced(path):
        return CheckpointKind.FULL
    if any(name in names for name in ADAPTER_FILES):
        return CheckpointKind.ADAPTER
    return CheckpointKind.INVALID


def _is_sliced(path: Path) -> bool:
    return any(TensorSet(path, stem).is_ep_sharded for stem in _WHOLE_STEMS)


def _names(path: Path, checkpoint: Checkpoint | PathLike) -> set[str]:
    """The files directly in `path` that count: of a committed checkpoint those of its manifest."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return _at_the_top(checkpoint.manifest)
    try:
        return _at_the_top(read_manifest(path))
    except NotFoundError:
        return {entry.name for entry in path.iterdir() if entry.is_file()}


def _at_the_top(manifest: Manifest) -> set[str]:
    return {entry.name for entry in manifest.files if "/" not in entry.name}
