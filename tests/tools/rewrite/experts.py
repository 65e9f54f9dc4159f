"""Models with experts, and their slices as ranks of Milepost and other trainers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import milepost as mp
from tests.parallel.models import whole

RANKS, E, INNER, HIDDEN = 2, 4, 6, 8


def write_slices(
    directory: Path, slices: dict[str, torch.Tensor], rest: dict[str, torch.Tensor], **config: Any
) -> Path:
    """An `ep_sharded` save as others write it: tensors of `slices` cut along dim 0."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    for rank in range(RANKS):
        part = f"model-{rank:05d}-of-{RANKS:05d}.safetensors"
        held = dict(rest) if rank == 0 else {}
        for name, tensor in slices.items():
            held[f"{name}.shard_{rank}"] = tensor.chunk(RANKS)[rank].clone()
        save_file(held, directory / part, metadata={"format": "pt"})
        where |= dict.fromkeys(held, part)
    index = {"metadata": {"format": "ep_sharded", "ep_size": RANKS}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


BASE = "model.layers.1.mlp.experts"
REST = {
    "model.layers.1.mlp.gate.weight": torch.randn(E, HIDDEN),
    "model.layers.1.mlp.shared_experts.up_proj.weight": torch.randn(INNER, HIDDEN),
    "mtp.0.w": torch.randn(2, 2),
}


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def make_experts(family: str) -> Any:
    import transformers

    configs = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            num_experts=8, moe_intermediate_size=16, **COMMON
        ),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=8, **COMMON),
        "gpt_oss": lambda: transformers.GptOssConfig(
            num_local_experts=8, layer_types=["full_attention"] * 2, **COMMON
        ),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[family]())


def save_slices(rank: int, size: int, base: Path, run: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    parallel = DistributedConfig(tp_size=size, ep_size=size)
    model = AutoModelForCausalLM.from_pretrained(base, distributed_config=parallel)
    mp.save_sharded_ep(run / "checkpoint-1", {"model": model}, step=1)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}
