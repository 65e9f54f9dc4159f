"""`milepost cast`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "cast")(cast)


def cast(
    input_dir: InputDir,
    output_dir: OutputDir,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="bfloat16, float16, float32 or float64.")
    ],
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that stay as they are: a glob, or re:..."),
    ] = None,
    *,
    options: Any,
) -> Any:
    """Write the float weights in another type.

    Integers stay. A value that does not fit the type is refused.
    """
    from milepost.tools.cast import cast as run

    return run(input_dir, output_dir, dtype=dtype, keep=keep or (), options=options)
