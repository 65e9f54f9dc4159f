"""Which layout lies at a path."""

from __future__ import annotations

from pathlib import Path

from milepost.errors import NotCommittedError, NotFoundError
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.dcp import DCP_FILES, DcpCheckpoint, is_dcp
from milepost.layouts.dcp_metadata import METADATA_NAME
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint, huggingface_stem
from milepost.layouts.single_file import SingleFileCheckpoint
from milepost.layouts.trio import find_trio
from milepost.storage.intent import resolve_name

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def open_checkpoint(path: Path) -> Checkpoint:
    """See `Checkpoint.open`."""
    if path.name in (MANIFEST_NAME, METADATA_NAME) and path.is_file():
        path = path.parent
    place = _resolved(path)
    if place.is_dir():
        return _open_directory(place)
    trio = find_trio(path)
    if trio is not None:
        return trio
    if place.is_file():
        if path.suffix == ".safetensors":
            return HuggingFaceCheckpoint(path, stem=path.name.removesuffix(".safetensors"))
        return SingleFileCheckpoint(path)
    raise NotFoundError(f"{path}: nothing is there{_neighbours(path)}", path=path)


def _resolved(path: Path) -> Path:
    """`path` seen through the intent record of its directory; a record is about plain names."""
    if path.name in ("", "..") or not path.parent.is_dir():
        return path
    return resolve_name(path.parent, path.name)


def _open_directory(path: Path) -> Checkpoint:
    if (path / MANIFEST_NAME).exists():
        return DirectoryCheckpoint(path)
    if is_dcp(path):
        return DcpCheckpoint(path)
    stem = huggingface_stem(path)
    if stem is not None:
        return HuggingFaceCheckpoint(path, stem=stem)
    if any(path.glob(DCP_FILES)):
        raise NotCommittedError(
            f"{path}: files of torch's distributed checkpoint without its {METADATA_NAME}, which "
            "is written last: the save was cut off, or the directory was copied incompletely",
            path=path,
        )
    steps = sorted(entry.name for entry in path.glob("checkpoint-*"))
    if steps:
        raise NotCommittedError(
            f"{path}: a run directory, not a checkpoint; name one of {', '.join(steps[-3:])} "
            f"(milepost ls {path} lists them)",
            path=path,
        )
    pickles = sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLE_SUFFIXES)
    but = f"; it holds {', '.join(pickles[:3])}: name the file that you mean" if pickles else ""
    raise NotCommittedError(
        f"{path}: no {MANIFEST_NAME} and no model.safetensors: no save of it was ever committed"
        f"{but}",
        path=path,
    )


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; {path.parent} does not exist either"
    names = sorted(e.name for e in path.parent.iterdir() if not e.name.startswith("."))
    if not names:
        return f"; {path.parent} is empty"
    return f"; {path.parent} holds {', '.join(names[-5:])}"
