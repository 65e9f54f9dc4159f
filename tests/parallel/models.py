"""Small real models under every parallelism of torch, built the same way on any mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to hold a model: `mode` and the sizes of its mesh axes."""

    mode: str
    sizes: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        size = 1
        for length in self.sizes:
            size *= length
        return size

    def __str__(self) -> str:
        return f"{self.mode}-{'x'.join(map(str, self.sizes)) or '1'}"


ONE = Shape("one")
DDP2 = Shape("ddp", (2,))
FSDP2 = Shape("fsdp", (2,))
FSDP3 = Shape("fsdp", (3,))
FSDP4 = Shape("fsdp", (4,))
HSDP = Shape("hsdp", (2, 2))
TP2 = Shape("tp", (2,))
FSDP_TP = Shape("fsdp_tp", (2, 2))


def config(*, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def build(shape: Shape, *, seed: int = 0, tied: bool = False) -> nn.Module:
    """A model with the values of `seed`, held as `shape` says; every rank of it calls this."""
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config(tied=tied)).train()
    if shape.mode == "ddp":
        return DistributedDataParallel(model)
    if shape.mode == "fsdp":
        return _fsdp(model, init_device_mesh("cpu", shape.sizes, mesh_dim_names=("dp_shard",)))
    if shape.mode == "hsdp":
        names = ("dp_replicate", "dp_shard")
        return _fsdp(model, init_device_mesh("cpu", shape.sizes, mesh_dim_names=names))
    if shape.mode == "tp":
        return _tensor_parallel(model, init_device_mesh("cpu", shape.sizes, mesh_dim_names=("tp",)))
    if shape.mode == "fsdp_tp":
        mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=("dp_shard", "tp"))
        return _fsdp(_tensor_parallel(model, mesh["tp"]), mesh["dp_shard"])
    assert shape.mode == "one", shape
    return model


def _fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)
    return model


def data_rank(shape: Shape) -> int:
    """Which stream of data this rank reads: tensor-parallel ranks read the same."""
    if shape.mode == "one" or shape.mode == "tp":
        return 0
    rank = dist.get_rank()
    return rank // shape.sizes[1] if shape.mode == "fsdp_tp" else rank


@dataclass(slots=True)
class Batches:
    """Random tokens whose position is part of a checkpoint; each data rank has its own."""

    stream: int
    position: int = 0

    def next(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.stream + self.position)
        self.position += 1
        return torch.randint(0, VOCABULARY, (2, 12), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"stream": self.stream, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stream, self.position = state["stream"], state["position"]


@dataclass(slots=True)
class Training:
    """A model in training and all that a resume must bring back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.batches,
        }

    def step(self) -> float:
        tokens = self.batches.next()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def start(shape: Shape, *, seed: int = 0, tied: bool = False) -> Training:
    model = build(shape, seed=seed, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    return Training(model, optimizer, scheduler, Batches(data_rank(shape)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global values of a tensor, by torch's own gather."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def gathered(training: Training) -> dict[str, torch.Tensor]:
    """Every weight and moment by name, whole, on every rank."""
    inner = training.model
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    found = {name: whole(p) for name, p in inner.named_parameters(remove_duplicate=False)}
    for name, param in inner.named_parameters():
        for slot, value in training.optimizer.state.get(param, {}).items():
            found[f"{name}.{slot}"] = whole(value)
    return found
