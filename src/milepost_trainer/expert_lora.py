"""Low-rank adapters of fused experts: one pair of factors for each expert, computed in groups.

They lie in the module of the experts, with the expert as their first axis, so expert parallelism
cuts them as it cuts the experts: a rank computes the adapters of its own experts on the tokens that
come to it, and no product of two factors is ever made. Tensor parallelism, of which a rank has
outputs or inputs of all experts, cuts the factor that has these, and leaves the other one whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import milepost as mp
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel.collectives import local, with_summed_gradient
from milepost_trainer.parallel.experts import FACTORS, expert_modules

_ALIGNMENT = 16
_KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


Added: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is added to the projection of rows, sorted by expert; the ends as `grouped` has them."""


class GroupedLora(nn.Module):
    """`lora_A` (experts, inner, r) and `lora_B` (experts, r, outer) of one projection."""

    def __init__(self, weight: torch.Tensor, settings: LoraSettings, *, transposed: bool) -> None:
        super().__init__()
        experts, inner, outer = weight.shape if transposed else weight.transpose(1, 2).shape
        dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        options: dict[str, Any] = {"dtype": dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(experts, inner, settings.r, **options))
        self.lora_B = nn.Parameter(torch.zeros(experts, settings.r, outer, **options))
        nn.init.uniform_(self.lora_A, -1 / math.sqrt(inner), 1 / math.sqrt(inner))
        self.dropout = nn.Dropout(settings.lora_dropout)
        rank = math.sqrt(settings.r) if settings.use_rslora else settings.r
        self.scaling = settings.lora_alpha / rank

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What is added to the projection of `rows`, sorted by expert; `ends` as `grouped` has.

        Of cut outputs those of this rank; of cut inputs this rank's part of a sum, as of the
        projection itself.
        """
        a, b = self._factors()
        low = grouped(self.dropout(rows.to(a.dtype)), a, ends)
        return grouped(low, b, ends) * self.scaling

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank has of both. Of a whole one beside a cut one it sees a part of the
        gradient, which is summed."""
        a, b = self.lora_A, self.lora_B
        if isinstance(b, DTensor):
            return with_summed_gradient(a, b.device_mesh.get_group()), local(b)
        if isinstance(a, DTensor):
            return local(a), with_summed_gradient(b, a.device_mesh.get_group())
        return a, b


def grouped(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`(rows, inner)` times `(experts, inner, outer)`: rows up to `ends[e]` belong to expert e."""
    aligned = all(size * rows.itemsize % _ALIGNMENT == 0 for size in matrices.shape[1:])
    if aligned and rows.dtype in _KERNEL_DTYPES.get(rows.device.type, ()):
        return nn.functional.grouped_mm(rows, matrices, offs=ends)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    pieces = [
        piece @ matrix for piece, matrix in zip(torch.split(rows, counts), matrices, strict=True)
    ]
    return torch.cat(pieces)


class AdaptedExperts:
    """The forward of a module of fused experts and of `added`, by projection, to what they do."""

    def __init__(self, module: Any, added: Mapping[str, Added]) -> None:
        self.module, self.added = module, added

    def __call__(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted expert outputs `(tokens, hidden)` for `(tokens, top_k)` expert ids."""
        module, top_k = self.module, expert_ids.shape[1]
        chosen, order = torch.sort(expert_ids.reshape(-1), stable=True)
        counts = torch.bincount(chosen, minlength=module.num_experts)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = hidden[order // top_k]
        if module.has_gate:
            inner = module._apply_gate(self._project("gate_up_proj", rows, chosen, ends))
        else:
            inner = module.act_fn(self._project("up_proj", rows, chosen, ends))
        output = self._project("down_proj", inner, chosen, ends)
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        weighted = output * weights.reshape(-1)[order][:, None]
        back = torch.argsort(order)
        summed = weighted[back].view(hidden.shape[0], top_k, -1).sum(dim=1)
        return summed.to(hidden.dtype)

    def _project(
        self, name: str, rows: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        weight = local(getattr(self.module, name))
        output = grouped(rows, weight if self.module.is_transposed else weight.mT, ends)
        if self.module.has_bias:
            output = output + getattr(self.module, f"{name}_bias")[chosen]
        if name in self.added:
            output = output + self.added[name](rows, ends).to(output.dtype)
        return output


def put_expert_lora(model: nn.Module, settings: LoraSettings) -> list[nn.Parameter]:
    """Puts adapters on `settings.expert_projections` of all experts of a model that is not cut yet.

    Returns their parameters. `ValueError` when there are no fused experts, or no such projection.
    """
    found = list(expert_modules(model))
    if not found:
        raise ValueError(f"expert_projections: {type(model).__name__} has no fused experts")
    made: list[nn.Parameter] = []
    for name, module in found:
        _check(name, module, settings.expert_projections)
        made += _adapt(module, settings)
    return made


def _check(name: str, module: Any, projections: Iterable[str]) -> None:
    if not hasattr(module, "is_transposed"):
        raise ValueError(
            f"expert_projections: {name} ({type(module).__name__}) does not say how its experts "
            "lie; use target_parameters"
        )
    own = [key for key, param in module.named_parameters(recurse=False) if param.ndim == 3]
    for projection in projections:
        if projection not in own:
            raise ValueError(
                f"expert_projections: {name} has no {projection}; its projections are "
                f"{', '.join(own)}"
            )


def _adapt(module: Any, settings: LoraSettings) -> list[nn.Parameter]:
    factors = nn.ModuleDict(
        {
            name: GroupedLora(getattr(module, name), settings, transposed=module.is_transposed)
            for name in settings.expert_projections
        }
    )
    module.add_module(FACTORS, factors)
    module.forward = AdaptedExperts(module, dict(factors.items()))
    mp.declare_expert_lora(
        module,
        mp.ExpertLora(
            r=settings.r,
            alpha=settings.lora_alpha,
            use_rslora=settings.use_rslora,
            dropout=settings.lora_dropout,
            factors={
                name: (f"{FACTORS}.{name}.lora_A", f"{FACTORS}.{name}.lora_B")
                for name in settings.expert_projections
            },
            is_transposed=module.is_transposed,
        ),
    )
    return list(factors.parameters())
