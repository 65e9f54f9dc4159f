"""Capture of an optimizer: its state as it is, keyed by parameter name.

Nothing is initialised by looking: `optimizer.state` is read directly. Parameters are matched by
identity, so neither their order nor the order of groups matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from milepost.errors import InvalidInputError, UnencodableError
from milepost.state.declared import declaration, inherit
from milepost.state.mismatch import first_few
from milepost.state.names import FQN
from milepost.state.optimizer_parts import is_cut, take_apart
from milepost.state.optimizer_record import (
    Form,
    Group,
    OptimizerRecord,
    Plain,
    ScalarTensor,
    SlotValue,
    SlotValues,
    tensor_name,
)
from milepost.state.tensors import is_dtensor, local_of, refuse_unstorable
from milepost.state.wrappers import is_wrapper

NOT_HYPER = ("params", "param_names", "name")

# 0-d tensors of these types survive the way through a Python number and a JSON document.
SCALAR_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What a save needs of an optimizer.

    `tensors` maps `tensor_name(fqn, slot)`, or the names of a quantised tensor's parts, to what is
    stored, by reference; `record` is all the rest, whose nested containers are references too.
    `values` has the live object and its parameter for each state tensor; `unplaced` names those
    that are plain beside a parameter that is cut, `empty` those of which this rank has no element.
    """

    record: OptimizerRecord
    tensors: dict[str, Tensor]
    values: dict[str, Value]
    unplaced: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


class Value(NamedTuple):
    """A live state tensor and the parameter that it belongs to."""

    tensor: Tensor
    param: Tensor


class Member(NamedTuple):
    """A parameter of an optimizer: its tensor and the index of its group."""

    param: Tensor
    group: int


def inner_optimizers(obj: object) -> dict[str, Optimizer]:
    """The torch optimizers inside `obj`, by a short key; empty when `obj` is no optimizer.

    An optimizer that wraps one (`.optimizer`, as accelerate has it) gives the wrapped one under
    the key "". A list, or a container with `.optimizers`, gives one entry each.
    """
    if isinstance(obj, Optimizer):
        wrapped = getattr(obj, "optimizer", None)
        several = getattr(obj, "optimizers", None)
        if isinstance(wrapped, Optimizer):
            return inner_optimizers(wrapped)
        return inner_optimizers(several) or {"": obj}
    if isinstance(obj, list | tuple):
        items: Iterable[tuple[str, object]] = ((str(i), part) for i, part in enumerate(obj))
    elif isinstance(obj, dict):
        items = ((str(key), part) for key, part in obj.items())
    elif hasattr(obj, "optimizers") and hasattr(obj, "zero_grad"):
        return inner_optimizers(obj.optimizers)
    else:
        return {}
    found: dict[str, Optimizer] = {}
    for key, part in items:
        inner = inner_optimizers(part)
        if not inner:
            return {}
        found.update({f"{key}.{sub}" if sub else key: each for sub, each in inner.items()})
    return found


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside wrappers; a container of several is refused."""
    inner = inner_optimizers(optimizer)
    if len(inner) != 1:
        raise InvalidInputError(
            f"{type(optimizer).__name__} holds {len(inner)} optimizers; capture each of "
            f"inner_optimizers() by itself"
        )
    return next(iter(inner.values()))


def class_name(optimizer: Optimizer) -> str:
    """Qualified name of the optimizer's class, `torch.optim.adamw.AdamW`."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def match_parameters(
    optimizer: Optimizer, names: Mapping[int, FQN], *, key: str
) -> dict[FQN, Member]:
    """Every parameter in the groups of `optimizer` by name, in order; `names` is by `id`.

    Parameters that belong to no captured model, or two of one name, are refused, naming them.
    """
    members: dict[FQN, Member] = {}
    problems: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        label = f"group {group['name']!r}" if "name" in group else f"group {index}"
        for position, param in enumerate(group["params"]):
            fqn = names.get(id(param))
            place = f"{label} position {position} of shape {tuple(param.shape)}"
            if fqn is None:
                problems.append(f"{place} belongs to no model of the state")
            elif fqn in members:
                problems.append(f"{place} is {fqn}, which an earlier parameter already is")
            else:
                members[fqn] = Member(param, index)
    if problems:
        raise InvalidInputError(
            f"{key}: {len(problems)} parameters cannot be named: {first_few(problems)}; "
            f"put every model that the optimizer trains into the state, and make the optimizer "
            f"from the live parameters"
        )
    return members


def capture_optimizer(
    optimizer: Optimizer, names: Mapping[int, FQN], *, key: str
) -> OptimizerState:
    """The state of `optimizer` as it is; `names` gives each live parameter's name by `id`.

    Nothing is initialised or copied. `key` is the optimizer's name in messages.
    """
    inner = unwrap_optimizer(optimizer)
    members = match_parameters(inner, names, key=key)
    capture = _Capture(key)
    ungrouped = []
    state: Mapping[Any, Any] = inner.state
    for param, slots in state.items():
        if not isinstance(param, Tensor):
            capture.take_shared(param, slots)
            continue
        fqn = names.get(id(param))
        if fqn is None:
            raise InvalidInputError(
                f"{key}: optimizer.state has an entry for a tensor of shape {tuple(param.shape)} "
                f"that is in no group and in no model of the state; delete it before saving"
            )
        if fqn not in members or members[fqn].param is not param:
            ungrouped.append(fqn)
        capture.take(fqn, param, slots)
    return OptimizerState(
        record=OptimizerRecord(
            class_name=class_name(inner),
            defaults=dict(inner.defaults),
            groups=_groups(inner, members),
            slots=capture.slot_values(),
            stateless=tuple(fqn for fqn in members if fqn not in capture.seen),
            ungrouped=tuple(ungrouped),
            odd_shaped=tuple(capture.odd_shaped),
            offloaded=tuple(capture.offloaded),
            shared=capture.shared,
            wrapped=capture.wrapped,
        ),
        tensors=capture.tensors,
        values=capture.values,
        unplaced=tuple(capture.unplaced),
        empty=tuple(capture.empty),
    )


def _groups(optimizer: Optimizer, members: Mapping[FQN, Member]) -> tuple[Group, ...]:
    params: list[list[FQN]] = [[] for _ in optimizer.param_groups]
    for fqn, member in members.items():
        params[member.group].append(fqn)
    return tuple(
        Group(
            name=group_name(group),
            params=tuple(fqns),
            hyper={key: value for key, value in group.items() if key not in NOT_HYPER},
        )
        for group, fqns in zip(optimizer.param_groups, params, strict=True)
    )


def group_name(group: Mapping[str, Any]) -> str | None:
    """The `name`, or else `group_name`, that the user gave to a live group, if it is text."""
    name = group.get("name", group.get("group_name"))
    return name if isinstance(name, str) else None


class _Scalar(NamedTuple):
    """A 0-d tensor in the state of `param`."""

    fqn: FQN
    slot: str
    param: Tensor
    tensor: Tensor


@dataclass(slots=True)
class _Capture:
    """Slots of all parameters, sorted into tensors and values."""

    key: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    wrapped: dict[str, Form] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    tensor_slots: set[str] = field(default_factory=set)
    odd_shaped: list[str] = field(default_factory=list)
    offloaded: list[str] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    seen: set[FQN] = field(default_factory=set)
    plain: dict[str, dict[FQN, SlotValue]] = field(default_factory=dict)
    scalars: list[_Scalar] = field(default_factory=list)

    def take(self, fqn: FQN, param: Tensor, slots: Mapping[Any, Any]) -> None:
        self.seen.add(fqn)
        for slot, value in slots.items():
            if not isinstance(slot, str):
                raise UnencodableError(
                    f"{self.key}: {fqn} has state under the key {slot!r}; only names can be saved",
                    key=fqn,
                )
            name = tensor_name(fqn, slot)
            if param.device.type != "cpu" and _is_on_cpu(value):
                self.offloaded.append(name)
            if not isinstance(value, Tensor):
                self.plain.setdefault(slot, {})[fqn] = Plain(value=value)
            elif value.ndim == 0 and type(value) is Tensor and value.dtype in SCALAR_DTYPES:
                refuse_unstorable(value, key=f"{self.key}: {name}")
                self.scalars.append(_Scalar(fqn, slot, param, value))
            else:
                self._take_tensor(name, slot, param, value)

    def take_shared(self, name: object, value: object) -> None:
        if not isinstance(name, str):
            raise UnencodableError(
                f"{self.key}: optimizer.state has the key {name!r}; only parameters and names "
                f"can be saved",
                key=self.key,
            )
        self.shared[name] = value

    def slot_values(self) -> dict[str, SlotValues]:
        """One entry for each slot that is no tensor for some parameter."""
        self._read_scalars()
        slots: dict[str, SlotValues] = {}
        for slot, values in self.plain.items():
            default = most_common(values.values())
            slots[slot] = SlotValues(
                default=default,
                exceptions={f: v for f, v in values.items() if not same_value(v, default)},
                absent=tuple(fqn for fqn in self.seen if fqn not in values),
            )
        return slots

    def _take_tensor(self, name: str, slot: str, param: Tensor, value: Tensor) -> None:
        self.tensor_slots.add(slot)
        self.values[name] = Value(value, param)
        key = f"{self.key}: {name}"
        if is_wrapper(value):
            self.wrapped[name], parts = take_apart(value, name, key=key)
            self.tensors.update(parts)
            is_placed = is_dtensor(value)
        else:
            refuse_unstorable(value, key=key)
            held = self.tensors[name] = inherit(value, param)
            is_placed = is_dtensor(value) or declaration(held) is not None
        if value.shape != param.shape:
            self.odd_shaped.append(name)
        if not is_placed and is_cut(param):
            self.unplaced.append(name)
        elif value.numel() and not local_of(value).numel():
            self.empty.append(name)

    def _read_scalars(self) -> None:
        """Values of all 0-d tensors, with one transfer for each dtype and device."""
        batches: dict[tuple[torch.dtype, torch.device], list[_Scalar]] = {}
        for scalar in self.scalars:
            if scalar.param.ndim == 0 and scalar.slot in self.tensor_slots:
                # The moment of a 0-d parameter is a tensor like those of the other parameters.
                self._take_scalar_as_tensor(scalar)
            else:
                place = (scalar.tensor.dtype, scalar.tensor.device)
                batches.setdefault(place, []).append(scalar)
        for (dtype, device), batch in batches.items():
            numbers = torch.stack([scalar.tensor.detach() for scalar in batch]).tolist()
            where = "cpu" if device.type == "cpu" else "param"
            word = str(dtype).removeprefix("torch.")
            for scalar, number in zip(batch, numbers, strict=True):
                if isinstance(number, float) and math.isnan(number):  # keeps its payload bits
                    self._take_scalar_as_tensor(scalar)
                    continue
                value = ScalarTensor(dtype=word, value=number, device=where)
                self.plain.setdefault(scalar.slot, {})[scalar.fqn] = value
        self.scalars.clear()

    def _take_scalar_as_tensor(self, scalar: _Scalar) -> None:
        name = tensor_name(scalar.fqn, scalar.slot)
        self._take_tensor(name, scalar.slot, scalar.param, scalar.tensor)


def most_common(values: Iterable[SlotValue]) -> SlotValue | None:
    """The value that most parameters have; None when no value can be compared."""
    counted: Counter[str] = Counter()
    example: dict[str, SlotValue] = {}
    for value in values:
        identity = _identity(value)
        if identity is not None:
            counted[identity] += 1
            example.setdefault(identity, value)
    return example[counted.most_common(1)[0][0]] if counted else None


def same_value(value: SlotValue, default: SlotValue | None) -> bool:
    identity = _identity(value)
    return default is not None and identity is not None and identity == _identity(default)


def _identity(value: SlotValue) -> str | None:
    """A text that only the same value has: 1, 1.0, True and -0.0 are four values here."""
    if isinstance(value, ScalarTensor):
        return f"{value.dtype} {value.device} {value.value!r}"
    if value.value is None or type(value.value) in (bool, int, float, str):
        return f"{type(value.value).__name__} {value.value!r}"
    return None


def _is_on_cpu(value: object) -> bool:
    devices = {tensor.device.type for tensor in tensors_in(value)}
    return devices == {"cpu"}


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
