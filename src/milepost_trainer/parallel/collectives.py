"""Sums and gathers of what ranks hold in parts, through which gradients flow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; gradients flow through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def summed(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of a group, which all go on with alike.

    Backward gives each rank the gradient of the sum for its own part, once and not once a rank.
    """
    total: torch.Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.count = group, len(rows)
        pieces = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(pieces, rows.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        begin = dist.get_rank(ctx.group) * ctx.count
        return total[begin : begin + ctx.count], None


def gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks of a group, in their order; as many from each.

    Each rank does something else with them: backward adds up what all ranks ask of a rank's rows.
    """
    everything: torch.Tensor = _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return everything


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


def with_summed_gradient(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor that the ranks of a group have alike, and of whose gradient each sees a part.

    Backward adds the parts up; collective there.
    """
    same: torch.Tensor = _SumGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return same
