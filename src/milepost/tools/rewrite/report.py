"""What a rewrite did, or would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from milepost.tools.rewrite.options import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `Check.LOAD` found in the output. `problems` keep it from being published.

    `model_class` is what transformers built on the meta device to compare names, None where it is
    not installed or does not know the configuration; `notes` say what was not looked at.
    """

    parameters: int
    model_class: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """`files` are names and bytes of the output. `tensors` are in it, `unchanged` of them byte for
    byte under their old name; `dropped` are input tensors that went nowhere, with the reason.

    `memory_nbytes` is the most that groups take together. A dry run has `problems` and no `check`;
    `free_nbytes` is what the file system of the output has left.
    """

    verb: str
    path: Path
    mode: Mode
    files: Mapping[str, int]
    tensors: int
    unchanged: int
    parameters: int
    memory_nbytes: int
    free_nbytes: int
    seconds: float = 0.0
    dropped: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    check: CheckReport | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def ok(self) -> bool:
        """Whether nothing is in the way, or was."""
        return not self.problems
