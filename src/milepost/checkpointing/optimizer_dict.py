"""An optimizer of a checkpoint directory as the state dict that torch's own classes take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from milepost.state.names import FQN
from milepost.state.optimizer_record import (
    OptimizerRecord,
    Plain,
    SlotValue,
    split_tensor_name,
)


def torch_state_dict(
    record: OptimizerRecord, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """`{"state": ..., "param_groups": ...}` with parameters by position, groups in order.

    What belongs to no parameter of a group has no place in it and is left out.
    """
    positions: dict[FQN, int] = {}
    groups = []
    for group in record.groups:
        numbers = [positions.setdefault(fqn, len(positions)) for fqn in group.params]
        names = {} if group.name is None else {"name": group.name}
        groups.append({**group.hyper, **names, "params": numbers})
    slots: dict[FQN, dict[str, Any]] = {fqn: {} for fqn in record.stateful() if fqn in positions}
    for fqn, found in slots.items():
        for slot, values in record.slots.items():
            if fqn in values.exceptions:
                found[slot] = _plain(values.exceptions[fqn])
            elif values.default is not None and fqn not in values.absent:
                found[slot] = _plain(values.default)
    for name, tensor in tensors.items():
        fqn, slot = split_tensor_name(name)
        if fqn in slots:
            slots[fqn][slot] = tensor
    state = {positions[fqn]: found for fqn, found in slots.items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _plain(value: SlotValue) -> Any:
    if isinstance(value, Plain):
        return value.value
    return torch.tensor(value.value, dtype=getattr(torch, value.dtype))
