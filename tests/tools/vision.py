"""A small vision-language model whose stored names are others than those of its modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_IMAGE = 60


def save_gemma3(directory: Path) -> Path:
    """A Gemma 3 of random weights in bf16, tied, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=_TEXT,
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=_IMAGE,
        boi_token_index=61,
        eoi_token_index=62,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(directory)
    return directory


def load_vision(directory: Path) -> Any:
    """The model in a directory in fp32, with the head that writes text."""
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(directory, dtype=torch.float32)


def seen(model: Any) -> torch.Tensor:
    """Logits of a text with an image in it."""
    ids = torch.tensor([[2, 61, _IMAGE, _IMAGE, _IMAGE, _IMAGE, 62, 5, 6, 7]])
    pixels = torch.linspace(-1, 1, 3 * 28 * 28).reshape(1, 3, 28, 28)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(
            input_ids=ids, pixel_values=pixels, token_type_ids=(ids == _IMAGE).long()
        ).logits
    return logits
