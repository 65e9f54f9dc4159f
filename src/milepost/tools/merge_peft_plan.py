"""Which tensors of a base an adapter changes, and how: every tensor of it finds a use, or is named.

`plan_adapter` reads names and shapes alone. What does not fit becomes a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations

import torch

from milepost.adapters.arithmetic import (
    Layout,
    LowRank,
    convolution,
    embedding,
    grouped_experts,
    joined_experts,
    layout_of_experts,
    linear,
)
from milepost.adapters.config import LoraSettings
from milepost.adapters.names import BASE_SEGMENT, Role, by_module
from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import DOWN, EXPERT_NAMES, GATE_UP, UP
from milepost.tools.merge_peft_adapter import OpenedAdapter
from milepost.tools.merge_peft_base import Bank, BaseIndex
from milepost.tools.merge_peft_coverage import refuse_partial
from milepost.tools.merge_peft_edits import (
    BiasEdit,
    Factors,
    LowRankEdit,
    Region,
    RowsEdit,
    WholeEdit,
)
from milepost.tools.merge_peft_lookups import AdapterPlan, Lookups, Roles
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import SourceTensor

_LISTED = 6


def plan_adapter(adapter: OpenedAdapter, base: BaseIndex, problems: Problems) -> AdapterPlan:
    """What the adapter does to the base. Unknown tensors, factors without a counterpart or a place
    in the base, and an adapter of which a part is missing are refused with both sides named."""
    stored = _without_copies(adapter.source.tensors)
    planner = _Planner(adapter, base, stored)
    groups = by_module(stored)
    used = {name for roles in groups.values() for name in roles.values()}
    for name in sorted(stored.keys() - used):
        problems.refuse(f"{adapter.directory}: {name}: another tensor there says the same of it")
    own = base.resolve(dict.fromkeys(n for key in groups for n in planner.candidates(key)))
    planner.own = own
    lost: list[str] = []
    for (module, _, parameter), roles in groups.items():
        names = planner.candidates((module, 0, parameter))
        if not any(name in own for name in names) and not planner.is_new(module, roles):
            lost += roles.values()
    if lost:
        problems.refuse(_unmatched(adapter, base, lost))
    else:
        problems.attempt(partial(refuse_partial, adapter, base, groups, own))
    for module in dict.fromkeys(module for module, _, _ in groups):
        held = {key[1:]: roles for key, roles in groups.items() if key[0] == module}
        if not any(name in lost for roles in held.values() for name in roles.values()):
            problems.attempt(partial(planner.module, module, held))
    return planner.plan


_COPY = re.compile(r"\.(?P<of>modules_to_save(?:\.\w+)?|original_module)(?=\.\w+$)")


def _without_copies(names: Iterable[str]) -> dict[str, str]:
    """Plain names to stored ones. Of a module that was trained whole, peft can store the trained
    tensor under its plain name, a second time, and as it was before: the first of these counts."""
    found: dict[str, tuple[int, str]] = {}
    for name in names:
        match = _COPY.search(name)
        order = 0 if match is None else 2 if match["of"] == "original_module" else 1
        plain = _COPY.sub("", name)
        found[plain] = min(found.get(plain, (order, name)), (order, name))
    return {plain: name for plain, (_, name) in found.items()}


def _unmatched(adapter: OpenedAdapter, base: BaseIndex, lost: Sequence[str]) -> str:
    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return ", ".join(names[:_LISTED]) + more

    return (
        f"{adapter.directory}: {len(lost)} of its {len(adapter.source.tensors)} tensors find no "
        f"place in the base: {listed(lost)}; the base {base.source.path} has "
        f"{listed([n for n in base.source.tensors if n.endswith('weight')])}; nothing is merged "
        "in part: give the base that the adapter was trained on (--base-model)"
    )


class _Planner(Lookups):
    def __init__(self, adapter: OpenedAdapter, base: BaseIndex, names: Mapping[str, str]) -> None:
        super().__init__(adapter, base, names)
        saved = adapter.config.document.get("modules_to_save")
        self._saved = tuple(saved) if isinstance(saved, list | tuple) else ()

    def candidates(self, key: tuple[str, int, str]) -> list[str]:
        """Names of tensors that the factors of a module may belong to."""
        module, _, parameter = key
        if parameter:
            return [f"{module}.{parameter}"]
        return [f"{module}.weight", *(f"{module}.{bank}" for bank in (GATE_UP, UP, DOWN))]

    def is_new(self, module: str, roles: Roles) -> bool:
        """Whether it is a module that was trained whole, and that a base need not have."""
        leaves = {name.rpartition(".")[2] for name in self._saved}
        return roles.keys() == {Role.WHOLE} and module.rpartition(".")[2] in leaves

    def module(self, module: str, held: Mapping[tuple[int, str], Roles]) -> None:
        """All that the adapter has for one module, by depth and parameter."""
        for (_, parameter), roles in held.items():
            if Role.WHOLE in roles:
                self._whole(module, parameter, roles[Role.WHOLE])
            elif parameter:
                self._grouped(f"{module}.{parameter}", roles)
        factors: dict[int, Roles] = {
            depth: roles for (depth, parameter), roles in held.items() if not parameter
        }
        for depth in [d for d, roles in factors.items() if Role.TOKENS in roles]:
            self._rows(module, factors[depth][Role.TOKENS])
            rest: Roles = {r: n for r, n in factors.pop(depth).items() if r is not Role.TOKENS}
            if rest:
                factors[depth] = rest
        if not factors:
            return
        if f"{module}.weight" in self.own:
            for roles in factors.values():
                self._matrix(module, roles)
        else:
            self._banks(module, factors)

    # ---- tensors as they are

    def _whole(self, module: str, parameter: str, name: str) -> None:
        tensor = self.tensor(name)
        own = self.own.get(f"{module}.{parameter}")
        if own is None:
            self.plan.new[f"{module}.{parameter}"] = tensor
        elif f".{BASE_SEGMENT}." in name and parameter == "weight":
            self.plan.copies[own] = tensor
        else:
            weight = self.adapter.weight
            self.plan.add(
                own, WholeEdit(inputs={"value": tensor}, weight=weight, by_rows=("value",))
            )

    def _rows(self, module: str, name: str) -> None:
        lora = self.lora_settings()
        tensor = self.tensor(name)
        ends = [n for n in lora.tokens if f".{module}".endswith(f".{n}")]
        if not ends:
            raise InvalidInputError(
                f"{self.adapter.where}: trainable_token_indices says nothing of {module}, and "
                f"{name} holds trained rows of it"
            )
        indices = lora.tokens[ends[0]]
        own = self.own[f"{module}.weight"]
        rows = self.shape_of(own)[0]
        if len(indices) != tensor.shape[0] or max(indices, default=-1) >= rows:
            raise InvalidInputError(
                f"{self.adapter.directory}: {name}: {tensor.shape[0]} rows for {len(indices)} "
                f"tokens up to {max(indices, default=-1)}, and {own} has {rows} rows"
            )
        edit = RowsEdit(inputs={"value": tensor}, weight=self.adapter.weight, indices=indices)
        self.plan.add(own, edit)

    # ---- factors

    def _matrix(self, module: str, roles: Roles) -> None:
        """A linear layer, a convolution or an embedding."""
        lora = self.lora_settings()
        own = self.own[f"{module}.weight"]
        path = f"{module}.weight" if self._is_parameter(f"{module}.weight", lora) else module
        is_embedding = Role.EMBEDDING_A in roles
        if is_embedding:
            pair = (Role.EMBEDDING_A, Role.EMBEDDING_B)
        else:
            pair = (Role.A, Role.B)
        inputs = self.inputs(module, roles, pair)
        self.check_rank(path, inputs["a"].shape[0], lora)
        scale = lora.scaling(path)
        if lora.use_dora and "magnitude" not in inputs:
            raise InvalidInputError(
                f"{self.adapter.directory}: {module}: use_dora is set, and its magnitude "
                "(lora_magnitude_vector) is not there"
            )
        shape = self.shape_of(own)
        place = None
        found = self.base.place(own) if self.base.tensor(own) is None else None
        if found is not None:
            place = found[1]
            shape = (place[2] - place[1], shape[-1])
        edit = self._edit(inputs, scale, lora, shape, own, place, is_embedding=is_embedding)
        self.plan.add(own, edit)
        if Role.B_BIAS in roles:
            self._bias(module, roles[Role.B_BIAS], scale)

    def _edit(
        self,
        inputs: dict[str, SourceTensor],
        scale: float,
        lora: LoraSettings,
        shape: tuple[int, ...],
        own: str,
        place: Region | None,
        *,
        is_embedding: bool,
    ) -> LowRankEdit:
        is_conv = len(inputs["a"].shape) > 2
        layout = Layout.OUT_IN if is_conv or is_embedding else self._layout(inputs, shape, lora)

        def form(given: Factors) -> LowRank:
            if is_conv:
                return convolution(given["a"], given["b"], scale)
            magnitude = given.get("magnitude")
            if is_embedding:
                return embedding(given["a"], given["b"], scale, magnitude=magnitude)
            return linear(given["a"], given["b"], scale, layout=layout, magnitude=magnitude)

        if is_conv and "magnitude" in inputs:
            raise InvalidInputError(f"{own}: DoRA of a convolution cannot be folded in")
        goes_by_rows = layout is Layout.OUT_IN and not is_embedding and place is None
        by_rows = ("b", *(("magnitude",) if "magnitude" in inputs else ()))
        edit = LowRankEdit(
            inputs=inputs,
            weight=self.adapter.weight,
            by_rows=by_rows if goes_by_rows else None,
            form=form,
            place=place,
        )
        flat = (shape[0], torch.Size(shape[1:]).numel()) if is_conv else shape
        self.check(edit, flat, own)
        return edit

    def _layout(
        self, inputs: Mapping[str, SourceTensor], shape: Sequence[int], lora: LoraSettings
    ) -> Layout:
        """The flag is for the whole adapter; peft ignores it for layers that are no Conv1D."""
        outer, inner = inputs["b"].shape[0], inputs["a"].shape[1]
        if not lora.fan_in_fan_out:
            return Layout.OUT_IN
        is_plain = tuple(shape) == (outer, inner) and outer != inner
        return Layout.OUT_IN if is_plain else Layout.IN_OUT

    def _bias(self, module: str, name: str, scale: float) -> None:
        own = self.base.resolve([f"{module}.bias"]).get(f"{module}.bias")
        prefix = self.own[f"{module}.weight"].removesuffix("weight")
        if own is None and self.base.tensor(f"{prefix}bias") is not None:
            own = f"{prefix}bias"
        if own is None:
            raise InvalidInputError(
                f"{self.adapter.directory}: {name}: lora_bias needs a layer with a bias to fold "
                f"into, and the base has no {module}.bias"
            )
        inputs = {"value": self.tensor(name)}
        if inputs["value"].shape != self.shape_of(own):
            raise InvalidInputError(f"{name}: {inputs['value'].shape}, {own}: {self.shape_of(own)}")
        edit = BiasEdit(inputs=inputs, weight=self.adapter.weight, by_rows=("value",), scale=scale)
        self.plan.add(own, edit)

    # ---- experts

    def _banks(self, module: str, factors: Mapping[int, Roles]) -> None:
        """Nested factors of several banks of one module, the innermost that of the first bank."""
        lora = self.lora_settings()
        if lora.use_dora or any(Role.MAGNITUDE in roles for roles in factors.values()):
            raise InvalidInputError(
                f"{self.adapter.directory}: {module}: DoRA of grouped experts cannot be folded in"
            )
        inner_first = [factors[depth] for depth in sorted(factors, reverse=True)]
        inputs = [self.inputs(module, roles, (Role.A, Role.B)) for roles in inner_first]
        for names in self._orders(module, len(inputs), lora):
            fitting = list(self._bank_edits(names, inputs, lora))
            if len(fitting) == len(inputs):
                for bank, edit, shape in fitting:
                    self._add_bank(bank, edit, shape)
                return
        shapes = ", ".join(f"{list(i['a'].shape)} and {list(i['b'].shape)}" for i in inputs)
        raise InvalidInputError(
            f"{self.adapter.directory}: {module}: factors of shapes {shapes} fit no bank of the "
            "base"
        )

    def _orders(self, module: str, count: int, lora: LoraSettings) -> Iterator[tuple[str, ...]]:
        """Which banks factors may be of: as they are registered first, then by shape alone."""
        names = [f"{module}.{bank}" for bank in (GATE_UP, UP, DOWN)]
        held = [name for name in names if name in self.own]
        targeted = [name for name in held if self._is_parameter(name, lora)] or held
        yield from permutations(targeted, count)

    def _is_parameter(self, name: str, lora: LoraSettings) -> bool:
        return any(f".{name}".endswith(f".{target}") for target in lora.target_parameters)

    def _bank_edits(
        self, names: Sequence[str], inputs: Sequence[dict[str, SourceTensor]], lora: LoraSettings
    ) -> Iterator[tuple[Bank, LowRankEdit, str]]:
        for name, factors in zip(names, inputs, strict=True):
            bank = self.base.bank(self.own[name])
            if bank is None or factors["a"].shape[0] % bank.shape[0]:
                return
            inner, outer = factors["a"].shape[1], factors["b"].shape[0]
            if {inner, outer} != set(bank.shape[1:]):
                return
            rank = factors["a"].shape[0] // bank.shape[0]
            self.check_rank(name, rank, lora)
            layout = self._bank_layout(name, inner, outer, bank)
            experts, scale = bank.shape[0], lora.scaling(name)

            def form(
                given: Factors, experts: int = experts, scale: float = scale, lay: Layout = layout
            ) -> LowRank:
                return joined_experts(given["a"], given["b"], experts, scale, lay)

            edit = LowRankEdit(inputs=factors, weight=self.adapter.weight, form=form)
            self.check(edit, bank.shape, name)
            yield bank, edit, self.own[name]

    def _bank_layout(self, name: str, inner: int, outer: int, bank: Bank) -> Layout:
        """By the shape; where that is square, by how the family and peft have it."""
        if inner != outer:
            return layout_of_experts(inner, outer, bank.shape, name=name)
        kinds = self.base.source.model_types
        version = self.adapter.config.document.get("peft_version")
        is_known = self.adapter.config.experts is not None or _is_recent(version)
        if is_known and "gpt_oss" in kinds:
            return Layout.IN_OUT
        if is_known and any(kind in EXPERT_NAMES for kind in kinds):
            return Layout.OUT_IN
        return layout_of_experts(inner, outer, bank.shape, name=name)

    def _grouped(self, name: str, roles: Roles) -> None:
        """Factors of grouped experts, as expert-parallel runs save them."""
        settings = self.expert_settings(name)
        inputs = self.inputs(name, roles, (Role.EXPERTS_A, Role.EXPERTS_B))
        bank = self.base.bank(self.own[name])
        if bank is None:
            raise InvalidInputError(f"{self.adapter.directory}: {name}: the base has no such bank")
        if inputs["a"].shape[-1] != settings.r:
            raise InvalidInputError(
                f"{self.adapter.directory}: {name}: factors of rank {inputs['a'].shape[-1]}, and "
                f"adapter_config.json says {settings.r}"
            )
        layout = self._bank_layout(name, inputs["a"].shape[1], inputs["b"].shape[2], bank)
        scale = settings.scaling

        def form(given: Factors) -> LowRank:
            return grouped_experts(given["a"], given["b"], scale, layout)

        edit = LowRankEdit(inputs=inputs, weight=self.adapter.weight, form=form, by_rows=("a", "b"))
        self.check(edit, bank.shape, name)
        self._add_bank(bank, edit, self.own[name])

    def _add_bank(self, bank: Bank, edit: LowRankEdit, own: str) -> None:
        for stored, part in bank.parts.items():
            if part is None:
                self.plan.add(own, edit)
                continue
            made = LowRankEdit(inputs=edit.inputs, weight=edit.weight, form=edit.form, part=part)
            self.plan.add(stored, made)


def _is_recent(version: object) -> bool:
    """Whether a version of peft reads banks by their class; before 0.19 it took inputs first."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) >= (0, 19)
