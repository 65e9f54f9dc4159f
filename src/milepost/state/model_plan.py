"""Restore of a model: everything is checked first, then live tensors are filled in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from milepost.errors import MismatchError
from milepost.state.leaves import Leaves, asks_its_own_way, collect_leaves, is_torch_hook
from milepost.state.materialise import Materialisation, plan_materialisation
from milepost.state.mismatch import (
    KEYS_REMEDY,
    DtypeDifference,
    PartDifferences,
    ShapeDifference,
    first_few,
    raise_dtypes,
    raise_keys,
    raise_shapes,
)
from milepost.state.names import FQN, Model, places
from milepost.state.policies import DtypePolicy, Missing, ShapePolicy, Unexpected
from milepost.state.tensors import same_bits, stored_dtype, stored_shape
from milepost.state.ties import tied_groups

StoredInfo: TypeAlias = tuple[str, tuple[int, ...]]  # safetensors dtype word, global shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What a restore did; every list is empty when nothing of the kind happened.

    `asked` counts the live tensors, tied ones once, `found` those that the checkpoint holds, and
    `filled` those that get its values. `untied` pairs a live name with the stored name it shares
    with another live tensor that is separate now. `rebuilt` names buffers that no checkpoint holds
    and that the model's own init computed anew.
    """

    asked: int
    found: int
    filled: int
    missing: tuple[FQN, ...]
    unexpected: tuple[FQN, ...]
    cast: tuple[DtypeDifference, ...]
    skipped: tuple[ShapeDifference, ...]
    untied: tuple[tuple[FQN, FQN], ...]
    rebuilt: tuple[FQN, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A checked restore that has not touched the model yet.

    `targets` maps a stored name to the live tensors that take its values, in place. `must_equal`
    pairs stored names whose bytes must agree, since the live model ties them; only the first is
    in `targets`. `materialise` comes first: until then targets on the meta device have no memory.
    After the targets are filled, `finish` gives back what is no weight.
    """

    model: Model
    leaves: Leaves
    targets: dict[FQN, list[Tensor]]
    must_equal: tuple[tuple[FQN, FQN], ...]
    report: ModelReport
    memory: Materialisation
    extra: dict[FQN, Any] = field(default_factory=dict)

    def materialise(self) -> None:
        """Give what is on the meta device memory, and buffers in no checkpoint their values."""
        self.memory.run()

    def check_ties(self, equal: Callable[[FQN, FQN], bool]) -> None:
        """Refuse when `equal` says no to a pair of stored names that the live model ties."""
        differing = [pair for pair in self.must_equal if not equal(*pair)]
        if differing:
            pairs = first_few([f"{a} and {b}" for a, b in differing])
            raise MismatchError(
                f"the model ties {pairs}, but the checkpoint holds different values for them; "
                f"untie them in the model (tie_word_embeddings=False) or load another checkpoint"
            )

    def fill(self, tensors: Mapping[FQN, Tensor]) -> None:
        """Copy whole tensors into the targets; for a single process, where no tensor is cut."""
        self.materialise()
        with torch.no_grad():
            for name, live in self.targets.items():
                value = tensors[name]
                for target in live:
                    target.copy_(value)

    def finish(self) -> None:
        """Give modules their extra state and run their load hooks; the targets are filled."""
        pending: dict[nn.Module, set[FQN]] = {}
        for name in {*self.extra, *self.leaves.indirect} & set(self.leaves.sinks):
            pending.setdefault(self.leaves.sinks[name].module, set()).add(name)
        for module, names in pending.items():
            self._give_back(module, names)
        for place in places(self.model):
            _run_load_hooks(place.module)

    def _give_back(self, module: nn.Module, names: set[FQN]) -> None:
        if not asks_its_own_way(module):
            (name,) = names
            module.set_extra_state(self.extra[name])
            return
        keys = {name: s.key for name, s in self.leaves.sinks.items() if s.module is module}
        entries = {
            key: self.extra[name] if name in self.extra else self.leaves.tensors[name]
            for name, key in keys.items()
            if name in self.extra or name in self.leaves.tensors
        }
        module.load_state_dict(entries, strict=False)


def plan_restore_model(
    model: Model,
    stored: Mapping[FQN, StoredInfo],
    ties: Mapping[FQN, FQN],
    *,
    extra: Mapping[FQN, Any] | None = None,
    missing: Missing = Missing.ERROR,
    unexpected: Unexpected = Unexpected.ERROR,
    dtype: DtypePolicy = DtypePolicy.ERROR,
    shape: ShapePolicy = ShapePolicy.ERROR,
    device: torch.device | str | None = None,
    parts: PartDifferences | None = None,
    leaves: Leaves | None = None,
) -> RestorePlan:
    """Check that `stored` fits `model`, and say what goes where; `ties` is alias to stored name.

    Names, shapes and dtypes are compared under the policies; each kind of difference is raised
    once, with all of its names. `parts` are differences that were found before, in tensors that
    lie on disk in parts: `stored` has these whole. `leaves` are those of the model that count, by
    default all. The model is not touched. Tensors on the meta
    device will get memory on `device` (see `plan_materialisation`), and are refused when nothing
    gives them values.
    """
    parts = parts or PartDifferences()
    planner = _Planner(leaves or collect_leaves(model), stored, ties, extra or {}, parts)
    planner.match_names()
    lacking, surplus = planner.missing(), planner.unexpected()
    if (lacking and missing is Missing.ERROR) or (surplus and unexpected is Unexpected.ERROR):
        raise_keys(
            "the model",
            missing=lacking,
            unexpected=surplus,
            remedy="; ".join(filter(None, [parts.hint, "rename the modules, or " + KEYS_REMEDY])),
        )
    planner.compare(dtype, shape)
    return planner.plan(model, lacking, surplus, device)


def restore_model(
    model: Model,
    tensors: Mapping[FQN, Tensor],
    *,
    ties: Mapping[FQN, FQN] | None = None,
    extra: Mapping[FQN, Any] | None = None,
    missing: Missing = Missing.ERROR,
    unexpected: Unexpected = Unexpected.ERROR,
    dtype: DtypePolicy = DtypePolicy.ERROR,
    shape: ShapePolicy = ShapePolicy.ERROR,
) -> ModelReport:
    """Fill `model` in place from whole tensors, all checks first; for a single process."""
    plan = plan_restore_model(
        model,
        {name: (stored_dtype(t), stored_shape(t)) for name, t in tensors.items()},
        ties or {},
        extra=extra,
        missing=missing,
        unexpected=unexpected,
        dtype=dtype,
        shape=shape,
    )
    plan.check_ties(lambda a, b: same_bits(tensors[a], tensors[b]))
    plan.fill(tensors)
    plan.finish()
    return plan.report


class _Planner:
    """The comparison of one model with one stored set of names."""

    def __init__(
        self,
        leaves: Leaves,
        stored: Mapping[FQN, StoredInfo],
        ties: Mapping[FQN, FQN],
        extra: Mapping[FQN, Any],
        parts: PartDifferences,
    ) -> None:
        self.leaves, self.stored, self.ties, self.extra = leaves, stored, ties, extra
        self.parts = parts
        self.source: dict[FQN, FQN] = {}  # live name to stored name
        self.asked = 0  # live tensors, tied ones counted once
        self.covered: set[FQN] = set()  # live names filled through the name they are tied to
        self.must_equal: list[tuple[FQN, FQN]] = []
        self.shapes: list[ShapeDifference] = []  # of whole tensors, by live name
        self.dtypes: list[DtypeDifference] = []

    def match_names(self) -> None:
        for name in self.leaves.tensors:
            if name in self.stored:
                self.source[name] = name
            elif self.ties.get(name) in self.stored:
                self.source[name] = self.ties[name]
        groups = tied_groups(self.leaves.tensors)
        self.asked = len(self.leaves.tensors) - sum(len(group) - 1 for group in groups)
        for group in groups:
            self._match_tied(group)

    def _match_tied(self, group: Sequence[FQN]) -> None:
        """One memory region is filled once, from the first of its names that is stored."""
        known = [name for name in group if name in self.source]
        if not known:
            return
        first = self.source[known[0]]
        others = dict.fromkeys(self.source[name] for name in known[1:])
        self.must_equal.extend((first, other) for other in others if other != first)
        self.covered.update(name for name in group if name != known[0])

    def missing(self) -> list[FQN]:
        found = self.covered | self.source.keys()
        tensors = self.parts.spell(name for name in self.leaves.tensors if name not in found)
        extra = [name for name in self.leaves.extra if name not in self.extra]
        return [*tensors, *self.parts.missing, *extra]

    def unexpected(self) -> list[FQN]:
        wanted = set(self.source.values()) | set(self.leaves.tensors)
        tensors = [name for name in (*self.stored, *self.ties) if name not in wanted]
        extra = [name for name in self.extra if name not in self.leaves.extra]
        return [*tensors, *self.parts.unexpected, *extra]

    def compare(self, dtype_policy: DtypePolicy, shape_policy: ShapePolicy) -> None:
        self._find_differences()
        shapes, dtypes = [*self.shapes, *self.parts.shapes], [*self.dtypes, *self.parts.dtypes]
        if shapes and shape_policy is ShapePolicy.ERROR:
            raise_shapes(
                "the model",
                shapes,
                remedy="build the model with the saved sizes, or load with shape=ShapePolicy.SKIP",
            )
        if dtypes and dtype_policy is DtypePolicy.ERROR:
            raise_dtypes(
                "the model",
                dtypes,
                remedy="build the model in the saved dtype, or load with dtype=DtypePolicy.CAST",
            )

    def _find_differences(self) -> None:
        for name, source in self.source.items():
            live = self.leaves.tensors[name]
            dtype, shape = self.stored[source]
            if tuple(shape) != stored_shape(live):
                self.shapes.append(
                    ShapeDifference(name=name, stored=tuple(shape), live=stored_shape(live))
                )
            elif dtype != stored_dtype(live):
                self.dtypes.append(
                    DtypeDifference(name=name, stored=dtype, live=stored_dtype(live))
                )

    def plan(
        self,
        model: Model,
        lacking: Sequence[FQN],
        surplus: Sequence[FQN],
        device: torch.device | str | None,
    ) -> RestorePlan:
        skipped = {difference.name for difference in self.shapes}
        whole = self._filled(skipped | self.parts.incomplete)
        memory = plan_materialisation(model, whole, device=device)
        for name in self.leaves.indirect & set(self.source) - skipped:
            self.leaves.tensors[name] = torch.empty_like(self.leaves.tensors[name])
        targets: dict[FQN, list[Tensor]] = {}
        for name, source in self.source.items():
            if name not in self.covered and name not in skipped:
                targets.setdefault(source, []).append(self.leaves.tensors[name])
        report = ModelReport(
            asked=self.asked,
            found=len(self.source.keys() - self.covered),
            filled=sum(len(live) for live in targets.values()),
            missing=tuple(lacking),
            unexpected=tuple(surplus),
            cast=(*self.dtypes, *self.parts.dtypes),
            skipped=(*self.shapes, *self.parts.shapes),
            untied=self._untied(targets),
            rebuilt=memory.rebuilt,
        )
        return RestorePlan(
            model=model,
            leaves=self.leaves,
            targets=targets,
            must_equal=tuple(pair for pair in self.must_equal if pair[0] in targets),
            report=report,
            memory=memory,
            extra={name: v for name, v in self.extra.items() if name in self.leaves.extra},
        )

    def _filled(self, skipped: set[FQN]) -> set[int]:
        """The `id` of every live tensor that gets its values from the checkpoint."""
        return {id(self.leaves.tensors[name]) for name in self.source if name not in skipped}

    def _untied(self, targets: Mapping[FQN, list[Tensor]]) -> tuple[tuple[FQN, FQN], ...]:
        return tuple(
            (name, source)
            for name, source in self.source.items()
            if name != source and name not in self.covered and len(targets.get(source, ())) > 1
        )


def _run_load_hooks(module: nn.Module) -> None:
    """What `load_state_dict` runs after loading: modules rebuild what they derive from weights."""
    incompatible = torch.nn.modules.module._IncompatibleKeys([], [])
    for hook in module._load_state_dict_post_hooks.values():
        if not is_torch_hook(hook):
            hook(module, incompatible)
