"""Adapters of peft for fused experts, on meshes that cut these.

In peft, an adapter of a parameter makes a whole weight of its factors, with those of all experts in
one pair. Here it is computed in groups, as `expert_lora` does, so that a rank needs what belongs to
its part of the weight alone: the factors of its experts, or the inputs or outputs that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from milepost_trainer.expert_lora import AdaptedExperts, grouped
from milepost_trainer.parallel.collectives import with_summed_gradient
from milepost_trainer.parallel.experts import FACTORS, expert_modules


class _JoinedFactors:
    """The factors of one parameter, of peft's `wrapper` around it: `lora_A` (experts x r, inner)
    counts experts first, `lora_B` (outer, r x experts) counts them last."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        ((self.name, self.scaling),) = wrapper.scaling.items()

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        a, b = self._factors()
        experts = self.wrapper.num_experts
        inner = a.reshape(experts, -1, a.shape[1]).mT
        outer = b.reshape(b.shape[0], -1, experts).permute(2, 1, 0).contiguous()
        low = grouped(rows.to(a.dtype), inner, ends)
        added: torch.Tensor = grouped(low, outer, ends) * self.scaling
        return added

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What belongs to this rank's part of the weight.

        Tensor parallelism leaves factors whole: each rank uses the outputs or inputs that it has of
        the weight, and sees a part of the gradient.
        """
        a = self.wrapper.lora_A[self.name].weight
        b = self.wrapper.lora_B[self.name].weight
        weight = self.wrapper.get_param()
        if not isinstance(weight, DTensor):
            return a, b
        a, b = (with_summed_gradient(each, weight.device_mesh.get_group()) for each in (a, b))
        if _cut_dim(weight) == (2 if self.wrapper.get_base_layer().is_transposed else 1):
            return a, _part(b, 0, weight)
        return _part(a, 1, weight), b


def _cut_dim(weight: DTensor) -> int:
    placement: Any = weight.placements[0]
    return int(placement.dim)


def _part(factor: torch.Tensor, dim: int, weight: DTensor) -> torch.Tensor:
    """What this rank has of a factor that is cut along `dim` as the weight is along its own."""
    mesh = weight.device_mesh
    pieces = getattr(weight.placements[0], "split_factor", 1)
    shares = [piece.chunk(mesh.size(), dim) for piece in factor.chunk(pieces, dim)]
    return torch.cat([each[mesh.get_local_rank()] for each in shares], dim)


def compute_in_groups(model: nn.Module) -> None:
    """Takes over the adapters of fused experts of a model that is not cut yet.

    `ValueError` for experts of an unknown layout, or with grouped adapters of their own, and for
    an adapter of what is no projection of them, such as a bias.
    """
    for name, module in expert_modules(model):
        wrappers = {wrapper.parameter_name: wrapper for wrapper in _wrappers(module)}
        if not wrappers:
            continue
        base: Any = next(iter(wrappers.values())).get_base_layer()
        if not hasattr(base, "is_transposed"):
            raise ValueError(
                f"target_parameters: {name} ({type(base).__name__}) does not say how its experts "
                "lie: use tp_size: 1 and ep_size: 1"
            )
        if FACTORS in dict(base.named_children()):
            raise ValueError(
                f"target_parameters and expert_projections both adapt {name}: use one of them"
            )
        _require_projections(name, base, wrappers)
        added = {key: _JoinedFactors(wrapper) for key, wrapper in wrappers.items()}
        module.forward = AdaptedExperts(base, added)


def _require_projections(name: str, base: Any, wrappers: Mapping[str, Any]) -> None:
    projections = ("gate_up_proj" if base.has_gate else "up_proj", "down_proj")
    for key, wrapper in wrappers.items():
        if key not in projections or wrapper.get_param().ndim != 3:
            raise ValueError(
                f"target_parameters: {key} of {name} is no projection of its experts, which are "
                f"{', '.join(projections)}: leave it out, or use tp_size: 1 and ep_size: 1"
            )


def require_experts_alone(model: nn.Module) -> None:
    """`ValueError` for adapters of other parameters, of which tensor parallelism may cut some."""
    of_experts = {id(each) for _, module in expert_modules(model) for each in _wrappers(module)}
    for name, module in model.named_modules():
        if _is_wrapper(module) and id(module) not in of_experts:
            raise ValueError(
                f"target_parameters: {module.parameter_name} of {name} is no weight of fused "
                "experts, and tp_size has no rule for it: use target_modules"
            )


def _wrappers(module: nn.Module) -> Iterator[Any]:
    """Those around one module of experts, which lie in each other."""
    while _is_wrapper(module):
        yield module
        module = module.base_layer  # type: ignore[assignment]


def _is_wrapper(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, ParamWrapper)
