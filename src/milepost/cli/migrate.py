"""`milepost migrate`, its declaration: files of old layouts become trios or other layouts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.answer import give
from milepost.cli.commands_read import JsonOption, output_of


class MigrateTo(StrEnum):
    """What `--to` takes; `milepost.tools.migrate` has the same, and imports torch."""

    TRIO = "trio"
    DIRECTORY = "directory"
    SINGLE_FILE = "single-file"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(migrate)


def migrate(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, stems, patterns, or directories of files."),
    ],
    to: Annotated[MigrateTo, typer.Option(help="The layout to write.")] = MigrateTo.TRIO,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write below it, not beside the sources.")
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", help="Look into the directories of a directory, too.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Remove each source, once the new files hold every bit."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what has the new names.")
    ] = False,
    backup: Annotated[
        bool, typer.Option("--backup", help="Keep what is removed or replaced as <name>.bak.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read what was written again and compare every bit."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, write nothing, say what would be.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOBAL", help="A class (module.name) to take as inert fields."),
    ] = None,
    strip_prefix: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFIX", help="Take it off the names of weights, as in module."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="How many at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Convert checkpoint files of old layouts.

    Nothing in a file is run. A file that was converted before is passed over.
    """
    from milepost.cli.migrate_answer import migrate_answer
    from milepost.tools import migrate as tools

    give(
        lambda: migrate_answer(
            paths,
            jobs=jobs,
            to=tools.MigrateTarget(to.value),
            out=out,
            search=tools.Search.RECURSIVE if recursive else tools.Search.TOP,
            original=tools.Original.REMOVE if in_place else tools.Original.KEEP,
            existing=tools.Existing.OVERWRITE if overwrite else tools.Existing.COMPARE,
            backup=tools.Backup.KEEP if backup else tools.Backup.NONE,
            proof=tools.Proof.ALWAYS if verify else tools.Proof.BEFORE_REMOVING,
            mode=tools.MigrateMode.DRY_RUN if dry_run else tools.MigrateMode.WRITE,
            allow=tuple(allow or ()),
            strip_prefixes=tuple(strip_prefix or ()),
        ),
        output_of(as_json),
    )
