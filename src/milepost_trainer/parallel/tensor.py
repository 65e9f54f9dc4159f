"""Tensor parallelism by transformers' own plans and styles, on the modules that a rank holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from milepost_trainer.parallel.stages import PassThrough

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"


def expand_plan(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Names that `model` has, parameters before their module, with the style of `plan`.

    A rule names a module or a parameter, with `*` for numbers; the rule of a module is also that
    of its own parameters.
    """
    expanded = {}
    for module_name, module in model.named_modules():
        if isinstance(module, PassThrough):
            continue
        rule = plan.get(_wildcard(module_name))
        for param_name, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{param_name}"
            style = plan.get(_wildcard(name), rule)
            if style is not None:
                expanded[name] = style
        if rule is not None:
            expanded[module_name] = rule
    return expanded


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Shards parameters and installs the collectives, as `plan` says; tied ones stay tied."""
    modules = dict(model.named_modules())
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, style_name in expand_plan(model, plan).items():
        style: Any = ALL_PARALLEL_STYLES[style_name]
        if name in modules:
            if style_name == _PARTIAL_GRADIENT:
                _sum_gradient(modules[name], mesh.get_group())
            else:
                style.install_forward(modules[name], mesh)
            continue
        module_name, _, param_name = name.rpartition(".")
        module = modules[module_name]
        before = module.get_parameter(param_name)
        if before in sharded:
            module.register_parameter(param_name, sharded[before])
        else:
            style.validate_param(module, param_name, mesh, parameter_name=name)
            style.shard_param(module, param_name, mesh)
            sharded[before] = module.get_parameter(param_name)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _sum_gradient(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums the gradients of replicated parameters that see this rank's heads only.

    Transformers does so in a hook on the accumulated gradient, which counts a microbatch again
    with each one after it; here every backward pass is summed on its own.
    """
    forward: Callable[..., Any] = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = module._parameters
        originals = dict(held)
        apply: Any = _SumGradient.apply
        held.update({n: apply(p, group) for n, p in originals.items() if p is not None})
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(originals)

    module.forward = summed
