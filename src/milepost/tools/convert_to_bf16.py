"""`convert_to_bf16`: masters in fp32, or codes with scales, become bf16 without harm to routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.hf.fp32_names import stays_fp32
from milepost.hf.training_sidecars import SidecarPlan
from milepost.storage.fileops import PathLike
from milepost.tools.lowp.floats import FloatSource, as_floats
from milepost.tools.rewrite.dtypes import FLOATS, cast_group, float_type
from milepost.tools.rewrite.groups import Group, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.patterns import Patterns
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.sidecars import constant, sidecar_plan
from milepost.tools.rewrite.source import SourceTensor, open_source


def convert_to_bf16(
    source: PathLike,
    output: PathLike,
    *,
    dtype: str = "bfloat16",
    keep: Sequence[str] = (),
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the weights of a checkpoint in bf16 (or `dtype`), ready to be served.

    Norms, and what the family computes with in fp32 (weights of routers), stay in fp32 where they
    are; balancing biases keep their bits; tensors that fit a pattern of `keep` stay as they are.
    Quantised weights are read as `dequantize` reads them, rounded once; config.json no longer says
    that they are. Sidecars are applied: attention sinks that training had switched off are
    neutralised. What was done is in the report's notes. Errors: see `dequantize`, `run_rewrite`.
    """
    wanted = float_type(dtype)
    problems = Problems()
    opened = as_floats(open_source(source), problems)
    kept = Patterns(keep, option="--keep")
    plan = sidecar_plan(opened)
    groups = [_group(tensor, wanted, kept, plan, opened) for tensor in opened.tensors.values()]
    groups += [
        constant(name, value) for name, value in plan.tensors.items() if name not in opened.tensors
    ]
    rewrite = Rewrite(
        verb="convert-to-bf16",
        sources=[opened],
        groups=groups,
        arguments={"dtype": wanted, "keep": list(keep)},
        states_dtype=True,
        edit_config=lambda document: opened.edit_config(document) + _set_config(document, plan),
        dropped=opened.dropped,
        counts=_counts(groups, wanted, opened),
        notes=[str(action) for action in plan.actions],
        problems=problems,
    )
    rewrite.aux = problems.attempt(opened.carried)
    for message in kept.unused(opened.tensors):
        problems.refuse(message)
    codes = [name for name in opened.decoded if name in kept]
    if codes:
        problems.refuse(
            f"--keep: {len(codes)} quantised weights cannot stay as they are beside floats, such "
            f"as {min(codes)}; their codes mean nothing without quantization_config"
        )
    return run_rewrite(rewrite, output, options)


def _counts(groups: Sequence[Group], wanted: str, source: FloatSource) -> dict[str, int]:
    specs = [spec for group in groups for spec in group.outputs]
    found = {"in fp32": sum(spec.dtype == "F32" for spec in specs)} if wanted != "F32" else {}
    return found | ({"dequantised": len(source.decoded)} if source.decoded else {})


def _group(
    tensor: SourceTensor, wanted: str, kept: Patterns, plan: SidecarPlan, source: FloatSource
) -> Group:
    if tensor.name in plan.tensors:
        return constant(tensor.name, plan.tensors[tensor.name], tensor)
    if tensor.name in plan.widen:
        return cast_group(tensor, "F32")
    if tensor.dtype not in FLOATS or tensor.name in kept:
        return passed(tensor)
    if not stays_fp32(tensor.name, source.model_types):
        return cast_group(tensor, wanted)
    # Of values that were fp32, bf16 would lose bits; those of bf16 are in bf16 already.
    return passed(tensor) if tensor.dtype == "BF16" else cast_group(tensor, "F32")


def _set_config(document: dict[str, Any], plan: SidecarPlan) -> list[str]:
    """Changes that sidecars ask for, at the top or in the `text_config` that has the key."""
    text = document.get("text_config")
    for key, value in plan.config.items():
        place = text if isinstance(text, dict) and key in text else document
        place[key] = value
    return [f"config.json: {key} is set to {value}" for key, value in plan.config.items()]
