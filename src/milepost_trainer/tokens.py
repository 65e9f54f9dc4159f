"""The tokenizer of a run: the model's own, or a byte-level one that needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PAD, END = "<pad>", "<end>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_for(base: Path | dict[str, Any], *, needs_pad: bool = False) -> Any:
    """That of the directory `base`; for random weights, one token a byte.

    `needs_pad` is for models that people call with padded rows: where there is no token for
    padding, it is the end token.
    """
    if not isinstance(base, Path):
        return byte_level_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(base)
    if needs_pad and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_level_tokenizer() -> Any:
    """One token for each of the 256 bytes, and two special ones; with a plain chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast
