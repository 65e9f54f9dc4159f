"""Where a checkpoint stands in its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milepost.layouts.run import RunEntry, list_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a checkpoint stands in its run (`docs/spec/v1.md`, generations)."""

    parent_id: str | None = None
    generation: int = 0
    branch_step: int | None = None


def lineage_of(target: Path) -> Lineage:
    """The lineage of a save that nobody stated: the next one after the newest of the run."""
    newest: RunEntry | None = None
    if target.parent.is_dir():
        newest = list_run(target.parent).newest
    if newest is None:
        return Lineage()
    manifest = newest.manifest
    return Lineage(
        parent_id=manifest.checkpoint_id,
        generation=manifest.generation,
        branch_step=manifest.branch_step,
    )
