"""The output of a merge as groups: edits brought to stored tensors, ties, heads and sidecars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from milepost.hf.fp32_names import stays_fp32
from milepost.hf.training_sidecars import SidecarPlan
from milepost.tools.merge_peft_adapter import OpenedAdapter
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.merge_peft_config import MergeTask
from milepost.tools.merge_peft_edits import (
    Differences,
    Edit,
    LowRankEdit,
    RowsEdit,
    WholeEdit,
    edited_group,
)
from milepost.tools.merge_peft_lookups import AdapterPlan
from milepost.tools.merge_peft_plan import plan_adapter
from milepost.tools.merging.vocabulary import is_by_token
from milepost.tools.rewrite.dtypes import FLOATS, cast_group
from milepost.tools.rewrite.groups import Group, passed
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.sidecars import constant, sidecar_plan
from milepost.tools.rewrite.source import SourceTensor, same_bytes

_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")


class TiedDelta(StrEnum):
    """What factors of one of two tied tensors (embedding and head) change."""

    FOLD = "fold"
    """The one tensor that both are, as peft's own merge does."""
    SEPARATE = "separate"
    """That side alone, as the adapter computed it: the output has two tensors, and is not tied."""


class Banks(Enum):
    """How experts of a bank that lie one by one are made."""

    TOGETHER = "together"
    """In one group, which reads the factors of the bank once."""
    ALONE = "alone"
    """Each by itself, for readers of single tensors."""


class Merging:
    """What adapters do to a base. After `groups`, the other attributes say what came of it."""

    def __init__(
        self,
        base: BaseIndex,
        adapters: Sequence[OpenedAdapter],
        problems: Problems,
        differences: Differences,
        *,
        dtype: str | None,
        task: MergeTask,
        tied: TiedDelta,
        banks: Banks = Banks.TOGETHER,
    ) -> None:
        self._base, self._adapters, self._problems = base, adapters, problems
        self._differences, self._dtype, self._task, self._tied = differences, dtype, task, tied
        self._banks = banks
        self._tensors = dict(base.source.tensors)
        self._edits: dict[str, list[Edit]] = {}
        self._of_alias: dict[str, list[Edit]] = {}
        self._new: dict[str, SourceTensor] = {}
        self._copies: dict[str, SourceTensor] = {}
        self.notes: list[str] = []
        self.dropped: dict[str, str] = {}
        self.separate: list[str] = []
        self.untied: list[str] = []
        self.replaced: list[str] = []
        self.sidecars: dict[str, Path] = {}
        self.config: dict[str, Any] = {}
        self.vocabulary: int | None = None
        self.labels: int | None = None
        self.resized_by: OpenedAdapter | None = None

    @property
    def edited(self) -> list[str]:
        """Output tensors that adapters touch."""
        return [*self._edits, *self.replaced]

    def ties(self) -> dict[str, str]:
        """Ties of the output."""
        gone = {*self.separate, *self.dropped}
        kept = {alias: name for alias, name in self._base.source.tied.items() if alias not in gone}
        if self._task is MergeTask.CLASSIFICATION:
            kept = {alias: name for alias, name in kept.items() if alias not in _HEADS}
        return kept

    def groups(self) -> list[Group]:
        """All groups of the output, in the order of the base's tensors."""
        for adapter in self._adapters:
            self._take(adapter)
        self._settle_ties()
        self._settle_heads()
        self._settle_doubled()
        sidecars = self._sidecar_plan()
        made: list[Group] = []
        done: set[str] = set()
        for tensor in self._tensors.values():
            if tensor.name not in done and tensor.name not in self.dropped:
                made += self._groups_of(tensor, sidecars, done)
        for alias in self.separate:
            made += self._separated(alias)
        for name, tensor in self._new.items():
            made.append(cast_group(tensor, self._dtype or self._dtype_of_base(), name=name))
        made += [
            constant(name, value)
            for name, value in sidecars.tensors.items()
            if name not in self._tensors
        ]
        self._check_vocabulary(made)
        return made

    # ---- what adapters bring

    def _take(self, adapter: OpenedAdapter) -> None:
        plan = plan_adapter(adapter, self._base, self._problems)
        self._share_rows(plan)
        for name, edits in plan.edits.items():
            if name in self._base.tied:
                self._of_alias.setdefault(name, []).extend(edits)
            else:
                self._edits.setdefault(self._stored(name), []).extend(edits)
        for name, tensor in plan.copies.items():
            known = self._copies.setdefault(self._stored(name), tensor)
            if not same_bytes(known, tensor):
                self._problems.refuse(
                    f"{name}: {known.source.path} and {tensor.source.path} bring base embeddings "
                    f"along that differ ({known.name}, {tensor.name}); merge one adapter after the "
                    "other"
                )
        for name, tensor in plan.new.items():
            if name in self._new or adapter.weight != 1.0:
                self._problems.refuse(
                    f"{name}: the base has no such tensor, so those of several adapters cannot be "
                    "added up; merge the one that brings it alone, at weight 1"
                )
            self._new[name] = tensor

    def _share_rows(self, plan: AdapterPlan) -> None:
        """Rows of an embedding that were trained are also those of the head that is tied to it, as
        in peft, unless the adapter has rows of the head."""
        doubled = self._base.doubled
        for alias, kept in {**self._base.tied, **doubled}.items():
            ours, theirs = (_rows(plan.edits.get(name, ())) for name in (alias, kept))
            if ours or not theirs:
                continue
            if alias in doubled and not same_bytes(self._tensors[alias], self._tensors[kept]):
                continue
            for edit in theirs:
                plan.add(alias, edit)

    def _stored(self, name: str) -> str:
        tensor = self._base.tensor(name)
        place = self._base.place(name) if tensor is None else None
        if place is not None:
            return place[0].name
        return name if tensor is None else tensor.name

    # ---- embedding and head

    def _settle_ties(self) -> None:
        """Edits of tied names go to the one tensor, or the tie is given up."""
        for alias, kept in self._base.tied.items():
            stored = self._stored(kept)
            ours, theirs = self._of_alias.get(alias, []), self._edits.get(stored, [])
            if not ours and not theirs:
                continue
            if alias in _HEADS and self._task is MergeTask.CLASSIFICATION:
                if ours:
                    self._problems.refuse(f"{alias}: is trained, and a classifier has no such head")
                continue
            if ours and theirs and _are_equal(ours, theirs):
                continue
            is_whole = any(not isinstance(edit, LowRankEdit) for edit in [*ours, *theirs])
            if (ours and theirs) or is_whole or self._tied is TiedDelta.SEPARATE:
                self.separate.append(alias)
                continue
            self._edits[stored] = ours or theirs
            trained = alias if ours else stored
            self.notes.append(
                f"{alias} and {stored} are one tensor: what was trained of {trained} acts on both, "
                "as in peft's merge (--tied separate keeps them apart, as the adapter computed)"
            )

    def _settle_doubled(self) -> None:
        """A head that is stored beside the embedding is tied to it no more when either changes."""
        changed = {*self._edits, *self._copies}
        doubled = self._base.doubled.items()
        self.untied = [*self.separate]
        self.untied += [
            alias
            for alias, kept in doubled
            if alias not in self.dropped and not changed.isdisjoint((alias, kept))
        ]

    def _separated(self, alias: str) -> list[Group]:
        """The head as a tensor of its own."""
        kept = self._tensors[self._stored(self._base.tied[alias])]
        edits = self._of_alias.get(alias, [])
        if edits:
            return self._made(alias, kept, edits, self._copies.get(kept.name))
        copy = self._copies.get(kept.name, kept)
        return [cast_group(copy, self._dtype or kept.dtype, name=alias)]

    def _settle_heads(self) -> None:
        """A classifier has the head that was trained in place of the base's."""
        if self._task is MergeTask.CAUSAL_LM:
            for name in self._new:
                self._problems.refuse(
                    f"{name}: was trained whole, and a causal language model has no such tensor; "
                    "--task classification takes the head of a classifier"
                )
            return
        for name in _HEADS:
            if name in self._tensors:
                self.dropped[name] = "a classifier has no language head"
                self._edits.pop(name, None)
        heads = [tensor for name, tensor in self._new.items() if name.endswith(".weight")]
        if heads:
            self.labels = heads[0].shape[0]
        elif not any(n.rpartition(".")[0] in ("score", "classifier") for n in self._tensors):
            self._problems.refuse(
                "the adapters train no head (modules_to_save), and the base has none for a "
                "classifier; it would be random"
            )

    # ---- tensors

    def _groups_of(
        self, tensor: SourceTensor, sidecars: SidecarPlan, done: set[str]
    ) -> list[Group]:
        name = tensor.name
        if name in sidecars.tensors:
            if name in self._edits:
                self._problems.refuse(f"{name}: is trained by an adapter, and set by its sidecars")
            return [constant(name, sidecars.tensors[name], tensor)]
        edits = self._edits.get(name, [])
        copy = self._copies.get(name)
        if edits and any(isinstance(e, LowRankEdit) and e.part is not None for e in edits):
            return self._bank(name, done)
        if edits:
            return self._made(name, tensor, edits, copy)
        if name in sidecars.widen:
            return [cast_group(tensor, "F32")]
        if self._dtype is None or tensor.dtype not in FLOATS:
            return [passed(tensor)]
        is_narrower = tensor.dtype == "F32" and self._dtype != "F64"
        if is_narrower and stays_fp32(name, self._base.source.model_types) and "norm" not in name:
            return [passed(tensor)]
        return [cast_group(tensor, self._dtype)]

    def _bank(self, name: str, done: set[str]) -> list[Group]:
        """All experts of a bank together, since their factors are."""
        every = self._base.sibling_of(name) if self._banks is Banks.TOGETHER else (name,)
        names = [n for n in every if self._edits.get(n)]
        done.update(names)
        held = {n: self._tensors[n] for n in names}
        if not all(self._is_float(tensor) for tensor in held.values()):
            return []
        dtypes = {n: self._dtype or tensor.dtype for n, tensor in held.items()}
        return [edited_group(held, {n: self._edits[n] for n in names}, dtypes, self._differences)]

    def _made(
        self, name: str, tensor: SourceTensor, edits: Sequence[Edit], copy: SourceTensor | None
    ) -> list[Group]:
        if not self._is_float(tensor):
            return []
        start = copy or tensor
        dtype = self._dtype or tensor.dtype
        whole = edits[0].inputs["value"] if isinstance(edits[0], WholeEdit) else None
        if whole is not None and whole.shape != start.shape:
            return self._resized(name, tensor, edits, whole)
        if copy is not None:
            self._note_replaced(name, tensor, copy)
        return [edited_group({name: start}, {name: edits}, {name: dtype}, self._differences)]

    def _resized(
        self, name: str, tensor: SourceTensor, edits: Sequence[Edit], whole: SourceTensor
    ) -> list[Group]:
        is_alone = len(edits) == 1 and edits[0].weight == 1.0
        if not (is_by_token(name) and is_alone and whole.shape[1:] == tensor.shape[1:]):
            self._problems.refuse(
                f"{name}: shape {list(whole.shape)} in {whole.source.path}, {list(tensor.shape)} "
                "in the base; only an embedding that one adapter resized can have other rows"
            )
            return []
        self._note_replaced(name, tensor, whole)
        return [cast_group(whole, self._dtype or tensor.dtype, name=name)]

    def _note_replaced(self, name: str, tensor: SourceTensor, by: SourceTensor) -> None:
        if name == tensor.name:
            self.dropped[name] = "the adapter brings the one it was trained on"
        if by.shape != tensor.shape:
            self.replaced.append(name)
            self.resized_by = next(a for a in self._adapters if a.source is by.source)

    def _is_float(self, tensor: SourceTensor) -> bool:
        if tensor.dtype not in FLOATS:
            self._problems.refuse(
                f"{tensor.source.path}: {tensor.name} is {tensor.dtype}; an adapter cannot be "
                "folded into codes: dequantise the base first (milepost dequantize)"
            )
        return tensor.dtype in FLOATS

    def _dtype_of_base(self) -> str:
        """The float type of most of the base."""
        sizes = dict.fromkeys(FLOATS, 0)
        for tensor in self._tensors.values():
            if tensor.dtype in sizes:
                sizes[tensor.dtype] += tensor.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _check_vocabulary(self, groups: Sequence[Group]) -> None:
        """Embedding and head must have the same rows where an adapter resized one of them."""
        if self.resized_by is None:
            return
        rows = {
            spec.name: spec.shape[0]
            for group in groups
            for spec in group.outputs
            if is_by_token(spec.name)
        }
        if len(set(rows.values())) > 1:
            listed = ", ".join(f"{name} has {count} rows" for name, count in rows.items())
            self._problems.refuse(
                f"{self.resized_by.directory}: the vocabulary was resized, and {listed}; the "
                "adapter was saved without one of the two: save it with both "
                "(save_embedding_layers=True)"
            )
        self.vocabulary = next(iter(rows.values()), None)

    # ---- sidecars

    def _sidecar_plan(self) -> SidecarPlan:
        """What the sidecars beside the base ask for, and then those beside the adapters."""
        tensors: dict[str, torch.Tensor] = {}
        widen: set[str] = set()
        places: list[Path | None] = [None, *(adapter.directory for adapter in self._adapters)]
        for place in places:
            plan = self._problems.attempt(partial(sidecar_plan, self._base.source, place))
            if plan is None:
                continue
            tensors |= plan.tensors
            widen |= plan.widen
            self.config |= plan.config
            self.notes += [str(action) for action in plan.actions if str(action) not in self.notes]
            if place is not None:
                self.sidecars |= {name: place / name for name in plan.needs}
        return SidecarPlan(tensors=tensors, widen=frozenset(widen))


def _rows(edits: Sequence[Edit]) -> list[RowsEdit]:
    return [edit for edit in edits if isinstance(edit, RowsEdit)]


def _are_equal(first: Sequence[Edit], second: Sequence[Edit]) -> bool:
    """Whether both sides of a tie are changed in the same way, by the values."""
    if len(first) != len(second):
        return False
    return all(_is_same(one, other) for one, other in zip(first, second, strict=True))


def _is_same(one: Edit, other: Edit) -> bool:
    if type(one) is not type(other) or one.weight != other.weight:
        return False
    if isinstance(one, RowsEdit) and isinstance(other, RowsEdit) and one.indices != other.indices:
        return False
    values, others = (
        {key: tensor.read() for key, tensor in edit.inputs.items()} for edit in (one, other)
    )
    if isinstance(one, LowRankEdit) and isinstance(other, LowRankEdit):
        a, b = one.low_rank(values), other.low_rank(others)
        factors: Mapping[str, tuple[Any, Any]] = {
            "left": (a.left, b.left),
            "right": (a.right, b.right),
        }
        is_plain = a.magnitude is None and b.magnitude is None
        same = is_plain and a.scale == b.scale
        return same and all(torch.equal(*pair) for pair in factors.values())
    return values.keys() == others.keys() and all(
        torch.equal(values[key], others[key]) for key in values
    )
