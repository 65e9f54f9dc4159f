"""Tiny vision-language models of real families, and their language models trained alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
_ENCODER: dict[str, Any] = {
    **_VISION,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN_VISION: dict[str, Any] = {
    **_VISION,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}


def _gemma3(**more: Any) -> Any:
    return transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 16, **more},
        vision_config=_ENCODER,
        mm_tokens_per_image=1,
        boi_token_index=60,
        eoi_token_index=61,
        image_token_index=62,
        **more,
    )


def _qwen3_5(**more: Any) -> Any:
    return transformers.Qwen3_5Config(
        text_config={**_TEXT, **_LINEAR, **more}, vision_config=_QWEN_VISION, **_QWEN_TOKENS, **more
    )


def _qwen3_5_moe(**more: Any) -> Any:
    text = {
        **_TEXT,
        **_LINEAR,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **more,
    }
    return transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config=_QWEN_VISION, **_QWEN_TOKENS, **more
    )


def _llava(**more: Any) -> Any:
    vision = {**_ENCODER, "model_type": "clip_vision_model", "projection_dim": 32}
    text = {**_TEXT, "model_type": "llama", **more}
    return transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=60, **more
    )


def _mistral3(**more: Any) -> Any:
    vision = {**_ENCODER, "model_type": "pixtral", "head_dim": 16}
    text = {**_TEXT, "model_type": "mistral", **more}
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=10, **more
    )


CONFIGS: dict[str, Callable[..., Any]] = {
    "gemma3": _gemma3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "llava": _llava,
    "mistral3": _mistral3,
}
TEXT_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
}


def save_whole(directory: Path, family: str, *, seed: int = 0, **more: Any) -> Any:
    """A vision-language model of random weights in bf16, saved by transformers; the model.

    Beside the weights lie a processor, a tokenizer and a chat template, as far as files go.
    """
    torch.manual_seed(seed)
    config = CONFIGS[family](**more)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer.json"):
        (directory / name).write_text(json.dumps({"of": "base"}))
    (directory / "chat_template.jinja").write_text("base")
    return model


def save_trained_text(directory: Path, whole: Any, family: str, *, steps: int = 2) -> Any:
    """The language model of `whole` with its own weights, trained a little, saved; the model."""
    cls = getattr(transformers, TEXT_CLASSES[family])
    text = cls(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    optimizer = torch.optim.AdamW(text.parameters(), lr=1e-2)
    tokens = torch.arange(1, 25).reshape(2, 12)
    for _ in range(steps):
        text(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    text.to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"of": "export"}))
    return text


def edit_config(directory: Path, **changes: Any) -> None:
    """Change config.json; a value of None takes the key out."""
    place = directory / "config.json"
    document = {**json.loads(place.read_bytes()), **changes}
    kept = {key: value for key, value in document.items() if value is not None}
    place.write_text(json.dumps(kept))
