"""What a save did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did. `written` is False when an existing checkpoint was kept.

    `nbytes` counts all files; of them `linked`, of `linked_nbytes` in all, are links to those of an
    earlier checkpoint, or clones of them, and were not written; `linkable_nbytes` are those of all
    parts of frozen weights, which later saves can link. `phases` maps capture, write and commit to
    seconds, `phase_nbytes` those that moved bytes of this rank to their number. `notes` are things
    an engineer should know: side files that had trouble, a model that is not a Hugging Face model.
    """

    path: Path
    step: int
    checkpoint_id: str
    nbytes: int
    written: bool = True
    phases: Mapping[str, float] = field(default_factory=dict)
    phase_nbytes: Mapping[str, int] = field(default_factory=dict)
    linked: tuple[str, ...] = ()
    linked_nbytes: int = 0
    linkable_nbytes: int = 0
    notes: tuple[str, ...] = ()
