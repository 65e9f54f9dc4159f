"""What a plan of a merge looks up in an adapter and its base, with errors that say which it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from milepost.adapters.arithmetic import check_fits
from milepost.adapters.config import ExpertSettings, LoraSettings
from milepost.adapters.names import Role
from milepost.errors import InvalidInputError
from milepost.tools.merge_peft_adapter import OpenedAdapter
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.merge_peft_edits import Edit, LowRankEdit
from milepost.tools.rewrite.dtypes import torch_type
from milepost.tools.rewrite.source import SourceTensor

Roles: TypeAlias = Mapping[Role, str]
"""Names of an adapter's tensors by what they are to a module."""


@dataclass(slots=True, kw_only=True)
class AdapterPlan:
    """`edits` by the names that the base knows tensors by (aliases of tied ones too). `new` are
    tensors that the base lacks, `copies` those of its embeddings that the adapter brings along."""

    edits: dict[str, list[Edit]] = field(default_factory=dict)
    new: dict[str, SourceTensor] = field(default_factory=dict)
    copies: dict[str, SourceTensor] = field(default_factory=dict)

    def add(self, name: str, edit: Edit) -> None:
        self.edits.setdefault(name, []).append(edit)


class Lookups:
    """An adapter and its base. `own` are the names that the base has for those of the adapter."""

    def __init__(self, adapter: OpenedAdapter, base: BaseIndex, names: Mapping[str, str]) -> None:
        self.adapter, self.base, self.plan = adapter, base, AdapterPlan()
        self.own: Mapping[str, str] = {}
        self._names = names

    def inputs(self, module: str, roles: Roles, pair: tuple[Role, Role]) -> dict[str, SourceTensor]:
        """The pair of factors under `a` and `b`, and the `magnitude` where there is one."""
        missing = [role.value for role in pair if role not in roles]
        if missing:
            raise InvalidInputError(
                f"{self.adapter.directory}: {module}: has {', '.join(roles.values())}, and no "
                f"{', '.join(missing)}; the file is not whole"
            )
        known = {*pair, Role.MAGNITUDE, Role.B_BIAS}
        if not roles.keys() <= known:
            raise InvalidInputError(
                f"{self.adapter.directory}: {module}: does not know what to do with "
                f"{', '.join(roles.values())} together"
            )
        found = {"a": self.tensor(roles[pair[0]]), "b": self.tensor(roles[pair[1]])}
        if Role.MAGNITUDE in roles:
            found["magnitude"] = self.tensor(roles[Role.MAGNITUDE])
        return found

    def tensor(self, name: str) -> SourceTensor:
        """The stored tensor of a name."""
        return self.adapter.source.tensors[self._names[name]]

    def shape_of(self, own: str) -> tuple[int, ...]:
        """The shape of a tensor of the base, or of the copy that the adapter brings along."""
        copy = self.plan.copies.get(own)
        tensor = copy or self.base.tensor(own)
        if tensor is None:
            found = self.base.place(own)
            assert found is not None, own
            tensor = found[0]
        return tensor.shape

    def lora_settings(self) -> LoraSettings:
        """The settings of peft's factors."""
        lora = self.adapter.config.lora
        if lora is None:
            raise InvalidInputError(
                f"{self.adapter.where}: peft_type {self.adapter.config.peft_type} has factors of "
                "experts alone, and the file has others"
            )
        return lora

    def expert_settings(self, name: str) -> ExpertSettings:
        """The settings of factors of grouped experts."""
        settings = self.adapter.config.experts
        if settings is None:
            raise InvalidInputError(
                f"{self.adapter.where}: peft_type {self.adapter.config.peft_type} has no factors "
                f"of grouped experts, and the file has some of {name}"
            )
        return settings

    def check_rank(self, path: str, rank: int, lora: LoraSettings) -> None:
        """`InvalidInputError` when the configuration gives a path another rank."""
        if rank != lora.rank(path):
            raise InvalidInputError(
                f"{self.adapter.where}: the rank of {path} is {lora.rank(path)}, and its factors "
                f"have {rank}, so nobody can say how they are scaled; the configuration is that of "
                "another adapter"
            )

    def check(self, edit: LowRankEdit, shape: Sequence[int], name: str) -> None:
        """`InvalidInputError` when the factors do not fit a tensor of this shape."""
        empty = {
            key: torch.empty(t.shape, dtype=torch_type(t.dtype), device="meta")
            for key, t in edit.inputs.items()
        }
        low = edit.low_rank(empty)
        check_fits(low, shape, name=f"{self.adapter.directory}: {name}")
        magnitude = low.magnitude
        if magnitude is not None and magnitude.shape != (low.shape[low.magnitude_dim],):
            raise InvalidInputError(
                f"{self.adapter.directory}: {name}: a magnitude of {tuple(magnitude.shape)} for a "
                f"weight of {low.shape}"
            )
