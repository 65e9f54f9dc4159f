"""`milepost prune`, `pin` and `unpin`: what of a run stays on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.cli.answer import Answer
from milepost.cli.text import human, table
from milepost.errors import InvalidInputError
from milepost.layouts.run import list_run
from milepost.manager.prune import (
    PruneMode,
    PruneReport,
    Superseded,
    kept_entries,
    prune_run,
)
from milepost.manager.retention import KeepBest, RetentionPolicy, parse_policy

if TYPE_CHECKING:
    from rich.console import Console


def prune_answer(
    run: Path,
    keep: Sequence[str],
    *,
    superseded: Superseded = Superseded.KEEP,
    mode: PruneMode = PruneMode.REMOVE,
) -> Answer:
    """Remove what none of the policies keeps, or say what would go."""
    policies = [parse_policy(text) for text in keep]
    _check_metrics(run, policies)
    report = prune_run(run, policies, superseded=superseded, mode=mode)
    return Answer(
        document={
            "run": run,
            "dry_run": mode is PruneMode.DRY_RUN,
            "removed": [
                {"step": removal.entry.step, "name": removal.entry.name, "nbytes": removal.nbytes}
                for removal in report.removed
            ],
            "nbytes": report.nbytes,
            "kept": report.kept,
            "pinned": report.pins,
        },
        show=partial(_show, report=report),
    )


def _check_metrics(run: Path, policies: Sequence[RetentionPolicy]) -> None:
    """A mistyped metric would keep none of the best: refuse one that no checkpoint records."""
    entries = kept_entries(list_run(run))
    known = sorted({name for entry in entries for name in entry.metrics})
    for policy in policies:
        if isinstance(policy, KeepBest) and entries and policy.metric not in known:
            raise InvalidInputError(
                f"{policy}: no checkpoint of {run} records a metric {policy.metric!r}; recorded "
                f"are: {', '.join(known) or 'none'}; nothing was removed"
            )


def pin_answer(run: Path, pinned: Collection[int]) -> Answer:
    """What is pinned now."""
    text = f"pinned: {', '.join(map(str, sorted(pinned))) or 'none'}"
    return Answer(
        document={"run": run, "pinned": sorted(pinned)},
        show=lambda console: console.print(text),
    )


def _show(console: Console, *, report: PruneReport) -> None:
    is_dry = report.mode is PruneMode.DRY_RUN
    rows = table("step", "", "size", "kept by", right=("step", "size"))
    goes = "goes" if is_dry else "removed"
    lines = [(removal.entry.step, goes, human(removal.nbytes), "") for removal in report.removed]
    lines += [(step, "stays", "", ", ".join(reasons)) for step, reasons in report.kept.items()]
    for step, what, size, reasons in sorted(lines):
        rows.add_row(str(step), what, size, reasons, style="red" if what == goes else None)
    console.print(rows)
    verb = "would remove" if is_dry else "removed"
    count = len(report.removed)
    console.print(
        f"{verb} {count} of {count + len(report.kept)} checkpoints, {human(report.nbytes)}"
        + ("; nothing was changed" if is_dry else "")
    )
