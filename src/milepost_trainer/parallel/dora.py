"""DoRA beside weights that are cut or in few bits: magnitudes where peft cannot compute the norms.

A magnitude belongs to an output of a layer, and is divided by the norm of all weights of that
output. Ranks with some of the outputs have these norms, and cut the magnitudes as they cut the
weight. Ranks with some of the inputs add their sums of squares up, and have all magnitudes, the
same on each. Norms of a weight in few bits are those of what it is dequantised to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from milepost_trainer.parallel.collectives import local
from milepost_trainer.parallel.quantized import dequantized

_MAGNITUDES = "lora_magnitude_vector"


def cut_magnitudes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Puts right the DoRA layers of peft whose weights have been cut over the 1-D `mesh`."""
    for base, modules in _layers(model):
        if not isinstance(base.weight, DTensor):
            continue
        for module in modules:
            if isinstance(base, nn.Embedding):
                module.forward = _EmbeddingMagnitudes(module, mesh)
            else:
                module.forward = _LinearMagnitudes(module)
                _cut_like_outputs(module, base.weight)


def dequantize_for_norms(model: nn.Module) -> None:
    """Puts right the DoRA layers of peft around weights in few bits.

    Those of `FourBitLinear` and `EightBitLinear` peft does not know, and it replaces the weight of
    a `Linear8bitLt` on a CPU by one without scales. It gets along with a `Linear4bit`.
    """
    four_bit = importlib.import_module("bitsandbytes").nn.Linear4bit
    for base, modules in _layers(model):
        if not base.weight.is_floating_point() and not isinstance(base, four_bit):
            for module in modules:
                module.forward = _LinearMagnitudes(module)


def _layers(model: nn.Module) -> Iterator[tuple[Any, list[nn.Module]]]:
    """The adapted layers, each with the modules of its magnitudes."""
    for layer in model.modules():
        magnitudes = getattr(layer, _MAGNITUDES, None)
        if isinstance(magnitudes, nn.ModuleDict) and len(magnitudes):
            yield layer.get_base_layer(), list(magnitudes.values())  # type: ignore[operator]


def _cut_like_outputs(module: nn.Module, weight: DTensor) -> None:
    """Of a weight (outputs, inputs) whose outputs are cut."""
    if _cut_dim(weight) == 0:
        whole = module.get_parameter("weight")
        cut = distribute_tensor(
            whole.detach(), weight.device_mesh, weight.placements, src_data_rank=None
        )
        module.register_parameter("weight", nn.Parameter(cut, whole.requires_grad))


class _LinearMagnitudes:
    """Replaces the forward of the DoRA of a linear layer, `module`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scaling: float,
        base_layer: nn.Linear,
        base_result: torch.Tensor | None = None,
        **factors: Any,
    ) -> torch.Tensor:
        """What is added to the output of `base_layer`: of this rank's outputs, or of all of them.

        `base_result` is that output, if it was computed from `x`; `factors` are the modules
        `lora_A` and `lora_B`. Collective.
        """
        if base_result is None:
            dtype = base_layer.weight.dtype
            base_result = base_layer(x.to(dtype) if dtype.is_floating_point else x).to(x.dtype)
        width = base_result.shape[-1]
        if base_layer.bias is not None:
            base_result = base_result - self._of_width(local(base_layer.bias), width)
        a, b = factors["lora_A"], factors["lora_B"]
        norms = self._norms(base_layer, a.weight, b.weight, scaling, x.dtype)
        ratios = self._of_width(local(self.module.get_parameter("weight")) / norms, width)
        added: torch.Tensor = (ratios - 1) * base_result + ratios * b(a(x)) * scaling
        return added

    @torch.no_grad()
    def _norms(
        self,
        base_layer: nn.Linear,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Norms of this rank's outputs; as in peft they are constants to the gradient."""
        weight = base_layer.weight
        held = local(weight) if weight.is_floating_point() else dequantized(base_layer)
        total = held.to(dtype) + scaling * (local(b) @ local(a)).to(dtype)
        squares = total.square().sum(dim=1)
        if isinstance(weight, DTensor) and _cut_dim(weight) != 0:
            squares = DTensor.from_local(squares, weight.device_mesh, [Partial()]).full_tensor()
        return squares.sqrt()

    def _of_width(self, vector: torch.Tensor, width: int) -> torch.Tensor:
        """A vector over this rank's outputs, or over all of them where the outputs are gathered."""
        if len(vector) == width:
            return vector
        weight: Any = self.module.get_parameter("weight")
        whole = DTensor.from_local(
            vector,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=torch.Size([width]),
            stride=(1,),
        )
        return whole.full_tensor()


class _EmbeddingMagnitudes:
    """The same for an embedding. Factors, magnitudes and outputs are whole on each rank."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scaling: float,
        base_layer: nn.Embedding,
        embed_fn: Any,
        **factors: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output of `base_layer` is multiplied by, `(dim,)`, and what is added to it.

        The `factors` are `lora_A`, `(vocabulary, r)`, and `lora_B`, `(r, dim)`. Collective.
        """
        a, b = factors["lora_A"], factors["lora_B"]
        ratios = self.module.get_parameter("weight") / self._norms(base_layer.weight, a, b, scaling)
        return ratios, ratios * (embed_fn(x, a) @ b) * scaling

    @torch.no_grad()
    def _norms(self, weight: Any, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        has_tokens = _cut_dim(weight) == 0
        factor = (a if has_tokens else b).detach()
        cut = distribute_tensor(factor, self.mesh, weight.placements, src_data_rank=None).to_local()
        delta = cut @ b if has_tokens else a @ cut
        squares = (local(weight) + scaling * delta).square().sum(dim=0)
        if has_tokens:
            return DTensor.from_local(squares, self.mesh, [Partial()]).full_tensor().sqrt()
        whole = weight.shape[1:]
        parts = DTensor.from_local(
            squares, self.mesh, [Shard(0)], run_check=False, shape=whole, stride=(1,)
        )
        return parts.full_tensor().sqrt()


def _cut_dim(weight: DTensor) -> int | None:
    """The dim along which a weight is cut; strided cuts are no `Shard` to torch."""
    (placement,) = weight.placements
    return getattr(placement, "dim", None)
