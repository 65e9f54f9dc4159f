"""Small real models with adapters, on one rank or many, built the same way each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from milepost.layouts.checkpoint import Checkpoint
from tests.parallel.models import Batches, Shape, Training, _fsdp, config, data_rank

TOKENS = torch.arange(12)[None]


def base(*, tied: bool = False) -> LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(tied=tied))


def adapted(seed: int = 5, *, tied: bool = False, **settings: Any) -> PeftModel:
    """The base with a LoRA that does something: its second factors are random too."""
    model = base(tied=tied)
    wanted: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        **settings,
    }
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(**wanted))
    randomise(peft, seed)
    return peft


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.requires_grad and ("lora_B" in name or "lora_embedding_A" in name):
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)


def logits(model: Any) -> torch.Tensor:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    model.train(was_training)
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    model.train()
    for _ in range(count):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def hold(model: Any, shape: Shape) -> Any:
    """`model`, a `PeftModel`, held as `shape` says; every rank of it calls this."""
    inner = model.base_model.model
    if shape.mode == "ddp":
        return DistributedDataParallel(model)
    if shape.mode == "fsdp":
        _fsdp(inner, init_device_mesh("cpu", shape.sizes, mesh_dim_names=("dp_shard",)))
    elif shape.mode == "hsdp":
        names = ("dp_replicate", "dp_shard")
        _fsdp(inner, init_device_mesh("cpu", shape.sizes, mesh_dim_names=names))
    elif shape.mode == "tp":
        _cut(inner, init_device_mesh("cpu", shape.sizes, mesh_dim_names=("tp",)))
    elif shape.mode == "fsdp_tp":
        mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=("dp_shard", "tp"))
        _cut(inner, mesh["tp"])
        _fsdp(inner, mesh["dp_shard"])
    return model


def _cut(model: Any, mesh: Any) -> None:
    """Tensor parallelism of weights and of the factors that follow them."""
    plan: dict[str, Any] = {
        "self_attn.q_proj.base_layer": ColwiseParallel(),
        "self_attn.q_proj.lora_B.default": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj.base_layer": RowwiseParallel(),
        "self_attn.o_proj.lora_A.default": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj.base_layer": RowwiseParallel(),
        "mlp.down_proj.lora_A.default": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def start_adapter(shape: Shape, *, seed: int = 5, **settings: Any) -> Training:
    model = hold(adapted(seed, **settings).train(), shape)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    torch.manual_seed(100 + data_rank(shape) * (shape.mode != "one"))
    return Training(model, optimizer, scheduler, Batches(data_rank(shape)))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors file in a directory, by the names in it."""
    return Checkpoint.open(directory / "adapter_model.safetensors").read_weights()
