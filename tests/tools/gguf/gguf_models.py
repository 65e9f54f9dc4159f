"""Tiny models of real families with tokenizers of their own, and GGUF files read back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3MoeConfig,
)

from milepost.tools.gguf.byte_level import QWEN2_SPLIT
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.to_gguf import to_gguf

QUICK = RewriteOptions(is_durable=False, threads=2)
ROWS = 320
LLAMA_ROWS = 456
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LINES = [
    "Paris is the capital of France, and Lyon is not.",
    "The quick brown fox jumps over 13 lazy dogs; it's 2026 already!",
    "  two spaces, a tab\tand a line\nend\n\n and naïve café — 東京 🙂",
    "for i in range(10):\n    print(i ** 2)  # squares",
]

_SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=128),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SHAPE, **_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, norm_topk_prob=True),
}


def tiny(family: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """A model of the family with values that no two tensors share, saved with its tokenizer."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if tensor.dim() == 1 else 0.0))
    model.save_pretrained(directory)
    qwen_tokenizer().save_pretrained(directory)
    found: PreTrainedModel = model
    return found


@cache
def qwen_tokenizer() -> Any:
    """Byte-level, cut as Qwen2 cuts, with tokens that were added and a chat template."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(LINES, trainer)
    vocab, merges = _content(trained)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@cache
def llama_tokenizer() -> Any:
    """SentencePiece's kind: BPE over characters with bytes to fall back to."""
    trained = Tokenizer(models.BPE(byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=LLAMA_ROWS - 256,
        limit_alphabet=30,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    trained.train_from_iterator(LINES, trainer)
    vocab, _ = _content(trained)
    pieces = sorted((t for t in vocab if len(t) > 1 and vocab[t] > 2), key=vocab.__getitem__)
    merges = [
        (text[:cut], text[cut:])
        for text in pieces
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)


def _content(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [(left, right) for left, right in model["merges"]]


def write(source: Path, output: Path, dtype: str, **changes: Any) -> RewriteReport:
    return to_gguf(source, output, dtype=dtype, options=QUICK, **changes)


def tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a file as the package gguf reads them."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values_of(tensor: Any) -> torch.Tensor:
    """The values of such a tensor in float32, in torch's order of dims."""
    shape = [int(size) for size in reversed(tensor.shape)]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values)).reshape(shape)


def keys_of(path: Path) -> dict[str, Any]:
    """All keys and their values."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 7 % ROWS
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    return found
