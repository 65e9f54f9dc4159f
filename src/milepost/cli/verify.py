"""`milepost verify`: are the bytes those that were saved, and does the model work?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost._env import env_int
from milepost.cli.answer import Answer, error_document
from milepost.cli.exit_codes import ExitCode, exit_code_of
from milepost.cli.text import human
from milepost.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    DamagedError,
    NotCommittedError,
    UnsafePickleError,
)
from milepost.format.manifest import MANIFEST_NAME, STATE_NAME
from milepost.layouts.checkpoint import (
    Checkpoint,
    Layout,
    Problem,
    Severity,
    VerifyReport,
)
from milepost.layouts.run import STEP_NAME, list_run
from milepost.layouts.trio_names import META_SUFFIX, split_suffix

if TYPE_CHECKING:
    from rich.console import Console

    from milepost.hf.functional import FunctionalReport


class Functional(Enum):
    """Whether each model is built and run as well."""

    NO = "no"
    RUN = "run"
    RUN_REMOTE_CODE = "run-remote-code"
    """Run it with Python modules that the checkpoint brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one checkpoint. `error` when it could not be checked at all."""

    path: Path
    layout: Layout | None = None
    report: VerifyReport | None = None
    functional: FunctionalReport | None = None
    skipped: str | None = None
    error: CheckpointError | OSError | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.report.problems if self.report else ()

    @property
    def is_damaged(self) -> bool:
        functional_bad = self.functional is not None and not self.functional.ok
        return functional_bad or (self.report is not None and not self.report.ok)


def verify_answer(
    paths: Sequence[Path],
    *,
    threads: int | None = None,
    functional: Functional = Functional.NO,
) -> Answer:
    """Verify each path; a run stands for all its checkpoints."""
    targets = list(dict.fromkeys(target for path in paths for target in _targets(path)))
    count = threads or env_int("MILEPOST_VERIFY_THREADS")
    opened = [(path, *_opened(path)) for path in targets]
    total = sum(checkpoint.nbytes for _, checkpoint, _ in opened if checkpoint)
    with _progress(total) as on_bytes:
        verdicts = [
            _verdict(path, checkpoint, failed, count, on_bytes)
            for path, checkpoint, failed in opened
        ]
    if functional is not Functional.NO:
        verdicts = [_run(verdict, functional) for verdict in verdicts]
    return Answer(
        document={
            "ok": all(not v.is_damaged and v.error is None for v in verdicts),
            "checkpoints": [_document(verdict) for verdict in verdicts],
        },
        show=partial(_show, verdicts=verdicts),
        exit_code=_exit_code(verdicts),
    )


def _exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    """A finding counts before what could not be checked."""
    if any(verdict.is_damaged for verdict in verdicts):
        return ExitCode.FINDING
    return next((exit_code_of(v.error) for v in verdicts if v.error is not None), ExitCode.OK)


def _targets(path: Path) -> Iterator[Path]:
    """The checkpoints that a path stands for: itself, or all of a run."""
    names = _checkpoints_in(path) if path.is_dir() else []
    if not names or (path / MANIFEST_NAME).exists():
        yield path
    else:
        yield from (path / name for name in names)


def _checkpoints_in(run: Path) -> list[str]:
    """Whatever has a checkpoint's name in a directory: steps, trios, `.pt` files."""
    listing = list_run(run)
    steps = [(entry.step, entry.name) for entry in listing.committed]
    for torn in listing.torn:
        match = STEP_NAME.fullmatch(torn.name)
        steps.append((int(match[1]) if match else 0, torn.name))
    files = sorted(entry.name for entry in run.iterdir() if entry.is_file())
    trios = [name.removesuffix(META_SUFFIX) for name in files if name.endswith(META_SUFFIX)]
    lone = [
        name
        for name in files
        if split_suffix(name)[1] == ".pt" and split_suffix(name)[0] not in trios
    ]
    is_model = (run / "config.json").exists()  # its .pt files are a trainer's, not checkpoints
    return [name for _, name in sorted(steps)] + trios + ([] if is_model else lone)


def _opened(path: Path) -> tuple[Checkpoint | None, CheckpointError | OSError | None]:
    try:
        return Checkpoint.open(path), None
    except (CheckpointError, OSError) as error:
        return None, error


def _verdict(
    path: Path,
    checkpoint: Checkpoint | None,
    failed: CheckpointError | OSError | None,
    threads: int,
    on_bytes: Callable[[int], None] | None,
) -> Verdict:
    """Damage that keeps a checkpoint from being opened is a finding, like any other."""
    if _lost_manifest(path, checkpoint):
        failed = CheckpointIncompleteError(
            f"{path / MANIFEST_NAME}: missing, so nothing can be checked; the training state that "
            "lies there is of a checkpoint that had one",
            path=path / MANIFEST_NAME,
        )
    elif checkpoint is not None:
        try:
            report = checkpoint.verify(threads=threads, on_bytes=on_bytes)
            return Verdict(path=path, layout=checkpoint.layout, report=report)
        except (CheckpointError, OSError) as error:
            failed = error
    is_torn = isinstance(failed, NotCommittedError) and STEP_NAME.fullmatch(path.name)
    if not is_torn and not isinstance(failed, DamagedError | UnsafePickleError):
        return Verdict(path=path, error=failed)
    where = Path(getattr(failed, "path", None) or path)
    file = where.relative_to(path).as_posix() if where.is_relative_to(path) else where.name
    if file == ".":
        file = MANIFEST_NAME if (path / MANIFEST_NAME).exists() else path.name
    problem = Problem(severity=Severity.ERROR, file=file, message=str(failed))
    report = VerifyReport(path=path, problems=(problem,), checked_nbytes=0, has_digests=False)
    return Verdict(path=path, report=report)


def _lost_manifest(path: Path, checkpoint: Checkpoint | None) -> bool:
    """Whether this is a directory of ours whose manifest is gone: it looks like a foreign one."""
    is_foreign = checkpoint is None or checkpoint.layout is Layout.HUGGING_FACE
    return is_foreign and (path / STATE_NAME).is_file() and not (path / MANIFEST_NAME).exists()


def _run(verdict: Verdict, functional: Functional) -> Verdict:
    """The same verdict with what the model did; a model that is damaged is not run."""
    from dataclasses import replace

    from milepost.hf.functional import RemoteCode, run_model

    if verdict.report is None:
        return verdict
    if verdict.is_damaged:
        return replace(verdict, skipped="not run: it is damaged")
    if not (verdict.path / "config.json").is_file():
        return replace(verdict, skipped="not run: no config.json, so no Hugging Face model")
    code = RemoteCode.RUN if functional is Functional.RUN_REMOTE_CODE else RemoteCode.REFUSE
    return replace(verdict, functional=run_model(verdict.path, remote_code=code))


@contextmanager
def _progress(total_nbytes: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr where that is a terminal; yields what to call with bytes, from any thread."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("verify", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=total_nbytes)
        yield partial(bar.advance, task)


def _document(verdict: Verdict) -> dict[str, Any]:
    report = verdict.report
    document: dict[str, Any] = {
        "path": verdict.path,
        "layout": verdict.layout,
        "ok": not verdict.is_damaged and verdict.error is None,
        "has_digests": report.has_digests if report else None,
        "checked_nbytes": report.checked_nbytes if report else 0,
        "problems": [
            {
                "severity": problem.severity,
                "file": problem.file,
                "tensor": problem.tensor,
                "message": problem.message,
            }
            for problem in verdict.problems
        ],
    }
    if verdict.error is not None:
        document["error"] = error_document(verdict.error)
    if verdict.functional is not None:
        found = verdict.functional
        document["functional"] = {name: getattr(found, name) for name in type(found).__slots__}
    if verdict.skipped is not None:
        document["functional_skipped"] = verdict.skipped
    return document


# ---- for people


def _show(console: Console, *, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        word, style, rest = _headline(verdict)
        console.print(word, style=style, end="  ")
        console.print(f"{verdict.path}  {rest}".rstrip(), soft_wrap=True)
        for problem in verdict.problems:
            text = problem.message.removeprefix(f"{verdict.path}/")
            text = text.removeprefix(f"{verdict.path}: ")
            console.print(f"  {problem.severity.value}: {text}", soft_wrap=True)
        if verdict.skipped is not None:
            console.print(f"  {verdict.skipped}", soft_wrap=True)
        if verdict.functional is not None:
            _show_functional(console, verdict.functional)
    bad = sum(v.is_damaged or v.error is not None for v in verdicts)
    if len(verdicts) > 1:
        console.print(f"{len(verdicts)} checked, {bad} with problems")


def _headline(verdict: Verdict) -> tuple[str, str, str]:
    """A word of fixed width, its style, and what was done."""
    if verdict.error is not None:
        return "ERROR  ", "red", str(error_document(verdict.error)["message"])
    if verdict.is_damaged:
        return "DAMAGED", "red", ""
    report = verdict.report
    assert report is not None, "a verdict holds a report or an error"
    if not report.has_digests:
        what = (
            "structure and checksums" if verdict.layout is not Layout.HUGGING_FACE else "structure"
        )
        return "ok     ", "green", f"{what} only: no digests are recorded"
    return "ok     ", "green", f"{human(report.checked_nbytes)}, all digests match"


def _show_functional(console: Console, report: FunctionalReport) -> None:
    if report.architecture is not None:
        text = f"{report.architecture}, {report.parameters:,} parameters"
        if report.output_shape is not None:
            text += f", output {'x'.join(map(str, report.output_shape))}"
        console.print(f"  runs as {text}", soft_wrap=True)
    if report.generated is not None:
        console.print(f"  says: {report.generated!r}", soft_wrap=True)
    for skipped in report.skipped:
        console.print(f"  skipped {skipped}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"  error: {problem}", style="red", soft_wrap=True)
