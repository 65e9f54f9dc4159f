"""Small models with adapters, for the tests of the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from milepost.state.tensors import same_bits

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
IA3: dict[str, Any] = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": []}
PREFIX: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}


def llama(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def adapted(config: Any, layers: int = 2) -> nn.Module:
    model: nn.Module = peft.get_peft_model(llama(layers), config)
    return filled(model)


def filled(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with other values in all that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def lora(layers: int = 2, **options: Any) -> nn.Module:
    return adapted(peft.LoraConfig(**LORA | options), layers)


class Biased(nn.Module):
    """Two layers whose biases alone are trained."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 3)


def biased(width: int = 4) -> nn.Module:
    model = Biased(width)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return filled(model)


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(same_bits(a[name], b[name]) for name in a)


def snapshot(model: nn.Module) -> tuple[list[tuple[str, bool]], list[str], dict[str, Tensor]]:
    return (
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        [f"{name}: {sorted(vars(module))}" for name, module in model.named_modules()],
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )


def unchanged(model: nn.Module, before: Any) -> bool:
    after = snapshot(model)
    return before[:2] == after[:2] and same_tensors(before[2], after[2])


def rewrite(path: Path, **changes: Any) -> Path:
    """The file again, written by torch, with other entries; None removes one."""
    content = torch.load(path, weights_only=True) | changes
    torch.save({k: v for k, v in content.items() if v is not None}, path)
    return path
