"""Adapters made by peft, on tiny models of transformers, and what peft merges them to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from milepost.tools.rewrite.options import RewriteOptions

QUICK = RewriteOptions(is_durable=False, threads=2)
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: Any) -> LlamaConfig:
    """Two layers of 16 features, 40 tokens, head apart."""
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **changes,
    }
    return LlamaConfig(**settings)


def gpt2() -> GPT2Config:
    """Two layers whose linear layers are Conv1D."""
    return GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32, n_inner=24)


def qwen3_moe(**changes: Any) -> Qwen3MoeConfig:
    """Two layers of four experts, which lie one by one on disk and in banks in memory."""
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **changes,
    }
    return Qwen3MoeConfig(**settings)


def gpt_oss() -> GptOssConfig:
    """Two layers of four experts in transposed banks."""
    return GptOssConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )


def write_base(directory: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A model of random weights, saved by transformers."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32, kind: Any = None) -> Any:
    """The model in a directory, as transformers loads it."""
    return (kind or AutoModelForCausalLM).from_pretrained(directory, dtype=dtype)


def write_adapter(
    directory: Path, base: Path, *, seed: int = 2, kind: Any = None, **settings: Any
) -> Path:
    """An adapter of random factors on the model in `base`, saved by peft."""
    torch.manual_seed(seed)
    model = get_peft_model(load(base, kind=kind), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_magnitude = "magnitude" in name
                parameter.copy_(
                    parameter + torch.rand_like(parameter)
                    if is_magnitude
                    else torch.randn_like(parameter) * 0.3
                )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that it stores embeddings too
        model.save_pretrained(directory)
    return directory


def merged_by_peft(base: Path, adapter: Path, kind: Any = None) -> Any:
    """What peft makes of both, in fp32."""
    return PeftModel.from_pretrained(load(base, kind=kind), str(adapter)).merge_and_unload()


def state(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of a model, by the names of its modules."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def outputs(model: Any) -> torch.Tensor:
    """Logits of a few tokens."""
    ids = torch.arange(1, 21).view(1, -1)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """What the one file of a model has."""
    tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return tensors
