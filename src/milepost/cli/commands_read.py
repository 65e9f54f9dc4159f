"""The commands that look: `ls`, `show`, `verify`, `diff`. Declarations; bodies have own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.answer import Output, give

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def output_of(as_json: bool) -> Output:
    """The enum for the flag."""
    return Output.JSON if as_json else Output.TEXT


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (ls, show, verify, diff):
        app.command()(command)


def ls(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory that holds checkpoints.")],
    best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC[:min|max]",
            help="Mark the best checkpoint by this metric; min unless said.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of a run, and what does not count as one."""
    from milepost.cli.ls import ls_answer

    give(lambda: ls_answer(run, best=best), output_of(as_json))


def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any layout.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint holds and where it comes from."""
    from milepost.cli.show import Detail, show_answer

    detail = Detail.TENSORS if tensors else Detail.SUMMARY
    give(lambda: show_answer(path, detail=detail), output_of(as_json))


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Checkpoints, or runs: all their checkpoints."),
    ],
    functional: Annotated[
        bool, typer.Option("--functional", help="Also build each model and run it.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --functional: run code that the checkpoint brings."
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that read; one per core unless said.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the bytes; name the tensor that a wrong one hits.

    Structure, sizes and every recorded digest. Exit code 1 when something is wrong.
    """
    from milepost.cli.verify import Functional, verify_answer

    mode = Functional.NO
    if functional:
        mode = Functional.RUN_REMOTE_CODE if trust_remote_code else Functional.RUN
    give(lambda: verify_answer(paths, threads=threads, functional=mode), output_of(as_json))


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any layout.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    values: Annotated[
        bool, typer.Option("--values", help="Also read and compare the values of all weights.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints; exit code 1 when they differ.

    Config, names, shapes and dtypes; with --values also the tensors themselves.
    """
    from milepost.cli.diff import Compare, diff_answer

    compare = Compare.VALUES if values else Compare.HEADERS
    give(lambda: diff_answer(first, second, compare=compare), output_of(as_json))
