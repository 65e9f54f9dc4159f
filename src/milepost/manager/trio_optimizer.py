"""An optimizer's own state dict, positional as torch gives it, read by parameter names."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from milepost.errors import FormatError, InvalidInputError, MismatchError
from milepost.state.model import parameter_names
from milepost.state.names import FQN
from milepost.state.optimizer import (
    NOT_HYPER,
    SCALAR_DTYPES,
    class_name,
    group_name,
    match_parameters,
    unwrap_optimizer,
)
from milepost.state.optimizer_plan import OptimizerPlan, plan_restore_optimizer
from milepost.state.optimizer_record import (
    Group,
    OptimizerRecord,
    Plain,
    ScalarTensor,
    SlotValue,
    SlotValues,
    split_tensor_name,
    tensor_name,
)
from milepost.state.tensors import stored_dtype, stored_shape

logger = logging.getLogger(__name__)


def names_by_group(model: nn.Module, optimizer: Any) -> list[list[FQN]] | None:
    """The name of each parameter, in the order in which `optimizer.state_dict()` numbers them.

    None when the optimizer trains something that is not in `model`; its state is then read back by
    position.
    """
    names = parameter_names({"model": model}, primary="model")
    try:
        members = match_parameters(unwrap_optimizer(optimizer), names, key="optimizer")
    except InvalidInputError as error:
        logger.info("optimizer state is saved without names: %s", error)
        return None
    groups: list[list[FQN]] = [[] for _ in unwrap_optimizer(optimizer).param_groups]
    for fqn, member in members.items():
        groups[member.group].append(fqn)
    return groups


def optimizer_class(optimizer: Any) -> str:
    """The qualified name of the class inside any wrapper."""
    return class_name(unwrap_optimizer(optimizer))


def is_plain_state(state: Any) -> bool:
    """Whether a state dict is torch's own: `state` by number and `param_groups`."""
    return isinstance(state, Mapping) and set(state) == {"state", "param_groups"}


def plan_optimizer(
    optimizer: Any,
    model: nn.Module,
    state: Mapping[str, Any],
    saved_names: Any,
    saved_class: str | None,
    shapes: Mapping[FQN, tuple[int, ...]],
    *,
    where: str,
) -> tuple[OptimizerPlan, dict[str, Tensor]]:
    """Check that a saved state dict fits, and the tensors to fill the plan with.

    With `saved_names` moments follow names; without, the saved groups must be as long as the live
    ones. `shapes` are those of the saved parameters.
    """
    inner = unwrap_optimizer(optimizer)
    names = parameter_names({"model": model}, primary="model")
    groups = _checked_names(saved_names, state, where=where)
    if groups is None:
        groups = _positional(inner, names, state)
    record, tensors = _Reader(state, groups, shapes, saved_class, where=where).read()
    plan = plan_restore_optimizer(
        inner,
        names,
        record,
        {name: (stored_dtype(t), stored_shape(t)) for name, t in tensors.items()},
        key="optimizer",
    )
    return plan, tensors


def _checked_names(
    saved_names: Any, state: Mapping[str, Any], *, where: str
) -> list[list[FQN]] | None:
    if saved_names is None:
        return None
    lengths = [len(group["params"]) for group in state["param_groups"]]
    if not isinstance(saved_names, list) or [len(group) for group in saved_names] != lengths:
        raise FormatError(f"{where}: the names of the optimizer's parameters do not fit its groups")
    return [[str(name) for name in group] for group in saved_names]


def _positional(
    optimizer: Optimizer, names: Mapping[int, FQN], state: Mapping[str, Any]
) -> list[list[FQN]]:
    """Names of the live parameters, for a state that has none: as many groups, as many in each."""
    members = match_parameters(optimizer, names, key="optimizer")
    live: list[list[FQN]] = [[] for _ in optimizer.param_groups]
    for fqn, member in members.items():
        live[member.group].append(fqn)
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group) for group in live]:
        raise MismatchError(
            f"optimizer: the checkpoint holds {len(saved)} groups of {saved} parameters without "
            f"names, the live optimizer has {len(live)} of {[len(group) for group in live]}; make "
            "the groups that were saved, or load without the optimizer"
        )
    return live


class _Reader:
    """A positional state dict on its way to a record and tensors by name."""

    def __init__(
        self,
        state: Mapping[str, Any],
        groups: Sequence[Sequence[FQN]],
        shapes: Mapping[FQN, tuple[int, ...]],
        saved_class: str | None,
        *,
        where: str,
    ) -> None:
        self.state, self.groups, self.shapes = state, groups, shapes
        self.saved_class, self.where = saved_class, where
        self.tensors: dict[str, Tensor] = {}
        self.odd_shaped: list[str] = []
        self.values: dict[str, dict[FQN, SlotValue]] = {}
        self.seen: set[FQN] = set()

    def read(self) -> tuple[OptimizerRecord, dict[str, Tensor]]:
        by_number = {
            number: name
            for group, names in zip(self.state["param_groups"], self.groups, strict=True)
            for number, name in zip(group["params"], names, strict=True)
        }
        shared = {}
        for number, slots in self.state["state"].items():
            if number in by_number:
                self._take(by_number[number], slots)
            elif isinstance(number, str):
                shared[number] = slots
            else:
                raise FormatError(
                    f"{self.where}: optimizer state of parameter {number}, which is in no group"
                )
        self._keep_moments_together()
        groups = tuple(
            Group(
                name=group_name(group),
                params=tuple(names),
                hyper={key: value for key, value in group.items() if key not in NOT_HYPER},
            )
            for group, names in zip(self.state["param_groups"], self.groups, strict=True)
        )
        record = OptimizerRecord(
            class_name=self.saved_class,
            groups=groups,
            slots={slot: self._slot(values) for slot, values in self.values.items()},
            stateless=tuple(n for names in self.groups for n in names if n not in self.seen),
            odd_shaped=tuple(self.odd_shaped),
            shared=shared,
        )
        return record, self.tensors

    def _take(self, fqn: FQN, slots: Mapping[str, Any]) -> None:
        self.seen.add(fqn)
        for slot, value in slots.items():
            if not isinstance(value, Tensor):
                self.values.setdefault(slot, {})[fqn] = Plain(value=value)
            elif value.ndim == 0 and value.dtype in SCALAR_DTYPES and not _is_nan(value):
                scalar = ScalarTensor(
                    dtype=str(value.dtype).removeprefix("torch."), value=value.item(), device="cpu"
                )
                self.values.setdefault(slot, {})[fqn] = scalar
            else:
                self._take_tensor(fqn, slot, value)

    def _take_tensor(self, fqn: FQN, slot: str, value: Tensor) -> None:
        name = tensor_name(fqn, slot)
        self.tensors[name] = value
        if tuple(value.shape) != self.shapes.get(fqn, tuple(value.shape)):
            self.odd_shaped.append(name)

    def _keep_moments_together(self) -> None:
        """The moment of a 0-d parameter is a tensor like those of the other parameters."""
        tensor_slots = {split_tensor_name(name)[1] for name in self.tensors}
        for slot in tensor_slots & set(self.values):
            for fqn, value in list(self.values[slot].items()):
                if isinstance(value, ScalarTensor) and self.shapes.get(fqn) == ():
                    number = next(n for n, name in self._numbers() if name == fqn)
                    self._take_tensor(fqn, slot, self.state["state"][number][slot])
                    del self.values[slot][fqn]

    def _numbers(self) -> list[tuple[int, FQN]]:
        return [
            pair
            for group, names in zip(self.state["param_groups"], self.groups, strict=True)
            for pair in zip(group["params"], names, strict=True)
        ]

    def _slot(self, values: Mapping[FQN, SlotValue]) -> SlotValues:
        return SlotValues(
            exceptions=dict(values), absent=tuple(fqn for fqn in self.seen if fqn not in values)
        )


def _is_nan(value: Tensor) -> bool:
    return value.is_floating_point() and math.isnan(value.item())
