"""An optimizer of a checkpoint directory as the state dict that torch's own classes take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from milepost.errors import MismatchError
from milepost.state.mismatch import first_few
from milepost.state.names import FQN
from milepost.state.optimizer_parts import whole_state
from milepost.state.optimizer_record import (
    OptimizerRecord,
    Plain,
    SlotValue,
    part_name,
    split_tensor_name,
    values_by_parameter,
)


def torch_state_dict(
    record: OptimizerRecord, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """`{"state": ..., "param_groups": ...}` with parameters by position, groups in order.

    What belongs to no parameter of a group has no place in it and is left out. A quantised state
    is the subclass that it was; `MismatchError` when that is not known here, or when there is no
    whole state, because every rank kept its own.
    """
    if record.per_rank:
        raise MismatchError(
            f"{len(record.per_rank)} optimizer states were kept by each rank, and no whole can be "
            f"made of them: {first_few(record.per_rank)}; load them into the live optimizer with "
            f"milepost.load, on the topology that saved them"
        )
    positions: dict[FQN, int] = {}
    groups = []
    for group in record.groups:
        numbers = [positions.setdefault(fqn, len(positions)) for fqn in group.params]
        has_name = group.name is not None and group.hyper.get("group_name") != group.name
        names = {"name": group.name} if has_name else {}
        groups.append({**group.hyper, **names, "params": numbers})
    slots: dict[FQN, dict[str, Any]] = {
        fqn: {slot: _plain(value) for slot, value in found.items()}
        for fqn, found in values_by_parameter(record).items()
        if fqn in positions
    }
    for name, tensor in _whole_states(record, tensors).items():
        fqn, slot = split_tensor_name(name)
        if fqn in slots:
            slots[fqn][slot] = tensor
    state = {positions[fqn]: found for fqn, found in slots.items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _whole_states(
    record: OptimizerRecord, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """State tensors by name, those that are stored as parts put together."""
    found = dict(tensors)
    for name, form in record.wrapped.items():
        parts = {part: found.pop(part_name(name, part)) for part in form.dtypes}
        found[name] = whole_state(form, parts, key=name)
    return found


def _plain(value: SlotValue) -> Any:
    if isinstance(value, Plain):
        return value.value
    return torch.tensor(value.value, dtype=getattr(torch, value.dtype))
