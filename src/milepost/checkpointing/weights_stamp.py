"""What a model's weights were read from, told by the id of a checkpoint and not by a path.

A load that leaves out the weights, because construction read them already, has to know that it was
this checkpoint; one that brings in an adapter, that the base does not contain it yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import CheckpointError
from milepost.hf.live import source_directory, unwrap
from milepost.layouts.directory import read_manifest
from milepost.storage.fileops import PathLike

_ATTRIBUTE = "_milepost_weights_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsStamp:
    """Where weights came from: the id of a checkpoint where it has one, and the place it had.

    Both are None for weights that were drawn at random.
    """

    checkpoint_id: str | None
    place: str | None

    def __str__(self) -> str:
        if self.place is None:
            return "random weights"
        return self.place if self.checkpoint_id is None else f"{self.place} ({self.checkpoint_id})"


def stamp_weights_source(model: Any, path: PathLike | None) -> None:
    """Record that the weights of `model` were just read from `path`; None for random ones.

    A checkpoint is known by the id in its manifest, so moving or copying it later changes nothing.
    Without a stamp a model of transformers counts as read from the directory that its configuration
    names. `model` may be wrapped, or a list of pipeline stages. Not collective.

    >>> stamp_weights_source(model, "run/checkpoint-500")  # doctest: +SKIP
    """
    stamp = WeightsStamp(checkpoint_id=None, place=None)
    if path is not None:
        stamp = WeightsStamp(checkpoint_id=_id_at(Path(path)), place=os.path.realpath(path))
    put_stamp(model, stamp)


def put_stamp(model: Any, stamp: WeightsStamp) -> None:
    """Give every part of `model` the stamp."""
    for part in _parts(model):
        setattr(unwrap(part), _ATTRIBUTE, stamp)


def stamp_of(model: Any) -> WeightsStamp | None:
    """What the weights of `model` were read from; None when nobody knows, or its parts differ."""
    stamps = {_stamp_of_part(part) for part in _parts(model)}
    return stamps.pop() if len(stamps) == 1 else None


def _stamp_of_part(part: Any) -> WeightsStamp | None:
    inner = unwrap(part)
    stamp = getattr(inner, _ATTRIBUTE, None)
    if isinstance(stamp, WeightsStamp):
        return stamp
    directory = source_directory(inner)
    if directory is None:
        return None
    return WeightsStamp(checkpoint_id=_id_at(directory), place=os.path.realpath(directory))


def _id_at(path: Path) -> str | None:
    """The id of the checkpoint at `path`; None for what has none."""
    try:
        return read_manifest(path).checkpoint_id
    except (CheckpointError, OSError):
        return None


def _parts(model: Any) -> list[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]
