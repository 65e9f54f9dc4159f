"""What `milepost migrate` does and says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.cli.answer import Answer, error_document
from milepost.cli.exit_codes import ExitCode, exit_code_of
from milepost.cli.text import human, table
from milepost.engine.write import WriteOptions
from milepost.tools.migrate import MigrateMode, Migration, MigrationReport, Outcome, migrate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_SHOWN = 3
_STYLES = {
    Outcome.MIGRATED: "green",
    Outcome.PLANNED: "green",
    Outcome.SKIPPED: None,
    Outcome.MISMATCH: "red",
    Outcome.FAILED: "red",
}


def migrate_answer(paths: Sequence[str], *, mode: MigrateMode, jobs: int, **request: Any) -> Answer:
    """Migrate all paths; what failed is one line each on stderr and in the table."""
    with _progress() as bar:
        report = migrate(
            paths,
            mode=mode,
            jobs=jobs,
            options=WriteOptions(on_bytes=bar.on_bytes),
            on_found=bar.on_found,
            on_done=bar.on_done,
            **request,
        )
    for line in problem_lines(report):
        print(line, file=sys.stderr)
    return Answer(
        document={
            "ok": report.ok,
            "dry_run": mode is MigrateMode.DRY_RUN,
            "counts": {str(outcome): len(report.of(outcome)) for outcome in Outcome},
            "migrations": [_document(one) for one in report.migrations],
        },
        show=partial(_show, report=report, mode=mode),
        exit_code=exit_code(report),
    )


def exit_code(report: MigrationReport) -> ExitCode:
    """A difference counts before what could not be converted."""
    if report.of(Outcome.MISMATCH):
        return ExitCode.FINDING
    errors = [one.error for one in report.migrations if one.error is not None]
    return next((exit_code_of(error) for error in errors), ExitCode.OK)


def problem_lines(report: MigrationReport) -> Iterator[str]:
    """One `error: ...` line for each source that did not become what it should."""
    for one in report.migrations:
        if one.error is not None:
            yield f"error: {error_document(one.error)['message']}"
        elif one.outcome is Outcome.MISMATCH:
            yield f"error: {one.source}: {mismatch_text(one)}"


def mismatch_text(one: Migration) -> str:
    """What differs between a source and its target."""
    more = len(one.differences) - _SHOWN
    text = "; ".join(one.differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return (
        f"{one.target} does not hold the same ({text}); the source is kept: --overwrite writes "
        "the target anew"
    )


def _document(one: Migration) -> dict[str, Any]:
    document: dict[str, Any] = {
        "source": one.source,
        "outcome": one.outcome,
        "target": one.target,
        "files": one.files,
        "nbytes": one.nbytes,
        "source_nbytes": one.source_nbytes,
        "dialect": one.dialect,
        "source_removed": one.removed,
        "backups": one.backups,
        "verified": one.proven,
        "notes": one.notes,
        "differences": one.differences,
    }
    if one.error is not None:
        document["error"] = error_document(one.error)
    return document


# ---- for people


def _show(console: Console, *, report: MigrationReport, mode: MigrateMode) -> None:
    rows = table("source", "", "size", "what", right=("size",))
    for one in report.migrations:
        size = human(one.nbytes) if one.nbytes else ""
        rows.add_row(
            str(one.source), str(one.outcome), size, _what(one, mode), style=_STYLES[one.outcome]
        )
    console.print(rows)
    counts = [f"{len(report.of(o))} {o}" for o in Outcome if report.of(o)]
    written = sum(one.nbytes for one in report.of(Outcome.MIGRATED))
    tail = f", {human(written)} written" if written else ""
    dry = "; nothing was changed" if mode is MigrateMode.DRY_RUN else ""
    console.print(f"{', '.join(counts) or 'nothing to do'}{tail}{dry}", soft_wrap=True)


def _what(one: Migration, mode: MigrateMode) -> str:
    """Where it went, what was done to names, and what became of the source."""
    if one.error is not None:
        return one.error.code
    if one.outcome is Outcome.MISMATCH:
        return one.differences[0]
    parts = [f"to {one.target}"] if one.target and one.outcome is not Outcome.SKIPPED else []
    parts += one.notes
    if one.proven:
        parts.append("verified")
    if one.removed:
        would = "would be " if mode is MigrateMode.DRY_RUN else ""
        kept = one.backups[-1].name if one.backups else ""
        parts.append(f"source {would}{f'kept as {kept}' if kept else 'removed'}")
    return "; ".join(parts)


class _Bar:
    """Bytes of the sources that are done; the bytes written move it on within a source."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self._guard = threading.Lock()
        self._done_nbytes = self._written_nbytes = 0

    def on_found(self, sources: Sequence[Path]) -> None:
        if self._progress is not None and self._task is not None:
            total = sum(path.stat().st_size for path in sources if path.is_file())
            self._progress.update(self._task, total=total)

    def on_bytes(self, nbytes: int) -> None:
        with self._guard:
            self._written_nbytes += nbytes
            self._update()

    def on_done(self, done: Migration) -> None:
        with self._guard:
            self._done_nbytes += done.source_nbytes
            self._update()

    def _update(self) -> None:
        if self._progress is not None and self._task is not None:
            completed = max(self._done_nbytes, self._written_nbytes)
            self._progress.update(self._task, completed=completed)


@contextmanager
def _progress() -> Iterator[_Bar]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield _Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("migrate", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, progress.add_task("migrate", total=None))
