"""`milepost push`: a checkpoint becomes a model on the Hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.cli.answer import Answer
from milepost.cli.text import counted, human, table
from milepost.tools.publish import PublishMode, PublishReport, publish

if TYPE_CHECKING:
    from rich.console import Console


def push_answer(path: Path, repo: str, **keywords: Any) -> Answer:
    """Publish, with the keywords of `publish`, and say what was."""
    report = publish(path, repo, **keywords)
    is_dry = keywords.get("mode") is PublishMode.DRY_RUN
    return Answer(
        document={
            "path": path,
            "repo": report.repo,
            "published": not is_dry,
            "files": [{"name": name, "nbytes": size} for name, size in report.files.items()],
            "nbytes": report.nbytes,
            "removed": report.removed,
            "commit": report.commit,
            "url": report.url,
            "pull_request": report.pull_request,
            "notes": report.notes,
        },
        show=partial(_show, report=report, is_dry=is_dry),
    )


def _show(console: Console, *, report: PublishReport, is_dry: bool) -> None:
    made = table("file", "size", right=("size",))
    for name, size in report.files.items():
        made.add_row(name, human(size))
    console.print(made)
    for name in report.removed:
        console.print(f"removed from the repository: {name}", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True)
    what = f"{counted(len(report.files), 'file')}, {human(report.nbytes)}"
    if is_dry:
        console.print(f"would publish {what} as {report.repo}", soft_wrap=True)
        return
    place = report.pull_request or report.url
    console.print(f"published {what} as {report.repo}: {place}", soft_wrap=True)
