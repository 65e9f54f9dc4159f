"""Tiny models and tokenizers, made from nothing, and directories written from them."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

Write: TypeAlias = Callable[[Path, Any, Mapping[str, bytes]], None]

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "The")


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *WORDS))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


def make_model(family: str, **overrides: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    gpt2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, sizes),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, sizes),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, gpt2),
    }
    config, cls, known = kinds[family]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return cls(config(**{**known, **ids, **overrides}))


def ties_of(model: Any) -> dict[str, str]:
    """Left-out name to saved name, for tensors that are one object."""
    seen: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            ties[name] = first
    return ties


def dtypes_of(model: Any) -> list[str]:
    return [str(p.dtype).removeprefix("torch.") for p in model.parameters()]


def write_directory(directory: Path, model: Any, files: Mapping[str, bytes]) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    left_out = ties_of(model)
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in left_out}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()
