"""`llm-migrate-ckpt`: one legacy file into a trio, with the flags and exit codes of that command.

Exit codes: 0 done, or a plan that would be; 1 the file cannot be converted; 2 what was written, or
was there, does not hold the same (the legacy file is kept), and wrong usage.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milepost.cli.app import ErrorLineCommand

if TYPE_CHECKING:
    from milepost.tools.migrate import Migration
    from milepost.tools.migrate_options import Request

CHECK = "\u2713"


class LlmExitCode(IntEnum):
    OK = 0
    CONVERSION = 1
    MISMATCH = 2


def main() -> None:
    """Run the command with the arguments of the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # the check mark, where there is no UTF-8
    make_llm_app()(prog_name="llm-migrate-ckpt")


def make_llm_app() -> typer.Typer:
    """The program: one command, no subcommands."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=ErrorLineCommand)(convert)
    return app


def convert(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A legacy file: <name>.pt or <name>.")
    ],
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Delete the legacy file once the new ones hold all of it."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every bit; where the new files exist already, only do that.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace new files that exist already.")
    ] = False,
) -> None:
    """Convert a legacy .pt checkpoint into .safetensors, .meta.json and .extra_state.pt."""
    from milepost.cli.answer import error_document
    from milepost.errors import CheckpointMigrationError

    if path.is_dir():
        error = CheckpointMigrationError(
            f"{path}: a directory, not a regular file; milepost migrate takes directories",
            path=path,
        )
        raise _failed(str(error))
    request = _request(in_place=in_place, verify=verify, dry_run=dry_run, overwrite=overwrite)
    from milepost.tools.migrate import migrate_one_file

    try:
        done = migrate_one_file(path, request)
    except (Exception, KeyboardInterrupt) as error:
        raise _failed(error_document(error)["message"]) from error
    raise typer.Exit(_tell(done, request))


def _request(*, in_place: bool, verify: bool, dry_run: bool, overwrite: bool) -> Request:
    from milepost.tools.migrate import Existing, MigrateMode, Original, Proof
    from milepost.tools.migrate_options import Request

    existing = Existing.COMPARE if verify else Existing.ERROR
    return Request(
        original=Original.REMOVE if in_place else Original.KEEP,
        existing=Existing.OVERWRITE if overwrite else existing,
        proof=Proof.ALWAYS if verify else Proof.BEFORE_REMOVING,
        mode=MigrateMode.DRY_RUN if dry_run else MigrateMode.WRITE,
    )


def _failed(message: str) -> typer.Exit:
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(LlmExitCode.CONVERSION)


def _tell(done: Migration, request: Request) -> LlmExitCode:
    from milepost.cli.answer import error_document
    from milepost.tools.migrate import Outcome

    if done.error is not None:
        print(f"error: {error_document(done.error)['message']}", file=sys.stderr)
        return LlmExitCode.CONVERSION
    if done.outcome is Outcome.SKIPPED and not done.proven:
        print(
            f"error: {done.source}.pt: there is no legacy file, only the split one", file=sys.stderr
        )
        return LlmExitCode.CONVERSION
    if done.outcome is Outcome.MISMATCH:
        shown = "; ".join(done.differences[:3])
        print(f"error: {done.source}: verification failed: {shown}", file=sys.stderr)
        print(
            "hint: the legacy file is kept; --overwrite converts it again into the new files",
            file=sys.stderr,
        )
        return LlmExitCode.MISMATCH
    mark = f"{CHECK} " if request.writes else "plan: "
    for line in _lines(done, request):
        print(f"{mark}{line}")
    return LlmExitCode.OK


def _lines(done: Migration, request: Request) -> list[str]:
    from milepost.tools.migrate import Outcome

    weights, meta, extra_state = done.files
    is_there = done.outcome is Outcome.SKIPPED
    lines = [
        f"legacy       {done.source}",
        f"weights      {weights}{' (exists)' if is_there else ''}",
        f"meta         {meta}{' (exists)' if is_there else ''}",
        f"extra_state  {extra_state}{' (exists)' if is_there else ''}",
    ]
    lines += [f"note         {note}" for note in done.notes]
    if done.proven or (request.proves and not request.writes):
        lines.append("verify       every bit is the same" if done.proven else "verify       yes")
    lines.append(f"action       {'delete' if done.removed else 'keep'} the legacy file")
    return lines
