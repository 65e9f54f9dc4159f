"""`milepost convert-to-bf16`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "convert-to-bf16")(convert_to_bf16)


def convert_to_bf16(
    input_dir: InputDir,
    output_dir: OutputDir,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Another type than bfloat16.")
    ] = "bfloat16",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that stay as they are: a glob, or re:..."),
    ] = None,
    *,
    options: Any,
) -> Any:
    """Write the weights of training in bf16, ready to be served.

    Norms and what the family keeps in fp32 stay so; sidecars are applied and reported.
    """
    from milepost.tools.convert_to_bf16 import convert_to_bf16 as run

    return run(input_dir, output_dir, dtype=dtype, keep=keep or (), options=options)
