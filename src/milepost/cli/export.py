"""`milepost export`: a checkpoint in another layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.cli.answer import Answer
from milepost.cli.text import counted, human
from milepost.tools.export import (
    ExportReport,
    ExportTarget,
    TrainingState,
    export_checkpoint,
)

if TYPE_CHECKING:
    from rich.console import Console


def export_answer(
    path: Path, out: Path, *, to: str, max_shard_size: str, training_state: TrainingState
) -> Answer:
    """Export and say what was written."""
    report = export_checkpoint(
        path,
        out,
        to=ExportTarget(to),
        training_state=training_state,
        max_shard_size=max_shard_size,
    )
    return Answer(
        document={
            "path": report.path,
            "layout": report.target,
            "files": report.files,
            "nbytes": report.nbytes,
            "notes": report.notes,
        },
        show=partial(_show, report=report),
    )


def _show(console: Console, *, report: ExportReport) -> None:
    count = counted(len(report.files), "file")
    console.print(
        f"wrote {report.path}: {report.target.value}, {count}, {human(report.nbytes)}",
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True)
