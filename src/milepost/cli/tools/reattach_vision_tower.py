"""`milepost reattach-vision-tower`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "reattach-vision-tower")(reattach_vision_tower)


def reattach_vision_tower(
    input_dir: InputDir,
    model_id: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The vision-language base: a directory, or a Hub id."),
    ],
    output_dir: OutputDir,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Of the Hub id: branch, tag or commit.")
    ] = None,
    *,
    options: Any,
) -> Any:
    """Put a trained language model back into its vision-language base.

    Vision tower, projector and whatever else is not text are those of the base, byte for byte.
    """
    from milepost.tools.reattach_vision_tower import reattach_vision_tower as run

    return run(input_dir, model_id, output_dir, revision=revision, options=options)
