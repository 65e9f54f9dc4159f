"""`cast`: the same weights in another float type."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.lowp.schemes import quantised_by
from milepost.tools.rewrite.dtypes import FLOATS, cast_group, float_type
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.patterns import Patterns
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, open_source


def cast(
    source: PathLike,
    output: PathLike,
    *,
    dtype: str,
    keep: Sequence[str] = (),
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the float weights of `source` in `dtype` as the directory `output`.

    Tensors that fit a pattern of `keep`, and integers and booleans, stay as they are. Rounds to
    nearest, ties to even. config.json states the new type in both spellings. Quantised weights are
    refused, and so is a value that does not fit; other errors: see `run_rewrite`.
    """
    wanted = float_type(dtype)
    opened = open_source(source)
    refuse_quantised(opened, "cast")
    kept = Patterns(keep, option="--keep")
    rewrite = Rewrite(
        verb="cast",
        sources=[opened],
        groups=[
            passed(tensor)
            if tensor.name in kept or tensor.dtype not in FLOATS
            else cast_group(tensor, wanted)
            for tensor in opened.tensors.values()
        ],
        arguments={"dtype": wanted, "keep": list(keep)},
        states_dtype=True,
    )
    for message in kept.unused(opened.tensors):
        rewrite.problems.refuse(message)
    return run_rewrite(rewrite, output, options)


def refuse_quantised(source: Source, verb: str) -> None:
    """`InvalidInputError` for a source whose weights are codes that need their scales."""
    name = quantised_by(source)
    if name is None:
        return
    raise InvalidInputError(
        f"{source.path}: its weights are quantised ({name}), and {verb} would treat codes as "
        "values; dequantise them first (milepost dequantize)",
        path=source.path,
    )
