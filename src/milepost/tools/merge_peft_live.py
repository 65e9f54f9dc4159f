"""Adapters on a live model of transformers: what peft computes of its own, and of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from milepost.adapters.arithmetic import Layout, layout_of_experts
from milepost.adapters.config import EXPERT_FIELD, LORA, MIXED_LORA
from milepost.adapters.names import Role, aligned, by_module
from milepost.errors import InvalidInputError
from milepost.hf.foreign_calls import attempt
from milepost.tools.merge_peft_adapter import OpenedAdapter


def put_adapters(model: nn.Module, adapters: Sequence[OpenedAdapter]) -> nn.Module:
    """A model that computes what `model` does with all adapters, the difference that each makes
    times its weight. No product of weights is merged; `model` is changed in place.

    `InvalidInputError` where peft cannot hold the adapters.
    """
    for adapter in adapters:
        if adapter.config.experts is not None:
            _put_experts(model, adapter)
    of_peft = [adapter for adapter in adapters if adapter.config.lora is not None]
    if not of_peft:
        return model
    adapted, problem = attempt(partial(_put_peft, model, of_peft))
    if adapted is None:
        raise InvalidInputError(
            f"--verify: peft cannot run {', '.join(str(a.directory) for a in of_peft)}: {problem}; "
            "leave it out"
        )
    return adapted


def are_plain(adapters: Sequence[OpenedAdapter]) -> bool:
    """Whether peft runs them as they are: one adapter, at weight 1."""
    return len(adapters) == 1 and adapters[0].weight == 1.0


# ---- peft's own


def _put_peft(model: nn.Module, adapters: Sequence[OpenedAdapter]) -> nn.Module:
    from peft import PeftModel

    weights = {f"adapter{number}": adapter.weight for number, adapter in enumerate(adapters)}
    adapted: Any = None
    for name, adapter in zip(weights, adapters, strict=True):
        path, config = str(adapter.directory), _config_of(adapter)
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, path, adapter_name=name, config=config)
        else:
            if config is not None:
                adapted.add_adapter(name, config)
            adapted.load_adapter(path, name)
    if not are_plain(adapters):
        _add_up(adapted, weights)
    assert isinstance(adapted, nn.Module)
    return adapted


def _config_of(adapter: OpenedAdapter) -> Any:
    """The configuration of peft's part of an adapter; None where the one on disk is that."""
    from peft import PeftConfig

    if adapter.config.peft_type != MIXED_LORA:
        return None
    document = {**adapter.config.document, "peft_type": LORA, "inference_mode": True}
    document.pop(EXPERT_FIELD)
    return PeftConfig.from_peft_type(**document)


def _add_up(adapted: nn.Module, weights: Mapping[str, float]) -> None:
    """Let each module add up the differences of single adapters to it, times their weights: peft
    knows no weights, and does not add up modules that were trained whole, or DoRA."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: list[Any] = list(adapted.modules())
    for layer in layers:
        if isinstance(layer, ParamWrapper):  # adds up before the module computes
            layer.set_adapter(list(weights), inference_mode=True)
            for name in weights.keys() & layer.scaling.keys():
                layer.scaling[name] *= weights[name]
        elif isinstance(layer, ModulesToSaveWrapper) and any(layer.original_module.children()):
            raise ValueError(
                f"{type(layer.original_module).__name__} was trained whole, and has modules of its "
                "own, whose differences are not those of its outputs"
            )
        elif isinstance(layer, BaseTunerLayer | ModulesToSaveWrapper):
            layer.forward = partial(_sum_of, layer, layer.forward, weights)


def _sum_of(
    layer: Any, forward: Any, weights: Mapping[str, float], *given: Any, **named: Any
) -> Any:
    """What a module computes without adapters, and the differences that they make, each alone."""
    layer.enable_adapters(False)
    base = forward(*given, **named)
    layer.enable_adapters(True)
    total = base
    for name in weights.keys() & layer._get_available_adapters():
        layer.set_adapter([name], inference_mode=True)
        total = total + weights[name] * (forward(*given, **named) - base)
    return total


# ---- those of experts


class _WithFactors(nn.Module):
    """A bank of experts `[E, out, in]` or `[E, in, out]` and the products of factors
    `a` [E, in, r] and `b` [E, r, out]."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, layout: Layout) -> None:
        super().__init__()
        self._a, self._b, self._scale, self._layout = a, b, scale, layout

    def forward(self, weight: Tensor) -> Tensor:
        product = torch.bmm(self._a, self._b) * self._scale
        return weight + (product if self._layout is Layout.IN_OUT else product.transpose(1, 2))


def _put_experts(model: nn.Module, adapter: OpenedAdapter) -> None:
    """Factors of grouped experts, which the parameters of their modules have from now on."""
    settings = adapter.config.experts
    assert settings is not None
    grouped = {
        key: roles
        for key, roles in by_module(adapter.source.tensors).items()
        if roles.keys() == {Role.EXPERTS_A, Role.EXPERTS_B}
    }
    known = {f"{_plain(name)}.lora_A" for name, _ in model.named_parameters()}
    own = aligned([roles[Role.EXPERTS_A] for roles in grouped.values()], known)
    for (module, _, projection), roles in grouped.items():
        place = own.get(roles[Role.EXPERTS_A])
        if place is None:
            raise InvalidInputError(
                f"--verify: {adapter.directory}: {module}.{projection}: {type(model).__name__} has "
                "no such parameter, so nothing can compute with its factors; leave it out"
            )
        name, _, parameter = place.removesuffix(".lora_A").rpartition(".")
        a, b = (
            adapter.source.tensors[roles[role]].read().float()
            for role in (Role.EXPERTS_A, Role.EXPERTS_B)
        )
        held = model.get_submodule(name)
        layout = _layout_of(held, parameter, a, b)
        factors = _WithFactors(a, b, settings.scaling * adapter.weight, layout)
        nn.utils.parametrize.register_parametrization(held, parameter, factors)


def _plain(name: str) -> str:
    """The name of a parameter without those of what torch put on it."""
    return name.replace(".parametrizations.", ".").removesuffix(".original")


def _layout_of(module: nn.Module, parameter: str, a: Tensor, b: Tensor) -> Layout:
    """As the module says, or its shapes do."""
    stated = getattr(module, "is_transposed", None)
    if stated is not None:
        return Layout.IN_OUT if stated else Layout.OUT_IN
    shape = getattr(module, parameter).shape
    return layout_of_experts(a.shape[1], b.shape[2], shape, name=parameter)
