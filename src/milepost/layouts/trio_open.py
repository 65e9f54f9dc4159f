"""The documents of one trio, read so that they belong to one save while a writer may be at work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import (
    CheckpointError,
    FormatError,
    InconsistentError,
    ReplacedError,
)
from milepost.format.header import Header, read_header
from milepost.layouts.trio_meta import MAX_META_NBYTES, TrioMeta, parse_meta
from milepost.layouts.trio_names import (
    Places,
    TrioNames,
    look,
    require_readable,
    same_files,
    trio_names,
)

READ_ATTEMPTS = 8
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioDocuments:
    """The files as they were when read, the metadata, and the header of the weights.

    `path` is the directory and stem.
    """

    path: Path
    names: TrioNames
    places: Places
    meta: TrioMeta
    header: Header

    @property
    def was_replaced(self) -> bool:
        """Whether another save has taken the names since."""
        return not same_files(self.places, look(self.path.parent, self.names))

    def file(self, name: str) -> Path:
        """A file by the name that it has for people, for messages."""
        return self.path.parent / name

    def compare_stamps(self, stamps: tuple[Any, Any], file: str) -> None:
        """Refuse stamps that are there on both sides and differ from those of the metadata."""
        for what, mine, other in zip(("save_id", "epoch"), self.meta.stamps, stamps, strict=True):
            if mine is not None and other is not None and mine != str(other):
                raise InconsistentError(
                    f"{self.path}: inconsistent files: {what} is {mine} in {self.names.meta} and "
                    f"{str(other)[:80]} in {file}; they come from different saves: use another "
                    "checkpoint of the run, or copy all three files again",
                    path=self.path,
                )


def open_documents(path: Path) -> tuple[TrioDocuments, int]:
    """The documents of the trio `path` and a descriptor of its weights, which the caller closes.

    Starts again while a writer changes the names meanwhile.
    """
    directory, names = path.parent, trio_names(path.name)
    for attempt in range(READ_ATTEMPTS):
        time.sleep(attempt * _PAUSE_S)
        places = look(directory, names)
        try:
            require_readable(directory, names, places)
            meta = _read_meta(places[names.meta].path, str(directory / names.meta))
            header = read_header(places[names.weights].path)
            descriptor = os.open(places[names.weights].path, os.O_RDONLY | os.O_CLOEXEC)
        except (CheckpointError, FileNotFoundError):
            if same_files(places, look(directory, names)) and _are_there(places):
                raise
            continue
        try:
            if not same_files(places, look(directory, names)):
                os.close(descriptor)
                continue
            documents = TrioDocuments(
                path=path, names=names, places=places, meta=meta, header=header
            )
            stamps = (header.metadata.get("save_id"), header.metadata.get("epoch"))
            documents.compare_stamps(stamps, names.weights)
        except CheckpointError:
            os.close(descriptor)
            raise
        return documents, descriptor
    raise replaced(path)


def _are_there(places: Places) -> bool:
    """Whether the files still lie where they were seen; a finished intent moves them."""
    return all(place.path.exists() for place in places.values())


def _read_meta(path: Path, where: str) -> TrioMeta:
    with open(path, "rb") as file:
        raw = file.read(MAX_META_NBYTES + 1)
    if len(raw) > MAX_META_NBYTES:
        raise FormatError(f"{where}: more than {MAX_META_NBYTES} bytes", path=where)
    return parse_meta(raw, where)


def replaced(path: Path) -> ReplacedError:
    return ReplacedError(
        f"{path}: another save took this name while it was being read; open it again", path=path
    )
