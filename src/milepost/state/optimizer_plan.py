"""Restore of an optimizer: moments follow names, hyper-parameters follow groups.

State goes into `optimizer.state` directly, in its saved dtype: `Optimizer.load_state_dict` would
cast moments to the dtype of their parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from milepost.errors import DtypeMismatchError, FormatError
from milepost.state.declared import declaration, inherit
from milepost.state.mismatch import KEYS_REMEDY, ShapeDifference, raise_keys, raise_shapes
from milepost.state.names import FQN
from milepost.state.optimizer import Member, match_parameters, unwrap_optimizer
from milepost.state.optimizer_groups import GroupMatch, check_class, match_groups
from milepost.state.optimizer_merge import without_state
from milepost.state.optimizer_own import NO_OWN_STATES, OwnStates, own_state
from milepost.state.optimizer_parts import ReadWhole
from milepost.state.optimizer_record import (
    OptimizerRecord,
    ScalarTensor,
    SlotValue,
    split_tensor_name,
    tensor_name,
    values_by_parameter,
)
from milepost.state.optimizer_wrapped import WrappedStates, names_of_parts, plan_wrapped
from milepost.state.policies import BlockPolicy, ClassPolicy, Missing, ShapePolicy, Unexpected
from milepost.state.tensors import allocate, is_dtensor, local_of, stored_shape, torch_dtype

# How the update is computed, not what it computes: chosen by the live optimizer for its device.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What a restore did; the lists are empty when nothing of the kind happened.

    `asked` counts the parameters that have or may get a state, `found` those whose state the
    checkpoint holds, `filled` those that get it back, and `tensors` the stored tensors of that.
    `absent` names those that had none when saved and start fresh. `new_groups` labels live groups
    that no saved group fits, which keep their hyper-parameters. `reshaped` are parameters whose
    state was saved in another shape and starts fresh. `implementation` tells where the live
    optimizer computes another way than the saved one: same values, possibly other roundings.
    """

    asked: int
    found: int
    filled: int
    tensors: int
    missing: tuple[FQN, ...]
    unexpected: tuple[FQN, ...]
    absent: tuple[FQN, ...]
    new_groups: tuple[str, ...]
    implementation: tuple[str, ...]
    requantised: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    not_carried: tuple[FQN, ...] = ()
    reshaped: tuple[FQN, ...] = ()


@dataclass(slots=True, kw_only=True)
class OptimizerPlan:
    """A checked restore that has not touched the optimizer yet.

    Fill `targets()`, then call `apply()`.
    """

    optimizer: Optimizer
    record: OptimizerRecord
    members: dict[FQN, Member]
    infos: dict[FQN, dict[str, tuple[str, tuple[int, ...]]]]
    wrapped: WrappedStates
    own: Mapping[str, Mapping[str, Any]]
    groups: GroupMatch
    report: OptimizerReport
    _targets: dict[str, Tensor] | None = field(default=None)

    def targets(self) -> dict[str, Tensor]:
        """Tensor to fill for each stored name: the live one where it fits, else a new one.

        Made at the first call and the same ever after.
        """
        if self._targets is None:
            offloaded, odd = set(self.record.offloaded), set(self.record.odd_shaped)
            self._targets = {}
            for fqn, slots in self.infos.items():
                for slot, (dtype, shape) in slots.items():
                    name = tensor_name(fqn, slot)
                    param = self.members[fqn].param
                    live = self._live(param).get(slot)
                    held = inherit(live, param) if isinstance(live, Tensor) else None
                    if held is not None and _fits(held, dtype, shape, param, odd=name in odd):
                        self._targets[name] = held
                    elif name in odd:
                        device = torch.device("cpu") if name in offloaded else param.device
                        self._targets[name] = allocate(dtype, shape, device)
                    else:
                        self._targets[name] = _like(param, dtype, cpu=name in offloaded)
            for name in self.wrapped.params:
                fqn, slot = split_tensor_name(name)
                live = self._live(self.members[fqn].param).get(slot)
                self._targets.update(self.wrapped.targets(name, live))
        return self._targets

    def apply(self, read: ReadWhole | None = None) -> OptimizerReport:
        """Put the filled targets, the values and the hyper-parameters into the optimizer.

        `read` gives a whole stored tensor, for states that are quantised anew.
        """
        targets = self.targets()
        values = values_by_parameter(self.record)
        special = self._special(read)
        stateful = set(self.record.stateful())
        for fqn in (*self.report.absent, *self.report.reshaped):
            self.optimizer.state.pop(self.members[fqn].param, None)
        for fqn, member in self.members.items():
            if fqn not in stateful:
                continue
            live = self._live(member.param)
            entry: dict[str, Any] = {}
            for slot in self.infos.get(fqn, {}):
                target, old = targets[tensor_name(fqn, slot)], live.get(slot)
                same = isinstance(old, Tensor) and _is_alias(old, target)
                entry[slot] = old if same else target
            entry.update(special.get(fqn, {}))
            for slot, value in values.get(fqn, {}).items():
                if slot in entry:  # a tensor of its own, where others have a number
                    continue
                entry[slot] = self._materialise(fqn, slot, value, live.get(slot))
            self._replace(member.param, entry)
        self._apply_shared()
        self._apply_groups()
        return self.report

    def _special(self, read: ReadWhole | None) -> dict[FQN, dict[str, Tensor]]:
        """States that are not one stored tensor each: quantised ones, and those of each rank."""
        found: dict[FQN, dict[str, Tensor]] = {}
        for name in self.wrapped.params:
            fqn, slot = split_tensor_name(name)
            found.setdefault(fqn, {})[slot] = self.wrapped.result(name, read)
        for name, entry in self.own.items():
            fqn, slot = split_tensor_name(name)
            param = self.members[fqn].param.detach()
            found.setdefault(fqn, {})[slot] = own_state(entry, param, key=name)
        return found

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole tensors into the targets; for a single process, where no tensor is cut."""
        with torch.no_grad():
            for name, target in self.targets().items():
                target.copy_(tensors[name])

    def _live(self, param: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(param, {})
        return found

    def _replace(self, param: Tensor, entry: dict[str, Any]) -> None:
        live = self.optimizer.state[param]
        live.clear()
        live.update(entry)

    def _materialise(self, fqn: FQN, slot: str, value: SlotValue, live: object) -> Any:
        param = self.members[fqn].param
        if not isinstance(value, ScalarTensor):
            cpu = tensor_name(fqn, slot) in self.record.offloaded
            return _moved(value.value, torch.device("cpu") if cpu else param.device)
        group = self.optimizer.param_groups[self.members[fqn].group]
        dtype = torch_dtype(value.dtype)
        assert dtype is not None, f"the dtype {value.dtype} was not checked"
        if slot == "step" and group.get("fused"):
            dtype = torch.float32  # the fused kernels take no other
        if isinstance(live, Tensor) and live.ndim == 0 and live.dtype is dtype:
            with torch.no_grad():
                return live.fill_(value.value)
        return torch.tensor(value.value, dtype=dtype, device=self._device(fqn, value, group))

    def _device(self, fqn: FQN, value: ScalarTensor, group: Mapping[str, Any]) -> torch.device:
        """Scalars lie on the parameter's device where the live group's kernels read them there."""
        param = self.members[fqn].param
        if group.get("fused") or group.get("capturable"):
            return param.device
        saved = self.groups.saved_hyper(fqn)
        was_for_kernels = bool(saved.get("fused") or saved.get("capturable"))
        if value.device == "param" and not was_for_kernels:
            return param.device
        return torch.device("cpu")

    def _apply_shared(self) -> None:
        state: dict[Any, Any] = self.optimizer.state
        for key in [key for key in state if not isinstance(key, Tensor)]:
            del state[key]
        state.update(copy.deepcopy(self.record.shared))

    def _apply_groups(self) -> None:
        for index, saved in self.groups.source.items():
            live = self.optimizer.param_groups[index]
            for key, value in saved.hyper.items():
                if key not in IMPLEMENTATION:
                    live[key] = _hyper(live.get(key), value)


def plan_restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, FQN],
    record: OptimizerRecord,
    infos: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    key: str,
    missing: Missing = Missing.ERROR,
    unexpected: Unexpected = Unexpected.ERROR,
    classes: ClassPolicy = ClassPolicy.ERROR,
    blocks: BlockPolicy = BlockPolicy.ERROR,
    own: OwnStates = NO_OWN_STATES,
    shape: ShapePolicy = ShapePolicy.ERROR,
) -> OptimizerPlan:
    """Check that a saved state fits `optimizer`; `infos` has dtype and shape of each tensor.

    Missing are trainable live parameters that the saved optimizer did not have, unexpected are
    saved states without a live parameter. `own` is what this rank has kept by itself. With
    `ShapePolicy.SKIP` parameters whose state has another shape start fresh. Nothing is touched.
    """
    inner = unwrap_optimizer(optimizer)
    check_class(inner, record, key=key, classes=classes)
    members = match_parameters(inner, names, key=key)
    record, lost = own.drop_lost(record, key=key, missing=missing)
    groups = match_groups(inner, members, record, key=key)
    infos = {n: info for n, info in infos.items() if split_tensor_name(n)[0] not in lost}
    reshaped = tuple(_reshaped(record, infos, members)) if shape is ShapePolicy.SKIP else ()
    if reshaped:
        record = without_state(record, reshaped)
        infos = {n: info for n, info in infos.items() if split_tensor_name(n)[0] not in reshaped}
    wrapped = plan_wrapped(record, infos, members, key=key, blocks=blocks)
    kept = members.keys() - set(lost)
    entries = {n: entry for n, entry in own.entries.items() if split_tensor_name(n)[0] in kept}
    saved = {fqn for group in record.groups for fqn in group.params} | set(record.ungrouped)
    filled = {fqn for fqn in record.stateful() if fqn in members}
    found = filled | (members.keys() & {*reshaped, *lost})
    report = OptimizerReport(
        asked=len(found | {fqn for fqn, member in members.items() if member.param.requires_grad}),
        found=len(found),
        filled=len(filled),
        tensors=sum(split_tensor_name(name)[0] in filled for name in infos),
        missing=tuple(f for f, m in members.items() if m.param.requires_grad and f not in saved),
        unexpected=tuple(fqn for fqn in record.stateful() if fqn not in members),
        absent=tuple(f for f in record.stateless if f in members and f not in reshaped),
        new_groups=groups.new,
        implementation=_implementation(inner, groups),
        requantised=wrapped.anew,
        per_rank=tuple(entries),
        not_carried=tuple(fqn for fqn in lost if fqn in members),
        reshaped=reshaped,
    )
    _check_names(report, key, missing, unexpected)
    return OptimizerPlan(
        optimizer=inner,
        record=record,
        members=members,
        infos=_sort_infos(record, infos, members, key=key),
        wrapped=wrapped,
        own=entries,
        groups=groups,
        report=report,
    )


def _check_names(
    report: OptimizerReport, key: str, missing: Missing, unexpected: Unexpected
) -> None:
    lacking = report.missing and missing is Missing.ERROR
    surplus = report.unexpected and unexpected is Unexpected.ERROR
    if lacking or surplus:
        raise_keys(
            f"{key}, by parameter",
            missing=report.missing,
            unexpected=report.unexpected,
            remedy="give the optimizer the saved parameters, or " + KEYS_REMEDY,
        )


def _reshaped(
    record: OptimizerRecord,
    infos: Mapping[str, tuple[str, tuple[int, ...]]],
    members: Mapping[FQN, Member],
) -> dict[FQN, None]:
    """Live parameters with a stored tensor that should have their shape and has another."""
    odd, parts = set(record.odd_shaped), names_of_parts(record)
    return {
        fqn: None
        for name, (_, shape) in infos.items()
        if name not in odd
        and name not in parts
        and (fqn := split_tensor_name(name)[0]) in members
        and tuple(shape) != stored_shape(members[fqn].param)
    }


def _sort_infos(
    record: OptimizerRecord,
    infos: Mapping[str, tuple[str, tuple[int, ...]]],
    members: Mapping[FQN, Member],
    *,
    key: str,
) -> dict[FQN, dict[str, tuple[str, tuple[int, ...]]]]:
    """Stored tensors of live parameters by parameter and slot, their shapes and dtypes checked."""
    stateful, odd = set(record.stateful()), set(record.odd_shaped)
    parts = names_of_parts(record)
    found: dict[FQN, dict[str, tuple[str, tuple[int, ...]]]] = {}
    shapes: list[ShapeDifference] = []
    for name, (dtype, shape) in infos.items():
        fqn, slot = split_tensor_name(name)
        if name in parts:
            continue
        if fqn not in stateful:
            raise FormatError(
                f"{key}: the tensor {name} is stored, but no parameter {fqn} with state is recorded"
            )
        if torch_dtype(dtype) is None:
            raise DtypeMismatchError(f"{key}: {name} is stored as {dtype}, which torch has not")
        if fqn not in members:
            continue
        live = stored_shape(members[fqn].param)
        if name not in odd and tuple(shape) != live:
            shapes.append(ShapeDifference(name=name, stored=tuple(shape), live=live))
        found.setdefault(fqn, {})[slot] = (dtype, tuple(shape))
    if shapes:
        raise_shapes(
            "the optimizer",
            shapes,
            remedy="build the model with the saved sizes, or load with shape=ShapePolicy.SKIP, "
            "with which these moments start afresh, or with moments=Moments.FRESH",
        )
    return found


def _implementation(optimizer: Optimizer, groups: GroupMatch) -> tuple[str, ...]:
    lines = []
    for index, saved in groups.source.items():
        live = optimizer.param_groups[index]
        for key in IMPLEMENTATION:
            if key in saved.hyper and key in live and saved.hyper[key] != live[key]:
                lines.append(f"group {index}: {key} was {saved.hyper[key]}, is {live[key]}")
    return tuple(lines)


def _fits(live: Tensor, dtype: str, shape: tuple[int, ...], param: Tensor, *, odd: bool) -> bool:
    return (
        live.dtype is torch_dtype(dtype)
        and live.device.type != "meta"
        and stored_shape(live) == shape
        and (odd or is_dtensor(live) == is_dtensor(param))
    )


def _is_alias(live: Tensor, target: Tensor) -> bool:
    if is_dtensor(live) != is_dtensor(target) or live.dtype is not target.dtype:
        return False
    a, b = local_of(live), local_of(target)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.device == b.device


def _like(param: Tensor, dtype: str, *, cpu: bool) -> Tensor:
    found = torch_dtype(dtype)
    # The padding of a declared slice is in no checkpoint; its moments are zero.
    like = torch.empty_like if declaration(param) is None else torch.zeros_like
    if cpu and not is_dtensor(param):
        return inherit(like(param.detach(), dtype=found, device="cpu"), param)
    return inherit(like(param.detach(), dtype=found), param)


def _moved(value: Any, device: torch.device) -> Any:
    """A copy of a nested value whose tensors lie on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device) for part in value)
    return copy.deepcopy(value)


def _hyper(live: object, saved: Any) -> Any:
    """The saved hyper-parameter; a live tensor is kept and filled, as captured graphs read it."""
    with torch.no_grad():
        if isinstance(live, Tensor) and isinstance(saved, int | float):
            return live.fill_(saved)
        if isinstance(saved, Tensor):
            if isinstance(live, Tensor) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
                return live.copy_(saved)
            device = live.device if isinstance(live, Tensor) else saved.device
            return saved.detach().to(device, copy=True)
    return copy.deepcopy(saved)
