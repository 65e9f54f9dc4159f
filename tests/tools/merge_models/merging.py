"""Small models to merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from milepost.tools.merging.recipe import Recipe, recipe_from_command_line
from milepost.tools.rewrite.options import RewriteOptions

FAST = RewriteOptions(is_durable=False)
WORDS = ["<s>", "</s>", *(f"word{n}" for n in range(62))]


def write_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(WordLevel(vocabulary, unk_token="<s>")).save(str(path / "tokenizer.json"))


def write_model(
    path: Path,
    seed: int,
    words: list[str] = WORDS,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {"tie_word_embeddings": False, **more}
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **fields,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.to(dtype).save_pretrained(path)
    write_tokenizer(path, words)
    return path


def weights(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(path / "model.safetensors")
    return tensors


def command(models: list[Path], **more: Any) -> Recipe:
    fields: dict[str, Any] = {
        "method": "linear",
        "base": None,
        "dtype": None,
        "knobs": {},
        "settings": (),
        "tokenizer": None,
        "seed": 0,
        **more,
    }
    return recipe_from_command_line([str(path) for path in models], **fields)
