"""`milepost extract-lora`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "extract-lora")(extract_lora)


def extract_lora(
    input_dir: InputDir,
    output_dir: OutputDir,
    base_model: Annotated[Path, typer.Option(metavar="PATH", help="What was fine-tuned.")],
    rank: Annotated[int, typer.Option(min=1, metavar="R", help="Rank of the factors.")],
    target_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Linear layers to factorise; else all that differ."),
    ] = None,
    save_modules: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Modules to store whole.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Float type of the factors.")
    ] = None,
    *,
    options: Any,
) -> Any:
    """Write the difference of a fine-tune to its base as a LoRA adapter."""
    from milepost.tools.extract_lora import extract_lora as run

    return run(
        input_dir,
        base_model,
        output_dir,
        rank=rank,
        target_modules=target_modules or (),
        save_modules=save_modules or (),
        dtype=dtype,
        options=options,
    )
