"""`milepost fuse-moe-experts`, its declaration."""

from __future__ import annotations

from typing import Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "fuse-moe-experts")(fuse_moe_experts)


def fuse_moe_experts(input_dir: InputDir, output_dir: OutputDir, *, options: Any) -> Any:
    """Write single experts as fused banks.

    The family that config.json names decides the layout; values stay as they are.
    """
    from milepost.tools.moe_experts import fuse_moe_experts as run

    return run(input_dir, output_dir, options=options)
