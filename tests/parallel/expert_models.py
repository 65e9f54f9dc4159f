"""Tiny models with experts, of real architectures, under transformers' own parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.parallel.models import whole

Mode = dict[str, int]
ONE: Mode = {}
FSDP: Mode = {"fsdp_size": 2}
TP: Mode = {"tp_size": 2}
EP: Mode = {"tp_size": 2, "ep_size": 2}
EP_FSDP: Mode = {"fsdp_size": 2, "ep_size": 2}
TP_FSDP: Mode = {"fsdp_size": 2, "tp_size": 2}
EP_TP_FSDP: Mode = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "Mixtral": {"num_local_experts": 8, "head_dim": 8},
    "GptOss": {"num_local_experts": 8, "head_dim": 8, "attention_dropout": 0.0},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "norm_topk_prob": True,
    },
}


def world_size(mode: Mode) -> int:
    return mode.get("tp_size", 1) * mode.get("fsdp_size", 1)


def random_model(family: str, **overrides: Any) -> Any:
    """A model of `family`, a key of `SETTINGS`, in one process; no two tensors are alike."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{**_COMMON, **SETTINGS[family], **overrides}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand_like(tensor))
    return model


def build(directory: Path, mode: Mode, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a Hugging Face directory, held as `mode` says; every rank of it calls this."""
    import transformers

    if not mode:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    from transformers.distributed import DistributedConfig

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, distributed_config=DistributedConfig(**mode)
    )


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 64, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole, on every rank."""
    persistent = set(model.state_dict())
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(t) for name, t in live.items() if name in persistent}


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every weight and moment by runtime name, whole, on every rank."""
    found = weights(model)
    for name, param in model.named_parameters():
        for slot, value in optimizer.state.get(param, {}).items():
            found[f"{name}.{slot}"] = whole(value)
    return found
