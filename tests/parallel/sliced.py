"""A model whose weights are cut by hand into plain tensors, as many training stacks hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import milepost as mp

VOCABULARY = 65
SHAPES = {
    "embed.weight": (VOCABULARY, 6),
    "column.weight": (10, 6),
    "column.bias": (10,),
    "row.weight": (6, 8),
    "gate_up.weight": (16, 6),
    "experts.up": (4, 6, 5),
    "experts.down": (4, 8, 6),
    "norm.weight": (6,),
}
PLACEMENTS: dict[str, Any] = {
    "embed.weight": Shard(0),
    "column.weight": Shard(0),
    "column.bias": Shard(0),
    "row.weight": Shard(-1),
    "gate_up.weight": _StridedShard(0, split_factor=2),
    "experts.up": Shard(0),
    "experts.down": Shard(1),
}
PAD = 7.0


def whole_values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def padded_rows(ranks: int) -> int:
    """Rows of the vocabulary once each rank has as many, a multiple of 8."""
    return -(-VOCABULARY // (8 * ranks)) * 8 * ranks


def slice_of(name: str, value: torch.Tensor, rank: int, ranks: int, pad: float) -> torch.Tensor:
    """What `rank` of `ranks` holds of a whole tensor, by torch's own functions."""
    placement = PLACEMENTS.get(name)
    if name == "embed.weight":
        rows = padded_rows(ranks)
        tail = torch.full((rows - len(value), *value.shape[1:]), pad)
        return torch.cat([value, tail]).chunk(ranks)[rank].clone()
    if placement is None:
        return value.clone()
    blocks = value.chunk(getattr(placement, "split_factor", 1), 0)
    parts = [_chunk(block, placement.dim, rank, ranks) for block in blocks]
    return torch.cat(parts, 0).clone() if len(parts) > 1 else parts[0].clone()


def _chunk(block: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    chunks = block.chunk(ranks, dim)
    return chunks[rank] if rank < len(chunks) else block.narrow(dim, 0, 0)


class Sliced(nn.Module):
    """The slices of `rank`; `ranks=1` is the whole model, padded too."""

    def __init__(self, rank: int = 0, ranks: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        for name, value in whole_values(seed).items():
            module, leaf = name.split(".")
            if module not in self._modules:
                self.add_module(module, nn.Module())
            local = slice_of(name, value, rank, ranks, PAD)
            getattr(self, module).register_parameter(leaf, nn.Parameter(local))

    def declare(self, mesh: Any) -> None:
        """Declare every slice on a mesh of one axis."""
        for name, placement in PLACEMENTS.items():
            shape = SHAPES[name]
            is_vocabulary = name == "embed.weight"
            mp.declare_placement(
                self,
                name,
                global_shape=shape,
                mesh=mesh,
                placements=[placement],
                padded_shape=(padded_rows(self.ranks), shape[1]) if is_vocabulary else None,
            )

    def steps(self, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        """Steps with given gradients, so that slices train as the whole model does."""
        for step in range(first, last):
            for name, value in whole_values(1000 + step).items():
                local = slice_of(name, value, self.rank, self.ranks, 0.0)
                self.get_parameter(name).grad = local
            optimizer.step()


def everything(model: Sliced, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank by name, detached copies."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for slot in ("exp_avg", "exp_avg_sq"):
            if slot in optimizer.state.get(param, {}):
                found[f"{name}.{slot}"] = optimizer.state[param][slot].clone()
    return found
