"""`quantize_to_lowp`: float weights become 8 or 4 bits with block scales that real readers load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from milepost.checkpointing.files import document_file
from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.lowp.blocks import FP8_BLOCK, Scales
from milepost.tools.lowp.documents import document_of
from milepost.tools.lowp.encode import Errors, SharedScale, Weight, groups_of
from milepost.tools.lowp.floats import FloatSource, as_floats
from milepost.tools.lowp.rows import tensor_of
from milepost.tools.lowp.schemes import KEY
from milepost.tools.lowp.selection import Apply, Scope, Selection, is_bank, module_of, select
from milepost.tools.lowp.targets import Format, Layout, Target
from milepost.tools.module_names import module_names
from milepost.tools.moe_experts import Unfused, unfused
from milepost.tools.rewrite.cards import Relation, RelationKind, hub_id_of
from milepost.tools.rewrite.dtypes import cast_group
from milepost.tools.rewrite.groups import Copied, Group, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, open_source

_GPT_OSS = "gpt_oss"
_BEFORE = "BF16"
"""What weights become that were quantised, and are not chosen now."""
# Projections of one module that servers put into one matrix, which has one global scale.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_FUSED_WITH = {leaf: leaves for leaves in _FUSED for leaf in leaves}


class Measure(Enum):
    """Whether the error of every quantised weight is measured before anything is published."""

    NOTHING = "nothing"
    ERRORS = "errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport(RewriteReport):
    """`errors` are relative errors (Frobenius) by weight, with `Measure.ERRORS`. `left` says of
    each matrix that was not quantised why."""

    errors: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)


def quantize_to_lowp(
    source: PathLike,
    output: PathLike,
    *,
    format: Format,
    layout: Layout | None = None,
    scales: Scales | None = None,
    scope: Scope | None = None,
    measure: Measure = Measure.NOTHING,
    options: RewriteOptions | None = None,
) -> QuantizeReport:
    """Write the float weights of `source` that `scope` chooses in `format`, the rest as it is.

    The layout is that of compressed-tensors, for MXFP4 of GPT-OSS that family's own. Block scales
    are those of the least squared error for 4 bits, and by the maximum for 8, where a search gains
    nothing, unless `scales` says otherwise; FP8 knows only the maximum.
    Banks of experts are written one by one where the layout wants that. Matrices whose contracted
    dim the block does not divide stay as they are. Arithmetic is fp32 and gives the same bytes on
    every device.

    Weights that are quantised already are read as `dequantize` reads them, in fp32; those of them
    that `scope` does not choose become bf16.

    Refused are values that are infinite or NaN, a layout that cannot hold the format or the family,
    and with `Measure.ERRORS` a relative error above 0.08 (MXFP8, FP8), 0.25 (NVFP4) or 0.35
    (MXFP4). Other errors: see `dequantize` and `run_rewrite`.
    """
    problems = Problems()
    opened = as_floats(open_source(source), problems)
    scope = scope or Scope()
    target = _target(opened, format, layout, scales)
    rewrite = Rewrite(verb="quantize-to-lowp", sources=[opened], groups=[], problems=problems)
    rewrite.dropped = opened.dropped
    rewrite.aux = problems.attempt(opened.carried)
    _check_target(opened, target, scales, scope, rewrite.problems)
    tensors = _tensors(opened, target, scope, rewrite.problems)
    specs = [copied.output for copied in tensors.groups]
    selection = select(specs, opened, scope, format, rewrite.problems)
    weights = {
        copied.output.name: Weight(
            spec=copied.output,
            tensor=tensor_of(copied),
            axis=selection.axes[copied.output.name],
        )
        for copied in tensors.groups
        if copied.output.name in selection.axes
    }
    errors = Errors(format.largest_error) if measure is Measure.ERRORS else None
    rewrite.tied = tensors.tied
    rewrite.groups = _groups(tensors.groups, weights, target, errors)
    rewrite.arguments = _arguments(target, scope)
    rewrite.counts = {"quantised": len(weights), "left as they are": len(selection.left)}
    hub_id = hub_id_of(opened)
    rewrite.relation = Relation(
        kind=RelationKind.QUANTIZED, base_models=[] if hub_id is None else [hub_id]
    )
    _check_weights(weights, specs, target, rewrite)
    document = document_of(
        target, [*weights.values()], selection, scope, tensors.tied, module_names(opened)
    )
    _add_documents(rewrite, document, opened)
    rewrite.notes += [*_told_before(opened, rewrite.groups), *_told(selection)]
    report = run_rewrite(rewrite, output, options)
    return _reported(report, errors, selection)


def _target(source: Source, format: Format, layout: Layout | None, scales: Scales | None) -> Target:
    is_gpt_oss = _GPT_OSS in source.model_types and format is Format.MXFP4
    usual = Layout.GPT_OSS if is_gpt_oss else Layout.COMPRESSED_TENSORS
    rule = Scales.LEAST_SQUARES if format.is_packed else Scales.MAXIMUM
    return Target(format=format, layout=layout or usual, scales=scales or rule)


def _check_target(
    source: Source, target: Target, scales: Scales | None, scope: Scope, problems: Problems
) -> None:
    layout, format = target.layout, target.format
    if format not in layout.formats:
        held = ", ".join(each.value for each in layout.formats)
        problems.refuse(f"the layout {layout.value} holds {held}, not {format.value}")
    if format is Format.FP8 and scales is Scales.LEAST_SQUARES:
        problems.refuse("fp8 has no search for scales: they are those of the maximum")
    if layout is Layout.GPT_OSS and _GPT_OSS not in source.model_types:
        problems.refuse(
            f"the layout gpt-oss is for models of that type, not "
            f"{', '.join(source.model_types) or 'one without a model_type'}"
        )
    if scope.axis not in (-1, 1) and layout is not Layout.BLOCK_SCALED:
        problems.refuse(f"readers of {layout.value} contract the last dim, not {scope.axis}")
    elif scope.axis not in (-2, -1, 0, 1):
        problems.refuse(f"a matrix has no dim {scope.axis}")
    if min(scope.keep_first_blocks, scope.keep_last_blocks) < 0:
        problems.refuse("the number of blocks to keep cannot be negative")


def _tensors(source: Source, target: Target, scope: Scope, problems: Problems) -> Unfused:
    """All tensors of the output before any is quantised, experts in the form of the layout."""
    groups = [passed(tensor) for tensor in source.tensors.values()]
    as_they_are = Unfused(groups, dict(source.tied), 0)
    has_banks = any(is_bank(group.output) for group in groups)
    if target.layout.has_banks or not has_banks or Apply.MOE_EXPERTS not in scope.apply:
        return as_they_are
    try:
        return unfused(source, problems)
    except InvalidInputError as error:
        problems.refuse(
            f"{error}; {target.layout.value} needs experts one by one: leave them out "
            "(--no-lowp-apply-moe-experts), or use --layout block-scaled"
        )
        return as_they_are


def _groups(
    tensors: Sequence[Copied],
    weights: Mapping[str, Weight],
    target: Target,
    errors: Errors | None,
) -> list[Group]:
    scales = _shared_scales(weights, target)
    groups: list[Group] = []
    for copied in tensors:
        weight = weights.get(copied.output.name)
        if weight is None:
            groups.append(_left(copied))
        else:
            groups += groups_of(weight, target, scales.get(weight.spec.name), errors)
    return groups


def _left(copied: Copied) -> Group:
    """A tensor that is not quantised: as it is, or, if it was quantised before, in bf16."""
    is_decoded = any(part.tensor.stored_dtype != part.tensor.dtype for part in copied.ranges)
    if not is_decoded:
        return copied
    return cast_group(tensor_of(copied), _BEFORE, name=copied.output.name)


def _shared_scales(weights: Mapping[str, Weight], target: Target) -> dict[str, SharedScale]:
    """The global scale of each weight; one for those that servers put into one matrix."""
    if target.format is not Format.NVFP4:
        return {}
    together: dict[tuple[str, tuple[str, ...]], list[Weight]] = {}
    for name, weight in weights.items():
        parent, _, leaf = weight.module.rpartition(".")
        leaves = _FUSED_WITH.get(leaf, (leaf,))
        is_alone = target.layout is Layout.BLOCK_SCALED or len(weight.spec.shape) > 2
        key = (name, (leaf,)) if is_alone else (parent, leaves)
        together.setdefault(key, []).append(weight)
    found: dict[str, SharedScale] = {}
    for group in together.values():
        scale = SharedScale(group, target.layout)
        found |= {weight.spec.name: scale for weight in group}
    return found


def _check_weights(
    weights: Mapping[str, Weight], specs: Iterable[Any], target: Target, rewrite: Rewrite
) -> None:
    """Problems and notes about what was chosen, for this layout."""
    if not weights and not rewrite.problems:
        rewrite.problems.refuse("no tensor is chosen: nothing would be quantised")
    if target.layout is Layout.GPT_OSS:
        other = [name for name, weight in weights.items() if not is_bank(weight.spec)]
        if other:
            rewrite.problems.refuse(
                f"the layout gpt-oss holds experts only, not {', '.join(other[:5])}"
            )
    names = {spec.name for spec in specs}
    halves = []
    for name, weight in weights.items():
        parent, _, leaf = weight.module.rpartition(".")
        others = [f"{parent}.{each}.weight" for each in _FUSED_WITH.get(leaf, ())]
        halves += [f"{name} without {each}" for each in others if each in names - weights.keys()]
    if halves and target.layout is not Layout.BLOCK_SCALED:
        rewrite.notes.append(
            f"servers put these into one matrix, and need all quantised or none: {halves[0]}"
            + (f" and {len(halves) - 1} more" if len(halves) > 1 else "")
        )
    partial = [n for n, w in weights.items() if any(size % FP8_BLOCK for size in w.spec.shape)]
    if target.has_squares and partial:
        rewrite.notes.append(
            f"{len(partial)} weights end in partial blocks, such as {partial[0]}; transformers "
            "stretches their scales over the wrong rows, milepost dequantize and vLLM do not"
        )


def _add_documents(rewrite: Rewrite, document: dict[str, Any], source: FloatSource) -> None:
    """The quantization_config in config.json; for `block_scaled` also in a file of its own."""

    def edit(config: dict[str, Any]) -> list[str]:
        source.edit_config(config)
        config[KEY] = document
        return []

    rewrite.edit_config = edit
    if document["quant_method"] == "block_scaled":
        data = json.dumps(document, indent=2).encode() + b"\n"
        rewrite.extra = [document_file(f"{KEY}.json", data, "info")]
        if rewrite.aux is not None:
            rewrite.aux.paths.pop(f"{KEY}.json", None)


def _arguments(target: Target, scope: Scope) -> dict[str, Any]:
    return {
        "format": target.format.value,
        "layout": target.layout.value,
        "scales": None if target.format is Format.FP8 else target.scales.value,
        "apply": sorted(each.value for each in scope.apply),
        "include": list(scope.include),
        "exclude": list(scope.exclude),
        "keep_first_blocks": scope.keep_first_blocks,
        "keep_last_blocks": scope.keep_last_blocks,
        "contraction_axis": scope.axis,
    }


def _told_before(source: FloatSource, groups: Sequence[Group]) -> list[str]:
    """That weights were quantised before, and what became of those that are not chosen."""
    if not source.decoded:
        return []
    method = f" ({source.method})" if source.method else ""
    told = f"{len(source.decoded)} weights were quantised before{method}: errors add up"
    left = [
        group.outputs[0].name
        for group in groups
        if any(t.name in source.decoded for t in group.sources)
        and group.outputs[0].dtype == _BEFORE
    ]
    if left:
        told += f"; {len(left)} of them are not chosen now and become bf16, such as {left[0]}"
    return [told]


def _told(selection: Selection) -> list[str]:
    """What was left out, numbers of layers and experts put together."""
    kinds: dict[tuple[str, str], int] = {}
    for name, why in selection.left.items():
        key = (why, re.sub(r"\.\d+\.", ".*.", module_of(name)))
        kinds[key] = kinds.get(key, 0) + 1
    found: dict[str, list[str]] = {}
    for (why, kind), count in kinds.items():
        found.setdefault(why, []).append(f"{kind} ({count})" if count > 1 else kind)
    return [f"left as they are, {why}: {', '.join(names)}" for why, names in found.items()]


def _reported(report: RewriteReport, errors: Errors | None, selection: Selection) -> QuantizeReport:
    values = {each.name: getattr(report, each.name) for each in fields(RewriteReport)}
    found = {} if errors is None else errors.found
    if found:
        worst = max(found, key=lambda name: found[name])
        mean = sum(found.values()) / len(found)
        told = f"relative error: mean {mean:.4f}, largest {found[worst]:.4f} ({worst})"
        values["notes"] = (told, *report.notes)
    return QuantizeReport(**values, errors=dict(found), left=dict(selection.left))
