"""Which checkpoints a run directory holds: the one answer that everything else asks for.

A checkpoint counts when its name matches in full, its manifest parses and every file that is not
merely informative has the stated size. What does not count is listed with the reason, and neither
protects anything nor is ever chosen. Reads documents and sizes only, no tensor byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CheckpointError, NotFoundError
from milepost.format.manifest import Manifest
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.storage.fileops import PathLike
from milepost.storage.intent import read_intent
from milepost.storage.staging import STAGING_PREFIX

STEP_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
PINS_NAME = "milepost-pins.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A committed checkpoint of a run. `path` is where it lies now, `name` what it is called."""

    name: str
    path: Path
    manifest: Manifest
    superseded: bool

    @property
    def step(self) -> int:
        """The training step that its manifest states."""
        return self.manifest.step

    @property
    def rank(self) -> tuple[int, int]:
        """What newest means: generation first, then step."""
        return self.manifest.generation, self.manifest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class TornEntry:
    """Something with a checkpoint's name that does not count, and why."""

    name: str
    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """`committed` in ascending order of age: superseded ones too, marked; the last is newest."""

    run: Path
    committed: tuple[RunEntry, ...]
    torn: tuple[TornEntry, ...]
    unfinished: tuple[str, ...]
    pinned: frozenset[int]

    @property
    def current(self) -> tuple[RunEntry, ...]:
        """Committed and not superseded by a later generation."""
        return tuple(entry for entry in self.committed if not entry.superseded)

    @property
    def newest(self) -> RunEntry | None:
        """The one with the highest (generation, step); None when nothing counts."""
        return self.current[-1] if self.current else None


def list_run(path: PathLike) -> RunListing:
    """Look at a run directory. `NotFoundError` when it does not exist."""
    run = Path(path)
    if not run.is_dir():
        raise NotFoundError(f"{run}: no such run directory", path=run)
    committed: list[tuple[str, Path, Manifest]] = []
    torn: list[TornEntry] = []
    for name, path, step in _candidates(run):
        reason = "not a directory"
        if path.is_dir() and not path.is_symlink():
            try:
                checkpoint = DirectoryCheckpoint(path)
                reason = _damage(checkpoint, step) or ""
            except (CheckpointError, OSError) as error:
                reason = str(error)
        if reason:
            torn.append(TornEntry(name=name, path=path, reason=reason))
        else:
            committed.append((name, path, checkpoint.manifest))
    return RunListing(
        run=run,
        committed=tuple(in_order(committed)),
        torn=tuple(torn),
        unfinished=tuple(sorted(n for n in _names(run) if n.startswith(STAGING_PREFIX))),
        pinned=read_pins(run),
    )


def _names(run: Path) -> set[str]:
    return {entry.name for entry in run.iterdir()}


def _candidates(run: Path) -> Iterator[tuple[str, Path, int]]:
    intent = read_intent(run)
    names = _names(run)
    if intent is not None:
        names |= {target for _, target in intent.renames}
    for name in sorted(names):
        match = STEP_NAME.fullmatch(name)
        if match:
            path = run / name if intent is None else intent.resolve(run, name)
            if os.path.lexists(path):
                yield name, path, int(match[1])


def _damage(checkpoint: DirectoryCheckpoint, step: int) -> str | None:
    if checkpoint.manifest.step != step:
        return f"its manifest says step {checkpoint.manifest.step}"
    bad = [f"{entry.name} {how}" for entry, how in checkpoint.damage if entry.role != "info"]
    return "; ".join(bad[:3]) or None


def in_order(found: Iterable[tuple[str, Path, Manifest]]) -> Iterator[RunEntry]:
    """Sort by (generation, step), equals as they come; mark what a later one left behind.

    A run that resumed from step `s` and went on has raised the generation; checkpoints of older
    generations beyond `s` belong to an abandoned branch.
    """
    ordered = sorted(found, key=lambda item: (item[2].generation, item[2].step))
    for number, (name, path, manifest) in enumerate(ordered):
        later = [m for _, _, m in ordered[number + 1 :] if m.generation > manifest.generation]
        superseded = any(manifest.step > _branch_step(m) for m in later)
        yield RunEntry(name=name, path=path, manifest=manifest, superseded=superseded)


def _branch_step(manifest: Manifest) -> int:
    """The step from which the generation of `manifest` started."""
    return manifest.branch_step if manifest.branch_step is not None else -1


def read_pins(run: Path) -> frozenset[int]:
    """Steps that retention never removes."""
    try:
        document = json.loads((run / PINS_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return frozenset()
    steps = document.get("steps", []) if isinstance(document, dict) else []
    return frozenset(step for step in steps if isinstance(step, int))


def newest(path: PathLike) -> RunEntry | None:
    """The newest committed checkpoint of a run; None when there is none or no such directory."""
    return list_run(path).newest if Path(path).is_dir() else None
