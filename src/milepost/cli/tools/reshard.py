"""`milepost reshard`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "reshard")(reshard)


def reshard(
    input_dir: InputDir,
    output_dir: OutputDir,
    ep_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="One file for each of N ranks, with its slice of experts."),
    ] = None,
    *,
    options: Any,
) -> Any:
    """Write the weights in parts of another size, or with experts cut for other ranks.

    Every tensor keeps its bytes. Slices (ep_sharded) come back by merge-ep-shards.
    """
    from milepost.tools.reshard import reshard as run

    return run(input_dir, output_dir, ep_size=ep_size, options=options)
