"""`milepost merge-ep-shards`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "merge-ep-shards")(merge_ep_shards)


def merge_ep_shards(
    input_dir: InputDir,
    output_dir: OutputDir,
    delete_input_shards: Annotated[
        bool,
        typer.Option(
            "--delete-input-shards", help="Remove the slices once the output is complete."
        ),
    ] = False,
    *,
    options: Any,
) -> Any:
    """Merge experts that ranks saved slice by slice into one checkpoint.

    Values and types stay; names and layout become those of the hub.
    """
    from milepost.tools.merge_ep_shards import InputShards
    from milepost.tools.merge_ep_shards import merge_ep_shards as run

    shards = InputShards.DELETE if delete_input_shards else InputShards.KEEP
    return run(input_dir, output_dir, input_shards=shards, options=options)
