"""`milepost quantize-to-lowp`, its declaration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


class _Format(StrEnum):
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    FP8 = "fp8"


class _Layout(StrEnum):
    COMPRESSED_TENSORS = "compressed-tensors"
    BLOCK_SCALED = "block-scaled"
    GPT_OSS = "gpt-oss"
    MXFP8_INV = "mxfp8-inv"
    DEEPSEEK_FP8 = "deepseek-fp8"


class _Scales(StrEnum):
    MAX = "max"
    MSE = "mse"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "quantize-to-lowp")(quantize_to_lowp)


def quantize_to_lowp(
    input_dir: InputDir,
    output_dir: OutputDir,
    format: Annotated[_Format, typer.Option("--format", help="The numbers.")],
    layout: Annotated[
        _Layout | None, typer.Option("--layout", help="Names and configuration.")
    ] = None,
    scales: Annotated[
        _Scales | None, typer.Option("--scales", help="Block scales: least error, or the maximum.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Further matrices: a glob, or re:..."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that stay: a glob, or re:..."),
    ] = None,
    lowp_apply_dense_mlp: Annotated[
        bool, typer.Option(help="Quantise gate, up and down of dense layers.")
    ] = True,
    lowp_apply_moe_experts: Annotated[bool, typer.Option(help="Quantise experts.")] = True,
    lowp_keep_first_blocks: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep the first N blocks as they are.")
    ] = 0,
    lowp_keep_last_blocks: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep the last N blocks as they are.")
    ] = 0,
    contraction_axis: Annotated[
        int, typer.Option(metavar="DIM", help="The contracted dim of a matrix.")
    ] = -1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the error of each weight; refuse large ones.")
    ] = False,
    *,
    options: Any,
) -> Any:
    """Write weights in 8 or 4 bits with block scales.

    In the layout of compressed-tensors, or one that other readers want.
    """
    from milepost.tools.lowp.blocks import Scales
    from milepost.tools.lowp.selection import Apply, Scope
    from milepost.tools.lowp.targets import Format, Layout
    from milepost.tools.quantize_to_lowp import Measure
    from milepost.tools.quantize_to_lowp import quantize_to_lowp as run

    chosen = {
        Apply.DENSE_MLP: lowp_apply_dense_mlp,
        Apply.MOE_EXPERTS: lowp_apply_moe_experts,
    }
    return run(
        input_dir,
        output_dir,
        format=Format(format.value),
        layout=None if layout is None else Layout(layout.value),
        scales=None if scales is None else Scales(scales.value),
        scope=Scope(
            apply=[kind for kind, is_wanted in chosen.items() if is_wanted],
            include=include or (),
            exclude=exclude or (),
            keep_first_blocks=lowp_keep_first_blocks,
            keep_last_blocks=lowp_keep_last_blocks,
            axis=contraction_axis,
        ),
        measure=Measure.ERRORS if verify else Measure.NOTHING,
        options=options,
    )
