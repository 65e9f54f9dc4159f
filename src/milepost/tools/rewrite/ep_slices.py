"""Slices of experts as they lie in an `ep_sharded` directory: which there are, and how they lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from milepost.errors import InvalidInputError
from milepost.hf.ep_families import EP_FAMILIES, EpSave, supported_ep_merge_model_types
from milepost.hf.expert_layouts import DOWN, EXPERT_STACKS, GATE_UP, UP
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source, SourceTensor

SLICE = re.compile(r"(?P<base>.+)\.shard_(?P<rank>\d+)")
EXPERTS = re.compile(r"(?P<prefix>(?:.*\.)?(?:experts|routed_experts))\.(?P<leaf>\w+)")
INPUT_FIRST: Mapping[str, Any] = {"expert_layout": "input_first"}
"""Metadata of the index of slices that have the input dim first, where there is a manifest."""

_GMM = {"gate_proj_gmm": "gate_proj", "up_proj_gmm": "up_proj"}
_LEAVES = (GATE_UP, "gate_proj", UP, DOWN)


def require_slices(source: Source) -> int:
    """The number of ranks; `InvalidInputError` for what is no save of slices."""
    if not source.is_ep_sharded or source.set is None:
        raise InvalidInputError(
            f"{source.path}: no ep_sharded save: its weights are whole already", path=source.path
        )
    if source.set.index is None:
        raise InvalidInputError(
            f"{source.path}: slices of experts without their index, which says how many ranks "
            "there were; copy the index too",
            path=source.path,
        )
    size = source.set.index.metadata.get("ep_size")
    if isinstance(size, str) and size.isdecimal():
        size = int(size)
    if not isinstance(size, int) or size < 1:
        raise InvalidInputError(
            f"{source.set.index_path}: metadata.ep_size is {size!r}, expected a number of ranks",
            path=source.set.index_path,
        )
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        if (source.path / name).exists():
            raise InvalidInputError(
                f"{source.path}: {name} lies beside the slices: an adapter over them, which would "
                "be left behind; merge the adapter instead",
                path=source.path,
            )
    return size


def sliced_model_type(source: Source) -> str:
    """The model type, one of those whose slices are known; `InvalidInputError` otherwise."""
    kinds = source.model_types
    found = [kind for kind in kinds if EP_FAMILIES.get(kind) is EpSave.SLICES]
    if not found:
        stated = kinds[0] if kinds else None
        raise InvalidInputError(
            f"{source.path}: the model type {stated!r} is none of those whose slices can be "
            f"merged ({', '.join(supported_ep_merge_model_types())})",
            path=source.path,
        )
    return found[0]


def is_input_first(source: Source) -> bool:
    """Whether slices have the input dim first, as a matrix product wants it.

    A save of Milepost, which has a manifest, holds them as the modules of transformers do; others
    do not, and neither do theirs that were resharded, whose index says so.
    """
    if not isinstance(source.checkpoint, DirectoryCheckpoint):
        return True
    assert source.set is not None and source.set.index is not None
    return INPUT_FIRST.items() <= source.set.index.metadata.items()


def slices_of(source: Source, size: int, problems: Problems) -> dict[str, list[SourceTensor]]:
    """The slices of each tensor in order of rank."""
    held: dict[str, dict[int, SourceTensor]] = {}
    for tensor in source.tensors.values():
        found = SLICE.fullmatch(tensor.name)
        if found is not None:
            held.setdefault(found["base"], {})[int(found["rank"])] = tensor
    made = {}
    kind = sliced_model_type(source)
    for base, by_rank in held.items():
        expert = EXPERTS.fullmatch(base)
        leaf = "" if expert is None else plain_leaf(expert["leaf"])
        if leaf.removesuffix("_bias") not in _LEAVES and not is_stack(kind, base):
            problems.refuse(f"{base}: cut into slices, but no known tensor of experts")
        if sorted(by_rank) != list(range(size)):
            there = ", ".join(map(str, sorted(by_rank)))
            problems.refuse(f"{base}: {size} slices expected, ranks {there} are there")
            continue
        ordered = [by_rank[rank] for rank in range(size)]
        if len({(tensor.dtype, tensor.shape[1:]) for tensor in ordered}) != 1:
            problems.refuse(f"{base}: slices differ in dtype or in shape besides dim 0")
            continue
        made[base] = ordered
    return made


def is_stack(kind: str, name: str) -> bool:
    """Whether this family has all experts of a layer in this tensor, which is no bank."""
    pattern = EXPERT_STACKS.get(kind)
    return pattern is not None and pattern.fullmatch(name) is not None


def plain_leaf(name: str) -> str:
    """A name that a grouped matrix product gives, as the plain one."""
    for old, new in _GMM.items():
        name = name.replace(old, new)
    return name
