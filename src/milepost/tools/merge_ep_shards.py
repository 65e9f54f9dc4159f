"""`merge_ep_shards`: experts that ranks saved slice by slice become one Hugging Face checkpoint.

Slices joined in order of rank are what the modules of the run held. A save of Milepost holds them
as the modules of transformers do; others hold them as a matrix product wants them, input dim first,
and are turned. Which it is, is recorded (`rewrite/ep_slices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from milepost.hf.ep_families import FUSED_ON_HUB, supported_ep_merge_model_types
from milepost.hf.expert_layouts import (
    BANK_RENAMES,
    DOWN,
    EXPERT_NAMES,
    GATE_UP,
    INPUT_FIRST_BANKS,
    UP,
    ExpertNames,
)
from milepost.storage import fileops
from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.ep_slices import (
    EXPERTS,
    SLICE,
    is_input_first,
    is_stack,
    plain_leaf,
    require_slices,
    sliced_model_type,
    slices_of,
)
from milepost.tools.rewrite.groups import (
    Computed,
    Group,
    TensorSpec,
    block_of,
    in_parts,
    joined,
)
from milepost.tools.rewrite.options import Mode, RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import EpSlices, Source, SourceTensor, open_source

__all__ = ["InputShards", "merge_ep_shards", "supported_ep_merge_model_types"]


class InputShards(Enum):
    """What becomes of the input once the output is complete and durable."""

    KEEP = "keep"
    DELETE = "delete"
    """Its weight files and their index are removed; everything else stays."""


def merge_ep_shards(
    source: PathLike,
    output: PathLike,
    *,
    input_shards: InputShards = InputShards.KEEP,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the `ep_sharded` save at `source` as one Hugging Face directory.

    Nothing is cast. Refused are inputs that are no such save or have no index, an adapter beside
    the slices, a model type whose slices are not known, slices that are missing or belong to no
    expert, and expert tensors that the family does not have; other errors: see `run_rewrite`.
    """
    opened = open_source(source, slices=EpSlices.TAKE)
    size = require_slices(opened)
    kind = sliced_model_type(opened)
    rewrite = Rewrite(verb="merge-ep-shards", sources=[opened], groups=[])
    slices = slices_of(opened, size, rewrite.problems)
    merge = _Merge(kind, slices, opened, rewrite)
    rewrite.groups = list(merge.groups())
    rewrite.tied = {
        alias: name
        for pair in opened.tied.items()
        for alias, name in zip(*map(merge.names_of, pair), strict=True)
    }
    rewrite.counts = {"ranks": size, "sliced tensors": len(slices)}
    report = run_rewrite(rewrite, output, options)
    if input_shards is InputShards.DELETE and report.mode is Mode.WRITE:
        assert opened.set is not None
        for name in (*opened.set.part_names, opened.set.index_path.name):
            fileops.unlink(opened.set.directory / name)
        fileops.sync_directory(opened.set.directory)
    return report


class _Merge:
    """The groups of one merge."""

    def __init__(
        self, kind: str, slices: Mapping[str, list[SourceTensor]], source: Source, rewrite: Rewrite
    ) -> None:
        self._slices, self._source, self._problems = slices, source, rewrite.problems
        self._kind = kind
        self._names: ExpertNames | None = None if kind in FUSED_ON_HUB else EXPERT_NAMES.get(kind)
        # Turned: the input dim comes first, as in `x @ w`, and not in the modules of the family.
        self._is_turned = kind not in INPUT_FIRST_BANKS and is_input_first(source)
        self._layers = {name.rpartition(".experts")[0] for name in slices}

    def names_of(self, name: str) -> tuple[str, ...]:
        """A name of a module as that of the hub, several where the hub has it in parts."""
        if self._names is None:
            for old, new in BANK_RENAMES.get(self._kind, ()):
                name = name.replace(old, new)
            return (name,)
        has_experts = any(name.startswith(f"{layer}.") for layer in self._layers)
        return self._names.on_hub(name, has_experts=has_experts)

    def groups(self) -> Iterator[Group]:
        """Groups in the order in which their first tensor lies in the input."""
        done: set[str] = set()
        for tensor in self._source.tensors.values():
            found = SLICE.fullmatch(tensor.name)
            if found is None:
                yield from in_parts(tensor, self.names_of(tensor.name), self._problems)
                continue
            if is_stack(self._kind, found["base"]):
                yield from self._stack(found["base"], done)
                continue
            expert = EXPERTS.fullmatch(found["base"])
            if expert is None or expert["prefix"] in done or found["base"] not in self._slices:
                continue
            done.add(expert["prefix"])
            banks = {
                plain_leaf(name.removeprefix(f"{expert['prefix']}.")): parts
                for name, parts in self._slices.items()
                if name.startswith(f"{expert['prefix']}.")
            }
            make = self._banks if self._names is None else self._singles
            yield from make(expert["prefix"], banks)

    def _stack(self, name: str, done: set[str]) -> Iterator[Group]:
        """The slices of a tensor that is no bank, one after the other."""
        if name in self._slices and name not in done:
            done.add(name)
            parts = self._slices[name]
            rows = sum(part.shape[0] for part in parts)
            yield joined(name, (rows, *parts[0].shape[1:]), parts)

    def _singles(self, prefix: str, banks: Mapping[str, list[SourceTensor]]) -> Iterator[Group]:
        """One tensor for each expert and projection, slice by slice."""
        assert self._names is not None
        (place,) = self.names_of(prefix)
        for leaf, parts in banks.items():
            kind = "bias" if leaf.endswith("_bias") else "weight"
            if self._names.gate is None and leaf.startswith("gate_"):
                self._problems.refuse(f"{prefix}.{leaf}: experts of {self._kind} have no gate")
                continue
            first = 0
            for part in parts:
                cuts = self._cuts(leaf.removesuffix("_bias"), part, kind)
                if kind == "weight" and self._is_turned:
                    yield self._turned(part, place, first, cuts)
                else:
                    for expert in range(part.shape[0]):
                        for name, rows in cuts:
                            full = f"{place}.{first + expert}.{name}.{kind}"
                            yield block_of(part, full, expert, rows=rows)
                first += part.shape[0]

    def _cuts(self, leaf: str, part: SourceTensor, kind: str) -> list[tuple[str, tuple[int, int]]]:
        """Projections in a slice, and which of the output features each has."""
        names = self._names
        assert names is not None
        dim = 2 if kind == "weight" and self._is_turned else 1
        length = part.shape[dim] if len(part.shape) > dim else 0
        if leaf == GATE_UP:
            return [(str(names.gate), (0, length // 2)), (names.up, (length // 2, length))]
        single = {DOWN: names.down, UP: names.up, "gate_proj": names.gate}[leaf]
        return [(str(single), (0, length))]

    def _turned(
        self, part: SourceTensor, place: str, first: int, cuts: list[tuple[str, tuple[int, int]]]
    ) -> Computed:
        """The experts of a slice [E, in, out], each projection as [out, in]."""
        experts, inputs = part.shape[:2]
        wanted = [
            (f"{place}.{first + expert}.{name}.weight", expert, rows)
            for expert in range(experts)
            for name, rows in cuts
        ]
        outputs = tuple(
            TensorSpec(name=name, dtype=part.dtype, shape=(rows[1] - rows[0], inputs))
            for name, _, rows in wanted
        )

        def make(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            whole = tensors["slice"]
            return {name: whole[expert, :, slice(*rows)].t() for name, expert, rows in wanted}

        return Computed(inputs={"slice": part}, outputs=outputs, make=make)

    def _banks(self, prefix: str, banks: Mapping[str, list[SourceTensor]]) -> Iterator[Group]:
        """Whole banks: slices joined, turned and gate and up put together where they must be."""
        apart = {leaf for leaf in banks if leaf.startswith(("gate_proj", UP))}
        for suffix in ("", "_bias"):
            pair = (f"gate_proj{suffix}", f"{UP}{suffix}")
            if apart & set(pair):
                if not set(pair) <= apart:
                    self._problems.refuse(f"{prefix}: {', '.join(sorted(apart))} without its pair")
                    continue
                yield self._pair(prefix, suffix, *(banks[leaf] for leaf in pair))
        for leaf, parts in banks.items():
            if leaf in apart:
                continue
            (name,) = self.names_of(f"{prefix}.{leaf}")
            experts = sum(part.shape[0] for part in parts)
            if len(parts[0].shape) == 3 and self._is_turned:
                yield self._turned_bank(name, experts, parts)
            else:
                yield joined(name, (experts, *parts[0].shape[1:]), parts)

    def _turned_bank(self, name: str, experts: int, parts: list[SourceTensor]) -> Computed:
        _, rows, columns = parts[0].shape
        spec = TensorSpec(name=name, dtype=parts[0].dtype, shape=(experts, columns, rows))
        inputs = {str(rank): part for rank, part in enumerate(parts)}

        def make(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.cat([tensors[key].transpose(1, 2) for key in inputs])}

        return Computed(inputs=inputs, outputs=(spec,), make=make)

    def _pair(
        self, prefix: str, suffix: str, gates: list[SourceTensor], ups: list[SourceTensor]
    ) -> Computed:
        """Gate and up that lie apart, as one bank: halves, or interleaved for GPT-OSS."""
        experts = sum(part.shape[0] for part in gates)
        inner = gates[0].shape[-1]
        (name,) = self.names_of(f"{prefix}.{GATE_UP}{suffix}")
        interleaves = self._kind == "gpt_oss"
        turns = self._is_turned and not suffix
        middle = gates[0].shape[1:-1]
        shape = (experts, 2 * inner, *middle) if turns else (experts, *middle, 2 * inner)
        spec = TensorSpec(name=name, dtype=gates[0].dtype, shape=shape)
        inputs = {f"gate{rank}": part for rank, part in enumerate(gates)}
        inputs |= {f"up{rank}": part for rank, part in enumerate(ups)}
        make = partial(_paired, name, len(gates), interleaves, turns)
        return Computed(inputs=inputs, outputs=(spec,), make=make)


def _paired(
    name: str, count: int, interleaves: bool, turns: bool, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    made = []
    for rank in range(count):
        gate, up = tensors[f"gate{rank}"], tensors[f"up{rank}"]
        if interleaves:
            made.append(torch.stack([gate, up], dim=-1).flatten(-2))
            continue
        whole = torch.cat([gate, up], dim=-1)
        made.append(whole.transpose(1, 2) if turns else whole)
    return {name: torch.cat(made)}
