"""Small models whose weights can be quantised, as hub directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tools.rewrite.hub import read_hub

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2}
_GPT_OSS = {
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}


def save_model(family: str, place: Path) -> Path:
    """A bf16 model of random weights, saved by transformers."""
    import transformers

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "qwen3_moe": ("Qwen3Moe", _EXPERTS),
        "gpt_oss": ("GptOss", _GPT_OSS),
    }
    name, more = kinds[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and sinks start as zeros, or as nothing
            parameter.normal_(std=0.02)
    model.save_pretrained(place)
    return place


def decompressed(source: Path, place: Path) -> dict[str, Tensor]:
    """What compressed-tensors makes of a directory, from its files alone."""
    from compressed_tensors.entrypoints.convert import (
        CompressedTensorsDequantizer,
        convert_checkpoint,
    )

    convert_checkpoint(
        str(source),
        str(place),
        CompressedTensorsDequantizer(str(source)),
        max_workers=1,
        device="cpu",
    )
    return read_hub(place)


def loaded(place: Path, **options: Any) -> Mapping[str, Tensor]:
    """The parameters of a directory as transformers has them after one forward pass."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place, **options)
    with torch.no_grad():
        model(torch.arange(8)[None])
    state: Mapping[str, Tensor] = model.state_dict()
    return state


def logits(place: Path, **options: Any) -> Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place, **options)
    with torch.no_grad():
        found = model(torch.arange(8)[None]).logits
    assert isinstance(found, Tensor)
    return found
