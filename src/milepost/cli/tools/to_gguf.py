"""`milepost to-gguf`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "to-gguf")(to_gguf)


def to_gguf(
    input_dir: InputDir,
    output_file: Annotated[
        Path, typer.Option("--output-file", metavar="FILE", help="A .gguf that is not there yet.")
    ],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="f32, f16, bf16 or q8_0.")],
    *,
    options: Any,
) -> Any:
    """Write a model with its tokenizer as one GGUF file.

    Llama, Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE. Needs the package gguf.
    """
    from milepost.tools.to_gguf import to_gguf as run

    return run(input_dir, output_file, dtype=dtype, options=options)
