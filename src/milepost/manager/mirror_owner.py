"""Which run a mirror belongs to: written down in both, so that no run copies over another's.

A run with mirrors has an id, and its mirrors have the same. A run directory that was lost takes the
id of its mirror, which is what the mirror is for.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from milepost.errors import InvalidInputError
from milepost.format.manifest import Manifest
from milepost.format.strictjson import loads
from milepost.layouts.run import list_run
from milepost.storage import atomic

RUN_ID_NAME = ".milepost-run.json"


def claim(run: Path, mirror: Path) -> None:
    """See to it that `mirror`, a directory that exists, is one of this run, and write that down.

    `InvalidInputError` when it belongs to another run: when the ids differ, or, where one has none
    yet, both have checkpoints and these have nothing to do with each other.
    """
    own, theirs = _id_of(run), _id_of(mirror)
    if own is not None and own == theirs:
        return
    if (own is not None and theirs is not None) or not _may_belong(run, mirror, own):
        raise InvalidInputError(
            f"{mirror}: it holds checkpoints of another run than {run}, so nothing is copied there "
            "and nothing in it is removed; give each run a mirror directory of its own"
        )
    run_id = own or theirs or uuid.uuid4().hex
    for directory, known in ((run, own), (mirror, theirs)):
        if known is None:
            text = json.dumps({"run_id": run_id}) + "\n"
            atomic.replace_file(directory / RUN_ID_NAME, text.encode())


def _may_belong(run: Path, mirror: Path, own: str | None) -> bool:
    copies = _manifests(mirror)
    ours = _manifests(run)
    if not copies or (not ours and own is None):
        return True
    return bool(_family(copies) & _family(ours))


def _manifests(directory: Path) -> list[Manifest]:
    return [entry.manifest for entry in list_run(directory).committed]


def _family(manifests: list[Manifest]) -> set[str]:
    """The checkpoints and what they descend from."""
    parents = {each.parent_id for each in manifests if each.parent_id is not None}
    return parents | {each.checkpoint_id for each in manifests}


def _id_of(directory: Path) -> str | None:
    path = directory / RUN_ID_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    found = loads(raw, str(path))
    run_id = found.get("run_id") if isinstance(found, dict) else None
    if not isinstance(run_id, str):
        raise InvalidInputError(f"{path}: no run_id; remove the file if this is a mirror of yours")
    return run_id
