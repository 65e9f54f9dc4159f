"""The global norm of gradients that live on several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from milepost_trainer.parallel.collectives import local


def local_square_sum(params: Iterable[nn.Parameter], ranks: int) -> float:
    """This rank's part of the squared global norm: parts of all ranks add up to it.

    `ranks` is how many ranks hold each parameter, in shards or replicas.
    """
    total = 0.0
    for param in params:
        gradient = param.grad
        if gradient is None:
            continue
        shards = 1
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for axis, placement in enumerate(gradient.placements):
                shards *= 1 if placement.is_replicate() else mesh.size(axis)
            gradient = gradient.to_local()
        square = torch.linalg.vector_norm(gradient.double()).square()
        total += float(square) * shards / ranks
    return total


def scale(params: Iterable[nn.Parameter], factor: float) -> None:
    for param in params:
        if param.grad is not None:
            local(param.grad).mul_(factor)


def global_norm(square_sum: float, device: torch.device) -> float:
    """The norm from the parts of all ranks; collective where there are several."""
    total = torch.tensor(square_sum, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return math.sqrt(float(total))
