"""An optimizer of a DCP directory as a record and tensors by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from milepost.errors import FormatError, MismatchError
from milepost.layouts.dcp_metadata import DcpTensor, Key
from milepost.layouts.dcp_names import GROUPS, STATE
from milepost.state.names import FQN
from milepost.state.optimizer import NOT_HYPER, SCALAR_DTYPES
from milepost.state.optimizer_record import (
    Group,
    OptimizerRecord,
    Plain,
    ScalarTensor,
    SlotValue,
    SlotValues,
    tensor_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOptimizer:
    """`tensors` maps `tensor_name(fqn, slot)` to the stored tensor; `record` is all the rest."""

    record: OptimizerRecord
    tensors: Mapping[str, DcpTensor]


def read_optimizer(
    entries: Mapping[Key, str],
    tensors: Mapping[str, DcpTensor],
    value: Callable[[str], Any],
    live: Sequence[Sequence[FQN]],
    *,
    where: str,
) -> DcpOptimizer:
    """The optimizer whose flat names are `entries`, by place below its container.

    `tensors` are all of the directory, `value` reads one entry, `live` are the names of the live
    parameters by group, for a state that counts them instead of naming them.
    """
    groups = _groups(entries, value, where=where)
    names = _names(groups, live, where=where)
    slots: dict[str, dict[FQN, SlotValue]] = {}
    stored: dict[str, DcpTensor] = {}
    seen: dict[FQN, None] = {}
    for place, flat in entries.items():
        if place[0] != STATE or len(place) < 2:
            continue
        if len(place) != 3:
            raise FormatError(
                f"{where}: {flat}: its place {place} is not state, parameter and slot; load it "
                "with torch.distributed.checkpoint"
            )
        fqn, slot = names.get(str(place[1]), str(place[1])), str(place[2])
        seen.setdefault(fqn)
        tensor = tensors.get(flat)
        if tensor is not None and (tensor.shape or slot != "step"):
            stored[tensor_name(fqn, slot)] = tensor
        else:
            slots.setdefault(slot, {})[fqn] = _slot_value(value(flat))
    made = tuple(
        Group(
            name=group.get("name"),
            params=tuple(names.get(str(p), str(p)) for p in group["params"]),
            hyper={key: v for key, v in group.items() if key not in NOT_HYPER},
        )
        for group in groups
    )
    grouped = [fqn for group in made for fqn in group.params]
    record = OptimizerRecord(
        class_name=None,
        groups=made,
        slots={slot: _slot(values, seen) for slot, values in slots.items()},
        stateless=tuple(fqn for fqn in grouped if fqn not in seen),
        ungrouped=tuple(fqn for fqn in seen if fqn not in set(grouped)),
    )
    return DcpOptimizer(record=record, tensors=stored)


def _groups(
    entries: Mapping[Key, str], value: Callable[[str], Any], *, where: str
) -> list[dict[str, Any]]:
    """Parameter groups: by number, in one value, or one setting for each parameter."""
    found: dict[Any, dict[str, Any]] = {}
    for place, flat in entries.items():
        if place[0] != GROUPS:
            continue
        if len(place) == 1:
            whole = value(flat)
            if not isinstance(whole, list) or not all(isinstance(g, dict) for g in whole):
                raise FormatError(f"{where}: {flat} is no list of parameter groups")
            return whole
        if len(place) != 3:
            raise FormatError(f"{where}: {flat}: its place {place} is no setting of a group")
        found.setdefault(place[1], {})[str(place[2])] = value(flat)
    if all(isinstance(key, int) for key in found):
        ordered = [found[number] for number in sorted(found)]
        lacking = [number for number, group in enumerate(ordered) if "params" not in group]
        if lacking:
            raise FormatError(f"{where}: parameter group {lacking[0]} lists no parameters")
        return ordered
    return _joined(found)


def _joined(settings: Mapping[FQN, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups out of the settings of each parameter: those with the same ones are together."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn, own in settings.items():
        group = groups.setdefault(repr(sorted(own.items())), {**own, "params": []})
        group["params"].append(fqn)
    return list(groups.values())


def _names(
    groups: Sequence[Mapping[str, Any]], live: Sequence[Sequence[FQN]], *, where: str
) -> dict[str, FQN]:
    """Names for a state that counts its parameters: those of the live groups, in order."""
    saved = [list(group["params"]) for group in groups]
    if not any(saved) or not all(isinstance(p, int) for params in saved for p in params):
        return {}
    if [len(params) for params in saved] != [len(names) for names in live]:
        raise MismatchError(
            f"{where}: holds groups of {[len(params) for params in saved]} parameters without "
            f"names, the live optimizer has {[len(names) for names in live]}; make the groups that "
            "were saved, or load without the optimizer"
        )
    return {
        str(number): name
        for params, names in zip(saved, live, strict=True)
        for number, name in zip(params, names, strict=True)
    }


def _slot_value(value: Any) -> SlotValue:
    if isinstance(value, Tensor) and value.ndim == 0 and value.dtype in SCALAR_DTYPES:
        dtype = str(value.dtype).removeprefix("torch.")
        return ScalarTensor(dtype=dtype, value=value.item(), device="cpu")
    return Plain(value=value)


def _slot(values: Mapping[FQN, SlotValue], seen: Mapping[FQN, None]) -> SlotValues:
    return SlotValues(
        exceptions=dict(values), absent=tuple(fqn for fqn in seen if fqn not in values)
    )
