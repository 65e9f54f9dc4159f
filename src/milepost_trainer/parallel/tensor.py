"""Tensor parallelism by transformers' own plans and styles, on the modules that a rank holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from milepost_trainer.parallel.collectives import with_summed_gradient
from milepost_trainer.parallel.dora import cut_magnitudes
from milepost_trainer.parallel.experts import cut_grouped_adapters
from milepost_trainer.parallel.quantized import prepare_cut
from milepost_trainer.parallel.stages import PassThrough

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_ADAPTED = ("base_layer", "original_module")  # what adapters of peft are around
_IN_ADAPTER = re.compile(
    r"(?P<around>.+)\.(?P<part>base_layer|original_module|(lora_[AB]|modules_to_save)\.[^.]+)"
)
_AROUND = ("mla_kv_a_proj", "moe_tp_experts")  # act on what goes in and out, and cut nothing


def expand_plan(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Names that `model` has, parameters before their module, with the style of `plan`.

    A rule names a module or a parameter, with `*` for numbers; the rule of a module is also that
    of its own parameters. Where an adapter is around a module, the rule is that of the module in it
    and of the factor on its cut side.
    """
    expanded = {}
    modules = dict(model.named_modules())
    for module_name, module in modules.items():
        if isinstance(module, PassThrough):
            continue
        rule = _rule_of(module_name, modules, plan)
        for param_name, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{param_name}"
            style = plan.get(_wildcard(name.replace(".base_layer", "")), rule)
            if style is not None:
                expanded[name] = style
        if rule is not None:
            expanded[module_name] = rule
    return expanded


def _rule_of(name: str, modules: dict[str, nn.Module], plan: dict[str, str]) -> str | None:
    """The style of a module, which may be part of an adapter, or have one around it.

    Of a column-wise weight the outer factor is cut as the weight is, and the inner one is whole; of
    a row-wise weight it is the other way round. So the ranks sum what is of the adapter's rank, and
    whole factors get the same gradient on each of them.
    """
    place = _IN_ADAPTER.fullmatch(name)
    if place is None:
        rule = plan.get(_wildcard(name))
        is_around = rule is not None and any(f"{name}.{part}" in modules for part in _ADAPTED)
        if is_around and rule not in _AROUND:
            return None
        return rule
    around, part = place["around"], place["part"]
    rule = plan.get(_wildcard(around))
    if rule is None or rule in _AROUND:
        return None
    if part.startswith("lora_"):
        cut = "colwise" if part.startswith("lora_B") else "rowwise"
        return rule if rule.startswith((cut, f"packed_{cut}")) else None
    return rule


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
        if not prepare_cut(module, name, style_name, mesh):
            continue
        before = module.get_parameter(param_name)
        if before in sharded:
            module.register_parameter(param_name, sharded[before])
        else:
            style.validate_param(module, param_name, mesh, parameter_name=name)
            style.shard_param(module, param_name, mesh)
            sharded[before] = module.get_parameter(param_name)
    cut_magnitudes(model, mesh)
    cut_grouped_adapters(model)


def _sum_gradient(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums the gradients of replicated parameters that see this rank's heads only.

    Transformers does so in a hook on the accumulated gradient, which counts a microbatch again
    with each one after it; here every backward pass is summed on its own.
    """
    forward: Callable[..., Any] = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = module._parameters
        originals = dict(held)
        held.update(
            {n: with_summed_gradient(p, group) for n, p in originals.items() if p is not None}
        )
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(originals)

    module.forward = summed
