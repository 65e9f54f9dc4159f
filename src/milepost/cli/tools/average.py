"""`milepost average`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "average")(average)


def average(
    output_dir: OutputDir,
    input_dir: Annotated[
        list[Path],
        typer.Option(metavar="PATH", help="A checkpoint; once for each, the oldest first."),
    ],
    weights: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="What each counts, in the order of the inputs."),
    ] = None,
    ema: Annotated[
        float | None, typer.Option(metavar="DECAY", help="Exponential moving average instead.")
    ] = None,
    *,
    options: Any,
) -> Any:
    """Average several checkpoints of one run.

    Equally, by --weights, or as an exponential moving average.
    """
    from milepost.errors import InvalidInputError
    from milepost.tools.average import average as run

    try:
        numbers = None if weights is None else [float(each) for each in weights.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--weights {weights}: expected numbers with commas between"
        ) from None
    return run(input_dir, output_dir, weights=numbers, ema=ema, options=options)
