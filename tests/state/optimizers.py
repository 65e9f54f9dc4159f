"""A small model and what is done to its optimizer, for the tests of capture and restore."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from milepost.state.model import parameter_names
from milepost.state.optimizer import OptimizerState, capture_optimizer
from milepost.state.optimizer_plan import OptimizerReport, plan_restore_optimizer
from milepost.state.optimizer_record import OptimizerRecord
from milepost.state.tensors import stored_dtype, stored_shape


def net(names: Sequence[str] = ("a", "b", "c")) -> Any:
    """Three 4x4 weights and as many biases."""
    return nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    return capture_optimizer(optimizer, parameter_names({"m": model}, primary="m"), key="optimizer")


def restore(
    state: OptimizerState, model: nn.Module, optimizer: torch.optim.Optimizer, **policies: Any
) -> OptimizerReport:
    tensors = {name: value.clone() for name, value in state.tensors.items()}
    plan = plan_restore_optimizer(
        optimizer,
        parameter_names({"m": model}, primary="m"),
        OptimizerRecord.from_tree(copy.deepcopy(state.record.to_tree()), where="state"),
        {name: (stored_dtype(t), stored_shape(t)) for name, t in tensors.items()},
        key="optimizer",
        **policies,
    )
    plan.fill(tensors)
    return plan.apply()


def step(optimizer: torch.optim.Optimizer, *, without: Sequence[Tensor] = ()) -> None:
    skipped = {id(tensor) for tensor in without}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
            if parameter.requires_grad and id(parameter) not in skipped:
                parameter.grad = torch.randn_like(parameter)
    optimizer.step()
