"""`milepost reshard`, its declaration."""

from __future__ import annotations

from typing import Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "reshard")(reshard)


def reshard(input_dir: InputDir, output_dir: OutputDir, *, options: Any) -> Any:
    """Write the weights in parts of another size.

    Every tensor keeps its bytes.
    """
    from milepost.tools.reshard import reshard as run

    return run(input_dir, output_dir, options=options)
