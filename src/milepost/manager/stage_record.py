"""What a pipeline of stages keeps on disk: one sealed document with relative paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from milepost.errors import FormatError
from milepost.format import selfdigest, strictjson
from milepost.format.digests import digest_of
from milepost.format.manifest import Manifest
from milepost.storage import atomic, fileops

RECORD_NAME = "milepost-stages.json"
_FORMAT = "milepost-stages"
_VERSION = "1.0"

Status = Literal["started", "finished", "adopted", "skipped"]


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The result that a stage began with: whose it was, its id, the digest of its weights."""

    stage: str
    checkpoint_id: str | None
    weights_digest: str | None


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. `checkpoint` is relative to the pipeline's directory, None while it is open.

    `settings` are what the caller said the stage depends on.
    """

    status: Status
    checkpoint: str | None = None
    checkpoint_id: str | None = None
    weights_digest: str | None = None
    step: int | None = None
    metrics: dict[str, Any] = {}
    parent: Parent | None = None
    settings: dict[str, Any] = {}


def read_records(directory: Path) -> dict[str, StageRecord]:
    """The stages of a pipeline by name; empty when it has no record. `FormatError`."""
    place = directory / RECORD_NAME
    try:
        raw = place.read_bytes()
    except FileNotFoundError:
        return {}
    document = strictjson.loads(raw, where=str(place))
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(f"{place}: not the record of a pipeline of stages", path=place)
    selfdigest.check(raw, document, str(place))
    try:
        return msgspec.convert(document.get("stages"), dict[str, StageRecord])
    except msgspec.ValidationError as error:
        raise FormatError(f"{place}: {error}", path=place) from error


def write_record(directory: Path, name: str, record: StageRecord) -> None:
    """Put one stage in place of what was recorded of it, at once and durably."""
    records = {**read_records(directory), name: record}
    document = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "stages": {key: msgspec.to_builtins(value) for key, value in records.items()},
    }
    fileops.make_directories(directory)
    atomic.replace_file(directory / RECORD_NAME, selfdigest.seal(document))


def weights_digest(manifest: Manifest) -> str:
    """One digest over the weights of a checkpoint: it changes when they do, and not with a card."""
    lines = [f"{e.name} {e.digest}" for e in manifest.files if e.role == "weights"]
    return digest_of("\n".join(sorted(lines)).encode())


def relative(path: Path, directory: Path) -> str:
    """`path` as it is recorded, so that the whole tree can be moved."""
    return Path(os.path.relpath(path.absolute(), directory.absolute())).as_posix()
