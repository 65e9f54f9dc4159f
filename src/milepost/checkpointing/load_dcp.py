"""Phase 1 for a directory of torch's distributed checkpoint: weights, moments, other state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from milepost.checkpointing.agree import names_elsewhere
from milepost.checkpointing.capture import State, primary_key
from milepost.checkpointing.dcp_optimizer import DcpOptimizer, read_optimizer
from milepost.checkpointing.load_model import ModelLoad, copy_part, plan_model
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Moments
from milepost.checkpointing.report import Level
from milepost.engine.rendezvous import Conversation
from milepost.errors import KeyMismatchError
from milepost.geometry.placement import IndexSet
from milepost.layouts.dcp import DcpCheckpoint
from milepost.layouts.dcp_items import fill_from_chunks
from milepost.layouts.dcp_metadata import DcpTensor, Key
from milepost.state.model import parameter_names
from milepost.state.optimizer import inner_optimizers
from milepost.state.optimizer_merge import without
from milepost.state.optimizer_plan import OptimizerPlan, plan_restore_optimizer
from milepost.state.optimizer_record import split_tensor_name
from milepost.state.other import Kind, restore_stateful, restore_value
from milepost.state.placements import local_part
from milepost.state.policies import Missing


def plan_dcp(
    talk: Conversation,
    checkpoint: DcpCheckpoint,
    state: State,
    kinds: Mapping[str, Kind],
    policies: LoadPolicies,
    plan: LoadPlan,
    primary: str | None,
) -> None:
    """Check `state` against the directory and plan what fills it; collective."""
    wanted = _Wanted(talk, checkpoint, state, kinds, policies, plan, primary_key(kinds, primary))
    wanted.plan_models()
    if policies.moments is Moments.FRESH:
        wanted.leave_optimizers()
    else:
        wanted.plan_optimizers()
    wanted.plan_others()
    wanted.finish()


class _Wanted:
    """The comparison of a state with a DCP directory."""

    def __init__(
        self,
        talk: Conversation,
        checkpoint: DcpCheckpoint,
        state: State,
        kinds: Mapping[str, Kind],
        policies: LoadPolicies,
        plan: LoadPlan,
        primary: str | None,
    ) -> None:
        self.talk, self.checkpoint, self.state, self.kinds = talk, checkpoint, state, kinds
        self.policies, self.plan, self.report, self.primary = policies, plan, plan.report, primary
        self.asked: set[Key] = set()

    def plan_models(self) -> None:
        for key in self._of(Kind.MODEL):
            place = self._place(key, list(self.checkpoint.parts.models), key == self.primary)
            weights = self.checkpoint.parts.models[place]
            self.asked.add(place)
            stored = {name: _info(tensor) for name, tensor in weights.items()}
            load = plan_model(self.talk, key, self.state[key], stored, {}, self.policies)
            load.check_ties(partial(self._weight, weights))
            self.report.models[key] = load.restore.report
            self.report.notes += [] if load.note is None else [f"{key}: {load.note}"]
            self.plan.others.append(partial(self._fill_model, load, weights))

    def _weight(self, weights: Mapping[str, DcpTensor], name: str) -> torch.Tensor:
        return self.checkpoint.read_tensor(weights[name])

    def _fill_model(self, load: ModelLoad, weights: Mapping[str, DcpTensor]) -> None:
        load.restore.materialise()
        fills: list[tuple[DcpTensor, IndexSet, torch.Tensor]] = []
        for fill in load.fills():
            tensor = weights[fill.name]
            if fill.grid in (None, tensor.shape):
                fills.append((tensor, fill.held, fill.target))
            else:
                copy_part(fill, self.checkpoint.read_tensor(tensor))
        fill_from_chunks(self.checkpoint.items, fills)
        load.restore.finish()

    def leave_optimizers(self) -> None:
        for key in self._of(Kind.OPTIMIZER):
            for sub, optimizer in inner_optimizers(self.state[key]).items():
                place = f"{key}.{sub}" if sub else key
                self.plan.fresh[place] = optimizer
                self.report.fresh_moments[place] = self.policies.fresh_because

    def plan_optimizers(self) -> None:
        roots = list(self.checkpoint.parts.optimizers)
        models = {key: self.state[key] for key in self._of(Kind.MODEL)}
        names = parameter_names(models, primary=self.primary)
        keys = self._of(Kind.OPTIMIZER)
        for key in keys:
            for sub, optimizer in inner_optimizers(self.state[key]).items():
                own = f"{key}.{sub}" if sub else key
                root = self._place(own, roots, only=len(keys) == 1 and not sub)
                self.asked.add(root)
                self._plan_optimizer(own, optimizer, root, names)

    def _plan_optimizer(
        self, key: str, optimizer: torch.optim.Optimizer, root: Key, names: Mapping[int, str]
    ) -> None:
        live = [
            [names[id(param)] for param in group["params"] if id(param) in names]
            for group in optimizer.param_groups
        ]
        found = read_optimizer(
            self.checkpoint.parts.optimizers[root],
            self.checkpoint.metadata.tensors,
            self.checkpoint.value,
            live,
            where=f"{self.checkpoint.path}: {'.'.join(map(str, root)) or key}",
        )
        own = [name for group in live for name in group]
        saved = [fqn for group in found.record.groups for fqn in group.params]
        elsewhere = names_elsewhere(self.talk, key, own, saved)
        planned = plan_restore_optimizer(
            optimizer,
            names,
            without(found.record, elsewhere),
            {
                name: _info(tensor)
                for name, tensor in found.tensors.items()
                if split_tensor_name(name)[0] not in elsewhere
            },
            key=key,
            missing=self.policies.missing,
            unexpected=self.policies.unexpected,
            classes=self.policies.optimizer_class,
            blocks=self.policies.blocks,
        )
        self.report.optimizers[key] = planned.report
        self.plan.others.append(partial(self._fill_optimizer, planned, found))

    def _fill_optimizer(self, planned: OptimizerPlan, found: DcpOptimizer) -> None:
        fills = []
        for name, target in planned.targets().items():
            held, local = local_part(target)
            fills.append((found.tensors[name], held, local))
        fill_from_chunks(self.checkpoint.items, fills)
        planned.apply()

    def plan_others(self) -> None:
        for key in (*self._of(Kind.STATEFUL), *self._of(Kind.VALUE)):
            entries = self._below(key)
            if not entries:
                if self.policies.missing is Missing.ERROR:
                    raise KeyMismatchError(
                        f"{self.checkpoint.path}: holds no {key}; it holds {self._content()}; "
                        "leave it out of the state, or load with missing=Missing.KEEP",
                        missing=[key],
                    )
                self.report.kept.append(key)
                continue
            value = self.checkpoint.tree(entries)
            live = self.state[key]
            restore: Callable[[Any, Any], Any] = (
                restore_stateful if self.kinds[key] is Kind.STATEFUL else restore_value
            )
            self.plan.others.append(partial(restore, live, value))

    def _below(self, key: str) -> dict[Key, str]:
        """Entries of the container called `key`, by place inside it."""
        return {
            place[place.index(key) + 1 :]: name
            for place, name in self.checkpoint.parts.others.items()
            if key in place[:-1]
        }

    def finish(self) -> None:
        report, parts = self.report, self.checkpoint.parts
        left = [*parts.models, *parts.optimizers]
        report.not_loaded = [_text(place) for place in left if place not in self.asked]
        if all(kind is Kind.MODEL for kind in self.kinds.values()):
            report.level = Level.WEIGHTS_ONLY
            return
        report.differences.append("a DCP directory records neither its topology nor random state")
        lacking = [m.missing or m.unexpected for m in report.models.values()]
        lacking += [o.missing or o.unexpected for o in report.optimizers.values()]
        whole = bool(report.optimizers) and not any(lacking) and not report.kept
        report.level = Level.RESHARDED if whole else Level.WARM_RESTART

    def _of(self, kind: Kind) -> list[str]:
        return [key for key, own in self.kinds.items() if own is kind]

    def _place(self, key: str, places: list[Key], only: bool) -> Key:
        """The container for a key: the one of its name, or the first for the only one asked for."""
        named = [place for place in places if place and place[-1] == key]
        if named:
            return named[0]
        if only and places:
            return places[0]
        raise KeyMismatchError(
            f"{self.checkpoint.path}: holds no {key}; it holds {self._content()}", missing=[key]
        )

    def _content(self) -> str:
        parts = self.checkpoint.parts
        places = [*parts.models, *parts.optimizers, *{place[:1] for place in parts.others}]
        return ", ".join(sorted({_text(place) for place in places})) or "nothing"


def _text(place: Key) -> str:
    return ".".join(map(str, place)) or "tensors at the top"


def _info(tensor: DcpTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype_name, tensor.header_shape(tensor.shape)
