"""Optimizer state that other programs keep as one pickle for each rank: named, never ignored."""

from __future__ import annotations

import re
from pathlib import Path

_SHARD = re.compile(r"optimizer_shard_\d+\.pt")
_META = "optimizer_meta.pt"


def legacy_shards(path: Path) -> str:
    """The end of a message about optimizer state: what of this kind lies in a directory, if any."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    shards = sum(_SHARD.fullmatch(name) is not None for name in names)
    found = [f"{shards} file{'s' * (shards > 1)} optimizer_shard_*.pt"] * (shards > 0)
    found += [_META] * (_META in names)
    if not found:
        return ""
    return (
        f"; beside it lie {' and '.join(found)}, one shard for each rank of the program that saved "
        "them, which only that program can place: resume there, or go on without moments"
    )
