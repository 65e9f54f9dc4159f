"""`milepost reset-sinks`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "reset-sinks")(reset_sinks)


def reset_sinks(
    input_dir: InputDir,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="What to write; must not exist."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Exchange the input for the result, at once.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Link files in which nothing changes.")
    ] = False,
    *,
    options: Any,
) -> Any:
    """Make attention sinks ineffective; no other byte of the weights changes."""
    from milepost.tools.reset_sinks import Place
    from milepost.tools.reset_sinks import reset_sinks as run
    from milepost.tools.rewrite.options import Mode, Untouched

    looks_only = options.mode is Mode.DRY_RUN and output_dir is None
    return run(
        input_dir,
        output_dir,
        place=Place.IN_PLACE if in_place or looks_only else Place.OUTPUT,
        untouched=Untouched.LINK if link else None,
        options=options,
    )
