"""What an after-training verb prints: progress while it works, its report at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from milepost.cli.answer import Answer
from milepost.cli.exit_codes import ExitCode
from milepost.cli.text import counted, human, pairs
from milepost.tools.rewrite.options import Mode, OnProgress
from milepost.tools.rewrite.report import RewriteReport

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S = 10.0
_SHOWN_FILES = 20


def answer_of(report: RewriteReport) -> Answer:
    """The report as data and as text; problems of a dry run are a finding."""
    check = report.check
    return Answer(
        document={
            "verb": report.verb,
            "path": report.path,
            "mode": report.mode,
            "files": report.files,
            "nbytes": report.nbytes,
            "tensors": report.tensors,
            "unchanged": report.unchanged,
            "parameters": report.parameters,
            "memory_nbytes": report.memory_nbytes,
            "free_nbytes": report.free_nbytes,
            "seconds": report.seconds,
            "dropped": report.dropped,
            "counts": report.counts,
            "notes": report.notes,
            "problems": report.problems,
            "check": None
            if check is None
            else {
                "parameters": check.parameters,
                "model_class": check.model_class,
                "notes": check.notes,
            },
        },
        show=partial(_show, report=report),
        exit_code=ExitCode.OK if report.ok else ExitCode.FINDING,
    )


def _show(console: Console, *, report: RewriteReport) -> None:
    is_dry = report.mode is Mode.DRY_RUN
    files = f"{counted(len(report.files), 'file')}, {human(report.nbytes)}"
    rate = report.nbytes / report.seconds if report.seconds else 0.0
    took = "" if is_dry else f", {report.seconds:.1f} s ({human(rate)}/s)"
    did = "would write" if is_dry else "wrote"
    console.print(f"{did} {report.path}: {files}{took}", soft_wrap=True)
    changed = report.tensors - report.unchanged
    rows = [
        ("tensors", f"{report.tensors}, {changed} of them new or changed"),
        ("parameters", f"{report.parameters:,}"),
        *((name, str(count)) for name, count in report.counts.items()),
        ("memory", f"{human(report.memory_nbytes)} for tensors at most"),
    ]
    if is_dry:
        rows.append(("free", human(report.free_nbytes)))
    if report.check is not None:
        rows.append(("check", _checked(report)))
    pairs(console, rows)
    if is_dry:
        for name, nbytes in list(report.files.items())[:_SHOWN_FILES]:
            console.print(f"  {name}  {human(nbytes)}", soft_wrap=True)
        if len(report.files) > _SHOWN_FILES:
            console.print(f"  and {len(report.files) - _SHOWN_FILES} more files")
    for name, why in report.dropped.items():
        console.print(f"dropped: {name}: {why}", soft_wrap=True)
    for note in [*report.notes, *(report.check.notes if report.check else ())]:
        console.print(f"note: {note}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"problem: {problem}", soft_wrap=True)


def _checked(report: RewriteReport) -> str:
    assert report.check is not None
    name = report.check.model_class
    against = f", as {name} loads them" if name is not None else ""
    return f"{report.check.parameters:,} parameters{against}"


@contextmanager
def progress(*, is_shown: bool) -> Iterator[OnProgress | None]:
    """On stderr: a bar with rate and time left on a terminal, elsewhere a line every 10 s."""
    if not is_shown:
        yield None
    elif sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _Lines()


@contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


class _Lines:
    """One line now and then: bytes, rate, time left."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._guard = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        with self._guard:
            if now - self._last < _LINE_EVERY_S:
                return
            self._last = now
        rate = done / (now - self._began)
        left_s = (total - done) / rate if rate else 0.0
        line = f"{human(done)} of {human(total)}, {human(rate)}/s, {left_s:.0f} s left"
        print(line, file=sys.stderr)
