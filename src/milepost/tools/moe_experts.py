"""`unfuse_moe_experts` and `fuse_moe_experts`: banks of experts and single experts, both ways.

Both only move bytes: a bank [E, 2I, H] is gate and up of each expert one after the other, so an
expert's tensor is a byte range of it. Which form a family has is data (`hf/expert_layouts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import (
    BANK,
    DOWN,
    EXPERT,
    EXPERT_NAMES,
    GATE_UP,
    NO_EXPERT_NAMES,
    UP,
    ExpertNames,
    expert_names,
)
from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.groups import Copied, block_of, in_parts, joined, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, SourceTensor, open_source

_LAYER = re.compile(r"(.*\.layers\.\d+\.)|(.*)")
_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip


def unfuse_moe_experts(
    source: PathLike, output: PathLike, *, options: RewriteOptions | None = None
) -> RewriteReport:
    """Write fused expert banks of `source` as one tensor for each expert and projection.

    Names are those of the family's hub checkpoints; values and dtypes stay. A checkpoint without
    banks is copied, whatever its family. Refused are families whose hub checkpoints have no single
    experts, banks of another shape than config.json says, and quantised banks; other errors: see
    `run_rewrite`.
    """
    opened = open_source(source)
    rewrite = Rewrite(verb="unfuse-moe-experts", sources=[opened], groups=[])
    found = unfused(opened, rewrite.problems)
    rewrite.groups = found.groups
    if not found.banks:
        rewrite.notes.append("there are no fused experts; every tensor is copied as it is")
        return run_rewrite(rewrite, output, options)
    rewrite.tied = found.tied
    rewrite.counts = {
        "banks": found.banks,
        "expert tensors": found.experts,
    }
    return run_rewrite(rewrite, output, options)


class Unfused(NamedTuple):
    """All tensors of a source with experts one by one: the `experts` of them were in `banks`."""

    groups: list[Copied]
    tied: dict[str, str]
    banks: int = 0
    experts: int = 0


def unfused(source: Source, problems: Problems) -> Unfused:
    """Every tensor of `source` under its hub name, each bank as one tensor for each expert and
    projection; a source without banks as it is. Errors: see `unfuse_moe_experts`."""
    banks = {name: found for name in source.tensors if (found := bank_of(name)) is not None}
    if not banks:
        groups = [passed(tensor) for tensor in source.tensors.values()]
        return Unfused(groups, dict(source.tied))
    names = _names_of(source)
    rename = _Renames(names, banks)
    groups = []
    experts = 0
    for tensor in source.tensors.values():
        found = banks.get(tensor.name)
        if found is None:
            groups += in_parts(tensor, rename(tensor.name), problems)
        else:
            singles = list(_experts_of(tensor, found, names, rename, problems))
            experts += len(singles)
            groups += singles
    _check_config(source, banks, names, problems)
    tied = {
        alias: name
        for pair in source.tied.items()
        for alias, name in zip(*map(rename, pair), strict=True)
    }
    return Unfused(groups, tied, len(banks), experts)


def fuse_moe_experts(
    source: PathLike, output: PathLike, *, options: RewriteOptions | None = None
) -> RewriteReport:
    """Write single experts of `source` as fused banks: the reverse of `unfuse_moe_experts`.

    A bank needs every expert from 0 up, with one dtype and shape; what is missing is listed. The
    path of the banks is that of the experts, which transformers loads as well.
    """
    opened = open_source(source)
    rewrite = Rewrite(verb="fuse-moe-experts", sources=[opened], groups=[])
    found = fused(opened, rewrite.problems)
    rewrite.groups = found.groups
    if found.banks:
        rewrite.counts = {"banks": found.banks}
    else:
        rewrite.notes.append("there are no single experts; every tensor is copied as it is")
    return run_rewrite(rewrite, output, options)


class Fused(NamedTuple):
    """All tensors of a source with experts in banks; `banks` is how many were put together."""

    groups: list[Copied]
    banks: int


def fused(source: Source, problems: Problems) -> Fused:
    """Every tensor of `source`, single experts as banks at their path. Errors: see
    `fuse_moe_experts`."""
    singles = {name: found for name in source.tensors if (found := EXPERT.fullmatch(name))}
    if not singles:
        return Fused([passed(tensor) for tensor in source.tensors.values()], 0)
    names = _names_of(source)
    held = _held(source, singles, names, problems)
    groups: list[Copied] = []
    seen: set[str] = set()
    for tensor in source.tensors.values():
        match = singles.get(tensor.name)
        if match is None:
            groups.append(passed(tensor))
        elif match["prefix"] not in seen:
            seen.add(match["prefix"])
            for kind in ("weight", "bias"):
                bank = held.get((match["prefix"], kind), {})
                groups += _banks_of(match["prefix"], kind, bank, names, source, problems)
    return Fused(groups, len(groups) - len(source.tensors) + len(singles))


_Held: TypeAlias = dict[tuple[str, int], SourceTensor]


def _held(
    source: Source,
    singles: dict[str, re.Match[str]],
    names: ExpertNames,
    problems: Problems,
) -> dict[tuple[str, str], _Held]:
    """By path and kind (weight, bias): the tensor of each projection and expert."""
    held: dict[tuple[str, str], _Held] = {}
    for name, found in singles.items():
        if found["leaf"] not in names.leaves or found["kind"] not in ("weight", "bias"):
            problems.refuse(f"{name}: no projection of an expert that can be fused")
            continue
        bank = held.setdefault((found["prefix"], found["kind"]), {})
        bank[found["leaf"], int(found["number"])] = source[name]
    return held


def bank_of(name: str) -> dict[str, str | None] | None:
    """The parts of a bank's name; None for any other tensor. A quantised bank is refused."""
    found = BANK.fullmatch(name)
    if found is None or found["leaf"] not in (GATE_UP, DOWN, UP, "gate_proj"):
        if found is not None and found["leaf"].startswith((GATE_UP, DOWN)):
            raise InvalidInputError(
                f"{name}: belongs to a bank of experts that is quantised; dequantise the "
                "checkpoint first (milepost dequantize)"
            )
        return None
    return found.groupdict()


def _names_of(source: Source) -> ExpertNames:
    kinds = source.model_types
    found = expert_names(kinds)
    if found is not None:
        return found
    if not kinds:
        raise InvalidInputError(
            f"{source.path}: no config.json with a model_type, which says how experts are laid "
            "out; put it there",
            path=source.path,
        )
    why = next((NO_EXPERT_NAMES[kind] for kind in kinds if kind in NO_EXPERT_NAMES), None)
    reason = why or "it is not known how its experts are named"
    raise InvalidInputError(
        f"{source.path}: model type {kinds[0]}: {reason}; known are "
        f"{', '.join(sorted(EXPERT_NAMES))}",
        path=source.path,
    )


class _Renames:
    """Module names as hub names, several for a tensor that the hub has in parts."""

    def __init__(self, names: ExpertNames, banks: dict[str, Any]) -> None:
        self._names = names
        self._layers = {_layer(name) for name in banks}

    def __call__(self, name: str) -> tuple[str, ...]:
        return self._names.on_hub(name, has_experts=_layer(name) in self._layers)


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return "" if found is None else found[1] or ""


def _experts_of(
    bank: SourceTensor,
    found: dict[str, str | None],
    names: ExpertNames,
    rename: _Renames,
    problems: Problems,
) -> Iterator[Copied]:
    kind = "bias" if found["bias"] or found["suffix"] == "bias" else "weight"
    leaf, (prefix,) = str(found["leaf"]), rename(str(found["prefix"]))
    dims = 3 if kind == "weight" else 2
    if len(bank.shape) != dims:
        problems.refuse(f"{bank.name}: shape {bank.shape}, a bank of experts has {dims} dims")
        return
    experts, rows = bank.shape[:2]
    if leaf == GATE_UP and (names.gate is None or rows % 2):
        problems.refuse(f"{bank.name}: {rows} rows are no gate half and up half")
        return
    if leaf == GATE_UP:
        cuts = [(str(names.gate), (0, rows // 2)), (names.up, (rows // 2, rows))]
    else:
        single = {DOWN: names.down, UP: names.up, "gate_proj": names.gate}[leaf]
        cuts = [(str(single), (0, rows))]
    for expert in range(experts):
        for projection, span in cuts:
            yield block_of(bank, f"{prefix}.{expert}.{projection}.{kind}", expert, rows=span)


def _check_config(
    source: Source, banks: dict[str, Any], names: ExpertNames, problems: Problems
) -> None:
    """Banks must have the shapes that config.json says: [E, 2I, H] and [E, H, I]."""
    config = source.text_config
    hidden = config.get("hidden_size")
    inner = config.get("moe_intermediate_size", config.get("intermediate_size"))
    experts = _count(config)
    for name, found in banks.items():
        shape = source[name].shape
        if found["bias"] or found["suffix"] == "bias" or len(shape) != 3:
            continue
        if not isinstance(hidden, int) or not isinstance(inner, int):
            continue
        wanted: tuple[int | None, ...] = (experts, inner, hidden)
        if found["leaf"] == GATE_UP:
            wanted = (experts, 2 * inner, hidden)
        elif found["leaf"] == DOWN:
            wanted = (experts, hidden, inner)
        if any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
            turned = shape[1:] == (wanted[2], wanted[1])
            what = "; it is transposed or interleaved, and no bank of this family" if turned else ""
            problems.refuse(
                f"{name}: shape {shape}, but config.json says {wanted} for this family{what}"
            )


def _count(config: dict[str, Any]) -> int | None:
    return next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), None)


def _banks_of(
    prefix: str,
    kind: str,
    held: _Held,
    names: ExpertNames,
    source: Source,
    problems: Problems,
) -> list[Copied]:
    """The banks of one layer; problems when experts are missing or differ."""
    if not held:
        return []
    stated = _count(source.text_config)
    count = max(number for _, number in held) + 1
    wanted = [(leaf, number) for number in range(max(count, stated or 0)) for leaf in names.leaves]
    missing = [f"{number}.{leaf}" for leaf, number in wanted if (leaf, number) not in held]
    if missing:
        problems.refuse(
            f"{prefix}: {len(missing)} tensors of {max(count, stated or 0)} experts are missing: "
            f"{', '.join(missing[:5])}"
        )
        return []
    made = []
    gated = names.gate is not None
    first = (str(names.gate), names.up) if gated else (names.up,)
    for leaf, parts in ((GATE_UP if gated else UP, first), (DOWN, (names.down,))):
        rows = [held[part, number] for number in range(count) for part in parts]
        if len({(tensor.dtype, tensor.shape) for tensor in rows}) != 1:
            problems.refuse(f"{prefix}: experts differ in dtype or shape, such as {rows[0].name}")
            continue
        shape = (count, len(parts) * rows[0].shape[0], *rows[0].shape[1:])
        made.append(joined(f"{prefix}.{leaf}{'_bias' if kind == 'bias' else ''}", shape, rows))
    return made


def supported_unfuse_model_types() -> Sequence[str]:
    """The model types whose experts can be written one by one."""
    return tuple(sorted(EXPERT_NAMES))
