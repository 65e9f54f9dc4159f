"""The three files of a trio: their names, where they lie now, and which of them are there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from milepost.errors import CheckpointIncompleteError, InvalidInputError
from milepost.storage.intent import read_intent

WEIGHTS_SUFFIX = ".safetensors"
META_SUFFIX = ".meta.json"
EXTRA_STATE_SUFFIX = ".extra_state.pt"
LEGACY_SUFFIX = ".pt"
# Keys that `extra_state.pt` has beside the four slots when there is something to put there.
MODEL_EXTRA_KEY = "model_extra_state"  # entries of the state dict that are no tensors, by name
MODEL_METADATA_KEY = "model_state_metadata"  # versions of the modules, as torch keeps them
TYPED_KEY = "typed_state"  # what torch's safe loading would refuse, as the bytes of a typed tree
# `.pt` is last: `x.extra_state.pt` ends in two of them.
_SUFFIXES = (WEIGHTS_SUFFIX, META_SUFFIX, EXTRA_STATE_SUFFIX, LEGACY_SUFFIX)


class TrioNames(NamedTuple):
    """File names of one trio, in the order in which they are written."""

    weights: str
    meta: str
    extra_state: str


def trio_names(stem: str) -> TrioNames:
    """The names that belong to a stem, which may hold dots.

    >>> trio_names("run.v2").meta
    'run.v2.meta.json'
    """
    return TrioNames(stem + WEIGHTS_SUFFIX, stem + META_SUFFIX, stem + EXTRA_STATE_SUFFIX)


def split_suffix(name: str) -> tuple[str, str]:
    """A name without the suffix of a trio or `.pt` file, and that suffix; any other dot stays.

    >>> split_suffix("run.v2.meta.json"), split_suffix("run.v2.pt"), split_suffix("run.v2")
    (('run.v2', '.meta.json'), ('run.v2', '.pt'), ('run.v2', ''))
    """
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix), suffix
    return name, ""


def check_stem(stem: str) -> None:
    """Refuse a stem that is no plain visible name, or that would be taken for a file of a trio."""
    if not stem or stem.startswith(".") or "/" in stem or "\0" in stem:
        raise InvalidInputError(
            f"{stem!r}: the name of a checkpoint is a plain name without '/', and no hidden one"
        )
    if split_suffix(stem)[1]:
        raise InvalidInputError(
            f"{stem!r}: give the name without {split_suffix(stem)[1]}; its files get their "
            f"suffixes ({', '.join(_SUFFIXES[:3])})"
        )


LOOK_ATTEMPTS = 8
Identity: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file that is there: what it is called, where it lies now, and which file that is."""

    name: str
    path: Path
    identity: Identity

    @property
    def nbytes(self) -> int:
        return self.identity[2]


Places: TypeAlias = Mapping[str, Place]


def look(directory: Path, names: TrioNames) -> dict[str, Place]:
    """The files of a trio that are there, seen through the intent record of the directory."""
    found = _look_once(directory, names)
    for _ in range(LOOK_ATTEMPTS):
        if len(found) == len(names):
            break
        # A file may have moved to its real name after its place was resolved: look twice.
        again = _look_once(directory, names)
        if same_files(found, again):
            break
        found = again
    return found


def _look_once(directory: Path, names: TrioNames) -> dict[str, Place]:
    intent = read_intent(directory)
    found: dict[str, Place] = {}
    for name in names:
        path = directory / name if intent is None else intent.resolve(directory, name)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        found[name] = Place(name=name, path=path, identity=identity)
    return found


def same_files(first: Places, second: Places) -> bool:
    """Whether two looks saw the same files, wherever they lay."""
    return {name: place.identity for name, place in first.items()} == {
        name: place.identity for name, place in second.items()
    }


def require_readable(directory: Path, names: TrioNames, places: Places) -> None:
    """`CheckpointIncompleteError` unless weights and metadata are there."""
    if names.weights in places and names.meta in places:
        return
    present = ", ".join(name for name in names if name in places) or "none"
    missing = ", ".join(name for name in names if name not in places)
    stem = os.fspath(directory / split_suffix(names.meta)[0])
    raise CheckpointIncompleteError(
        f"{stem}: a checkpoint of three files, of which {missing} is missing (present: {present}); "
        "its save was cut short or it was copied in part: resume from an older checkpoint of the "
        f"run (epoch_<N>), copy the missing file, or, if {split_suffix(names.meta)[0]}.pt is "
        f"there, convert that again: llm-migrate-ckpt --overwrite {stem}.pt",
        path=directory / missing.partition(", ")[0],
    )
