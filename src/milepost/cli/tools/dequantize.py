"""`milepost dequantize`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "dequantize")(dequantize)


def dequantize(
    input_dir: InputDir,
    output_dir: OutputDir,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Another type than bfloat16.")
    ] = "bfloat16",
    *,
    options: Any,
) -> Any:
    """Write quantised weights as the floats that they stand for.

    FP8 with scales, MXFP8, MXFP4 and NVFP4, whoever wrote them; NF4, FP4 and int8 of bitsandbytes.
    """
    from milepost.tools.dequantize import dequantize as run

    return run(input_dir, output_dir, dtype=dtype, options=options)
