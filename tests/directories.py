"""Checkpoint directories for tests, and ways to change what was sealed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import milepost as mp
from milepost.format import selfdigest
from milepost.layouts.directory import DirectoryCheckpoint


def opened(path: Path) -> DirectoryCheckpoint:
    checkpoint = mp.Checkpoint.open(path)
    assert isinstance(checkpoint, DirectoryCheckpoint)
    return checkpoint


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / "milepost.json").read_bytes())
    change(document)
    (path / "milepost.json").write_bytes(selfdigest.seal(document))
