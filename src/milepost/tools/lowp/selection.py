"""Which tensors of a model are quantised, and why the others are not."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from milepost.hf.expert_layouts import BANK, EXPERT, EXPERT_NAMES, NO_EXPERT_NAMES
from milepost.tools.lowp.targets import Format
from milepost.tools.rewrite.dtypes import FLOATS
from milepost.tools.rewrite.groups import TensorSpec
from milepost.tools.rewrite.patterns import Patterns
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source


class Apply(Enum):
    """Kinds of weights that are quantised by default."""

    DENSE_MLP = "dense_mlp"
    MOE_EXPERTS = "moe_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """`include` adds matrices that are not chosen by default (those of attention), `exclude` takes
    out. The first and last blocks of the model are kept as they are. `axis` of a matrix is the
    contracted one."""

    apply: Collection[Apply] = (Apply.DENSE_MLP, Apply.MOE_EXPERTS)
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    keep_first_blocks: int = 0
    keep_last_blocks: int = 0
    axis: int = -1


_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
_DENSE = re.compile(r"(?:.*\.)?(?:gate|up|down)_proj\.weight")
_NEVER = re.compile(
    r".*(?:norm|embed|lm_head|rotary|router|vision_tower|vision_model|visual|audio_tower"
    r"|multi_modal_projector|mm_projector).*|.*\.bias|.*gate\.weight",
    re.IGNORECASE,
)
_LAYER = re.compile(r"(?P<root>.*?)\b(?:layers|blocks|h)\.(?P<number>\d+)\.")
_EXPERTS = re.compile(r".*(?:\bmoe|_moe|expert)", re.IGNORECASE)
# Families whose banks are [E, H, 2I] and [E, I, H]: dim 1 is contracted.
_TRANSPOSED = frozenset(
    {"gpt_oss", "aria", "aria_text", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}
)


@dataclass(slots=True)
class Selection:
    """`axes` has the contracted dim of each tensor that is quantised; `left` says of each other
    matrix of a module why it is not. `others` are weights of modules that are no matrices (norms).
    `kept_blocks` are numbers of blocks that are kept."""

    axes: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    kept_blocks: list[int] = field(default_factory=list)


def is_bank(spec: TensorSpec) -> bool:
    """Whether a tensor is a fused bank of experts."""
    found = BANK.fullmatch(spec.name)
    if found is None or found["bias"] or found["suffix"] == "bias" or len(spec.shape) != 3:
        return False
    return found["leaf"] in _PROJECTIONS and spec.dtype in FLOATS


def is_expert(spec: TensorSpec) -> bool:
    """Whether a tensor is the weight of one expert's projection, a matrix."""
    found = EXPERT.fullmatch(spec.name)
    if found is None or len(spec.shape) != 2:
        return False
    return found["leaf"] in _PROJECTIONS and found["kind"] == "weight"


def select(
    specs: Sequence[TensorSpec], source: Source, scope: Scope, wanted: Format, problems: Problems
) -> Selection:
    """What `scope` chooses of `specs`. Problems: patterns that fit nothing, experts of a form that
    no family declares, a family with experts of which none was found, windows of blocks that more
    than one stack of layers numbers."""
    include = Patterns(scope.include, option="--include")
    exclude = Patterns(scope.exclude, option="--exclude")
    names = [spec.name for spec in specs]
    for message in [*include.unused(names), *exclude.unused(names)]:
        problems.refuse(message)
    selection = Selection()
    window = _Window(specs, source, scope)
    _check_experts(specs, source, scope, exclude, problems)
    for spec in specs:
        if spec.dtype not in FLOATS or not (is_bank(spec) or spec.name.endswith(".weight")):
            continue
        if not 2 <= len(spec.shape) <= 3:
            selection.others.append(spec.name)
            continue
        why = _why_not(spec, scope, include, exclude)
        if why is None and (number := window.kept(spec.name)) is not None:
            why = f"block {number} is kept"
            selection.kept_blocks.append(number)
        axis = _axis(spec, source, scope)
        if why is None and axis is None:
            problems.refuse(
                f"{spec.name}: a bank of experts of model type "
                f"{', '.join(source.model_types) or 'unknown'}, of which it is not known which dim "
                "is contracted; exclude it"
            )
        elif why is None and axis is not None:
            size = spec.shape[axis]
            if size % wanted.multiple == 0:
                selection.axes[spec.name] = axis
                continue
            why = f"{size} contracted elements are no multiple of {wanted.multiple}"
        selection.left[spec.name] = str(why)
    selection.kept_blocks = sorted(set(selection.kept_blocks))
    _check_windows(selection, scope, problems)
    return selection


def _why_not(spec: TensorSpec, scope: Scope, include: Patterns, exclude: Patterns) -> str | None:
    """The reason to leave a tensor as it is; None to quantise it."""
    if spec.name in exclude:
        return "excluded"
    if _NEVER.fullmatch(spec.name):
        return "never quantised"
    if is_bank(spec) or is_expert(spec):
        return None if Apply.MOE_EXPERTS in scope.apply else "experts are left out"
    if len(spec.shape) != 2:
        return "no matrix"
    if spec.name in include:
        return None
    if not _DENSE.fullmatch(spec.name):
        return "not chosen by default"
    return None if Apply.DENSE_MLP in scope.apply else "dense layers are left out"


def _axis(spec: TensorSpec, source: Source, scope: Scope) -> int | None:
    """The contracted dim, counted from the first; None where nothing declares it."""
    if len(spec.shape) == 2:
        return scope.axis % 2
    if any(kind in _TRANSPOSED for kind in source.model_types):
        return 1
    known = any(kind in EXPERT_NAMES or kind in NO_EXPERT_NAMES for kind in source.model_types)
    return 2 if known else None


def _check_experts(
    specs: Iterable[TensorSpec],
    source: Source,
    scope: Scope,
    exclude: Patterns,
    problems: Problems,
) -> None:
    if Apply.MOE_EXPERTS not in scope.apply:
        return
    is_found = False
    for spec in specs:
        if is_bank(spec) or is_expert(spec):
            is_found = True
        elif _looks_like_experts(spec) and spec.name not in exclude:
            is_found = True
            problems.refuse(
                f"{spec.name}: looks like experts, {spec.shape}, but no family declares a bank of "
                "this name; exclude it, or leave experts out (--no-lowp-apply-moe-experts)"
            )
    kinds = [k for k in source.model_types if k in EXPERT_NAMES or k in NO_EXPERT_NAMES]
    if kinds and not is_found:
        problems.refuse(
            f"{source.path}: model type {kinds[0]} has experts, but no tensor is named as one; "
            "leave experts out (--no-lowp-apply-moe-experts) if that is right"
        )


def _looks_like_experts(spec: TensorSpec) -> bool:
    is_3d = len(spec.shape) == 3 and spec.dtype in FLOATS
    return is_3d and bool(_EXPERTS.match(spec.name)) and not _NEVER.fullmatch(spec.name)


class _Window:
    """The first and last blocks, which are kept."""

    def __init__(self, specs: Iterable[TensorSpec], source: Source, scope: Scope) -> None:
        self._scope = scope
        stated = source.text_config.get("num_hidden_layers")
        numbers = [place[1] for spec in specs if (place := layer_of(spec.name)) is not None]
        self._count = stated if isinstance(stated, int) else max(numbers, default=-1) + 1

    def kept(self, name: str) -> int | None:
        """The number of the block, if it is kept."""
        place = layer_of(name)
        if place is None:
            return None
        number = place[1]
        last = self._scope.keep_last_blocks
        is_kept = number < self._scope.keep_first_blocks or (
            last > 0 and number >= self._count - last
        )
        return number if is_kept else None


def layer_of(name: str) -> tuple[str, int] | None:
    """The stack of layers that a tensor is in, and the number of its layer."""
    found = _LAYER.match(name)
    return None if found is None else (found["root"], int(found["number"]))


def _check_windows(selection: Selection, scope: Scope, problems: Problems) -> None:
    if not (scope.keep_first_blocks or scope.keep_last_blocks):
        return
    candidates = [*selection.axes, *(n for n, why in selection.left.items() if "is kept" in why)]
    roots = {place[0] for name in candidates if (place := layer_of(name)) is not None}
    if len(roots) > 1:
        problems.refuse(
            f"blocks to keep are numbers, but these stacks each have their own: "
            f"{', '.join(sorted(roots))}; exclude the layers of one"
        )


def module_of(name: str) -> str:
    """The module that has a weight: its name without the last part; a bank's own name."""
    return name.removesuffix(".weight")


def left_modules(selection: Selection, tied: Mapping[str, str]) -> list[str]:
    """Modules that are not quantised, for the list of those in config.json; the head always."""
    found = [module_of(name) for name in selection.left]
    found += [module_of(alias) for alias in tied]
    return list(dict.fromkeys([*found, "lm_head"]))
