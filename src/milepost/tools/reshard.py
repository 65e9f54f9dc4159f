"""`reshard`: the same weights in parts of another size, or with experts cut for other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from milepost.errors import InvalidInputError
from milepost.format.manifest import Manifest
from milepost.hf.ep_families import FUSED_ON_HUB
from milepost.hf.expert_layouts import BANK_RENAMES, EXPERT_NAMES, Rename
from milepost.plan.part_names import RankParts
from milepost.storage.fileops import PathLike
from milepost.tools.moe_experts import bank_of, fused
from milepost.tools.rewrite.ep_slices import (
    INPUT_FIRST,
    SLICE,
    is_input_first,
    is_stack,
    require_slices,
    sliced_model_type,
    slices_of,
)
from milepost.tools.rewrite.groups import Copied, joined, passed, rows_of
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import EpSlices, Source, open_source


def reshard(
    source: PathLike,
    output: PathLike,
    *,
    ep_size: int | None = None,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the weights of `source` as the directory `output`, in parts of `max_shard_size`.

    With `ep_size`, write one file for each of so many ranks, with its slice of each tensor of
    experts (`ep_sharded`), out of a directory of that kind or of any checkpoint of a family whose
    slices are known; `merge_ep_shards` is the way back. Refused are numbers of experts that
    `ep_size` does not divide, and models without experts.

    Every tensor keeps its bytes. What is training state stays behind (`milepost export
    --with-training-state` takes it along). Errors: see `run_rewrite`.
    """
    takes = EpSlices.REFUSE if ep_size is None else EpSlices.TAKE
    opened = open_source(source, slices=takes)
    rewrite = Rewrite(
        verb="reshard",
        sources=[opened],
        groups=[],
        arguments={
            "max_shard_size": None if options is None else options.max_shard_size,
            "ep_size": ep_size,
        },
    )
    if ep_size is None:
        rewrite.groups = [passed(tensor) for tensor in opened.tensors.values()]
    else:
        _cut_for_ranks(rewrite, opened, ep_size)
    return run_rewrite(rewrite, output, options)


def _cut_for_ranks(rewrite: Rewrite, source: Source, size: int) -> None:
    """Make `rewrite` one whose output has a file for each of `size` ranks."""
    if size < 1:
        raise InvalidInputError(f"ep_size={size}: expected a number of ranks, from 1 up")
    marks: Mapping[str, Any] = {}
    if source.is_ep_sharded:
        whole = list(_joined_slices(source, rewrite.problems))
        marks = INPUT_FIRST if is_input_first(source) else {}
        rewrite.tied = source.tied
    else:
        whole, rewrite.tied = _banks_of(source, rewrite.problems)
    banks = sum(is_bank for _, is_bank in whole)
    count = _rows_are_of_experts(source)
    if banks and count is not None and count % size:
        rewrite.problems.refuse(f"{count} experts cannot be divided among {size} ranks")
    if not banks and not rewrite.problems:
        rewrite.problems.refuse(f"{source.path}: there are no experts, which ranks could divide")
    groups: list[Copied] = []
    for copied, is_bank in whole:
        groups += _slices(copied, size, rewrite.problems) if is_bank else [copied]
    rewrite.groups = groups
    rewrite.naming = RankParts(size, marks)
    rewrite.edit_manifest = _say_that_no_reader_takes_it
    rewrite.counts = {"ranks": size, "sliced tensors": banks}


def _joined_slices(source: Source, problems: Problems) -> Iterator[tuple[Copied, bool]]:
    """Each tensor of an `ep_sharded` directory as a whole, and whether it lies in slices."""
    slices = slices_of(source, require_slices(source), problems)
    done: set[str] = set()
    for tensor in source.tensors.values():
        found = SLICE.fullmatch(tensor.name)
        if found is None:
            yield passed(tensor), False
        elif found["base"] in slices and found["base"] not in done:
            done.add(found["base"])
            parts = slices[found["base"]]
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            yield joined(found["base"], shape, parts), True


def _banks_of(
    source: Source, problems: Problems
) -> tuple[list[tuple[Copied, bool]], dict[str, str]]:
    """Each tensor under the name that modules have for it, experts as banks, and whether it is
    one; aliases, and what they are tied to, under such names too."""
    kind = sliced_model_type(source)
    found = fused(source, problems)
    if found.banks and kind in FUSED_ON_HUB:
        problems.refuse(
            f"{source.path}: experts one by one, but checkpoints of {kind} have banks; fuse them "
            "first (milepost fuse-moe-experts)"
        )
    bank_renames = BANK_RENAMES.get(kind, ())
    parts = {
        copied.output.name: bank_of(_of_module(copied.output.name, bank_renames))
        for copied in found.groups
    }
    layers = {
        str(bank["prefix"]).rpartition(".experts")[0] for bank in parts.values() if bank is not None
    }
    renames = bank_renames if kind in FUSED_ON_HUB else EXPERT_NAMES[kind].renames

    def module_name(name: str) -> str:
        return _module_name(name, layers, renames, problems)

    whole = []
    for copied in found.groups:
        name, bank = copied.output.name, parts[copied.output.name]
        if bank is not None and bank["suffix"] is not None:
            problems.refuse(f"{name}: a bank as {bank['suffix']} of a module, which has no slices")
        spec = replace(copied.output, name=module_name(name))
        whole.append((replace(copied, output=spec), bank is not None or is_stack(kind, name)))
    return whole, {module_name(a): module_name(kept) for a, kept in source.tied.items()}


def _module_name(
    name: str, layers: set[str], renames: tuple[Rename, ...], problems: Problems
) -> str:
    """The name that a merge makes this one of again, in layers that have experts."""
    if not any(name.startswith(f"{layer}.") for layer in layers):
        return name
    module = _of_module(name, renames)
    back = module
    for old, new in renames:
        back = back.replace(old, new)
    if back != name:
        problems.refuse(f"{name}: as a slice it would come back as {back}")
    return module


def _of_module(name: str, renames: tuple[Rename, ...]) -> str:
    for old, new in reversed(renames):
        name = name.replace(new, old)
    return name


def _slices(whole: Copied, size: int, problems: Problems) -> Iterator[Copied]:
    """What each rank has of a tensor of experts."""
    name, experts = whole.output.name, whole.output.shape[0]
    if not experts or experts % size:
        problems.refuse(f"{name}: {experts} experts cannot be divided among {size} ranks")
        return
    each = experts // size
    for rank in range(size):
        yield rows_of(whole, f"{name}.shard_{rank}", (rank * each, (rank + 1) * each))


def _rows_are_of_experts(source: Source) -> int | None:
    """The number of experts where it is not the length of dim 0: DBRX, by its configuration."""
    config = source.config.get("ffn_config")
    return config.get("moe_num_experts") if isinstance(config, dict) else None


def _say_that_no_reader_takes_it(manifest: Manifest) -> None:
    manifest.models = {
        key: msgspec.structs.replace(entry, huggingface=False)
        for key, entry in manifest.models.items()
    }
