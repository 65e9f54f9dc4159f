"""`convert_to_bf16`: fp32 masters of a run become what is served, without harm to routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.hf.fp32_names import stays_fp32
from milepost.hf.training_sidecars import SidecarPlan
from milepost.storage.fileops import PathLike
from milepost.tools.carried import carried_files
from milepost.tools.cast import refuse_quantised
from milepost.tools.rewrite.dtypes import FLOATS, cast_group, float_type
from milepost.tools.rewrite.groups import Group, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.patterns import Patterns
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.sidecars import constant, sidecar_plan
from milepost.tools.rewrite.source import Source, SourceTensor, open_source


def convert_to_bf16(
    source: PathLike,
    output: PathLike,
    *,
    dtype: str = "bfloat16",
    keep: Sequence[str] = (),
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the weights of a training checkpoint in bf16 (or `dtype`), ready to be served.

    Norms, and what the family computes with in fp32 (weights of routers), stay in fp32 where they
    are; balancing biases keep their bits; tensors that fit a pattern of `keep` stay as they are.
    Sidecars are applied: attention sinks that training had switched off are neutralised. What was
    done is in the report's notes. Quantised weights are refused; other errors: see `run_rewrite`.
    """
    wanted = float_type(dtype)
    opened = open_source(source)
    refuse_quantised(opened, "convert-to-bf16")
    kept = Patterns(keep, option="--keep")
    plan = sidecar_plan(opened)
    groups = [_group(tensor, wanted, kept, plan, opened) for tensor in opened.tensors.values()]
    groups += [
        constant(name, value) for name, value in plan.tensors.items() if name not in opened.tensors
    ]
    in_fp32 = [spec.name for g in groups for spec in g.outputs if spec.dtype == "F32"]
    rewrite = Rewrite(
        verb="convert-to-bf16",
        sources=[opened],
        groups=groups,
        arguments={"dtype": wanted, "keep": list(keep)},
        edit_config=lambda document: _set_config(document, plan),
        counts={"in fp32": len(in_fp32)} if wanted != "F32" else {},
        notes=[str(action) for action in plan.actions],
    )
    rewrite.aux = rewrite.problems.attempt(lambda: carried_files(opened.checkpoint))
    for message in kept.unused(opened.tensors):
        rewrite.problems.refuse(message)
    return run_rewrite(rewrite, output, options)


def _group(
    tensor: SourceTensor, wanted: str, kept: Patterns, plan: SidecarPlan, source: Source
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
