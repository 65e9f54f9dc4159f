"""`dequantize`: codes and scales become the floats that they stand for."""

from __future__ import annotations

from milepost.storage.fileops import PathLike
from milepost.tools.lowp.floats import as_floats
from milepost.tools.rewrite.dtypes import cast_group, float_type
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import open_source


def dequantize(
    source: PathLike,
    output: PathLike,
    *,
    dtype: str = "bfloat16",
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the quantised weights of `source` as floats of `dtype`, all others as they are.

    Values are codes times scales in fp32, rounded once. Understood are FP8 with a scale for a
    tensor, a row, or a block of the size that config.json states (the last ones may be partial);
    MXFP8, MXFP4 and NVFP4 of compressed-tensors, ModelOpt, GPT-OSS, DeepSeek and `block_scaled`;
    NF4, FP4 and int8 of bitsandbytes, as it dequantises them. Scales may lie in any part. Refused,
    all at once: a weight without its scale, a scale without its weight, scales of another shape
    than they must have, float8 of the fnuz kind, torn states of bitsandbytes, and other methods.
    config.json no longer says that weights are quantised. Other errors: see `run_rewrite`.
    """
    wanted = float_type(dtype)
    problems = Problems()
    opened = as_floats(open_source(source), problems)
    if not opened.decoded and not problems:
        problems.refuse(
            f"{opened.path}: holds no quantised weights; milepost cast changes the type of floats"
        )
    rewrite = Rewrite(
        verb="dequantize",
        sources=[opened],
        groups=[
            cast_group(tensor, wanted) if tensor.name in opened.decoded else passed(tensor)
            for tensor in opened.tensors.values()
        ],
        arguments={"dtype": wanted},
        edit_config=opened.edit_config,
        dropped=opened.dropped,
        counts={"dequantised": len(opened.decoded)},
        problems=problems,
    )
    rewrite.aux = problems.attempt(opened.carried)
    return run_rewrite(rewrite, output, options)
