"""Byte-level BPE, the tokenizers of GPT-2's kind."""

from __future__ import annotations

from typing import Any

from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.gguf.token_table import TokenTable, TokenType

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")

# How text is cut before merges, and the name by which readers of GGUF cut in the same way.
_NAMES: dict[tuple[str, ...], str] = {
    ("byte-level",): "gpt-2",
    ("digits", "byte-level"): "smollm",
    (LLAMA3_SPLIT,): "llama-bpe",
    (QWEN2_SPLIT,): "qwen2",
}


def byte_level_keys(document: dict[str, Any], table: TokenTable) -> Keys:
    """Fill `table` with the vocabulary of a tokenizer.json; the keys of its model."""
    model = document["model"]
    pre = pre_tokenizer_name(document, table)
    _require_no_normalizer(document.get("normalizer"), table)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise table.refuse(f"{key} {model[key]!r} has no place in GGUF")
    for text, number in model["vocab"].items():
        table.put(number, text, TokenType.NORMAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges_of(model, table)],
    }


def merges_of(model: dict[str, Any], table: TokenTable) -> list[tuple[str, str]]:
    """The merges in order, out of either form that a tokenizer.json has."""
    found = []
    for merge in model.get("merges") or ():
        pair = merge.split(" ") if isinstance(merge, str) else list(merge)
        if len(pair) != 2 or any(" " in part for part in pair):
            raise table.refuse(f"merge {merge!r} is no pair of two words")
        found.append((pair[0], pair[1]))
    return found


def pre_tokenizer_name(document: dict[str, Any], table: TokenTable) -> str:
    """What GGUF calls the way in which the tokenizer cuts text, told by its declaration."""
    steps = flattened(document.get("pre_tokenizer"), "pretokenizers")
    name = _NAMES.get(tuple(found for step in steps if (found := _step(step)) is not None))
    is_plain = steps and steps[-1].get("type") == "ByteLevel"
    if name is None or not is_plain or steps[-1].get("add_prefix_space"):
        raise table.refuse(
            "cuts text in a way that has no name that to-gguf knows, and under another one readers "
            f"would make other tokens; known: {', '.join(_NAMES.values())}"
        )
    return name


def flattened(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer; those of a sequence are under `key`."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[key] for step in flattened(inner, key)]


def _step(step: dict[str, Any]) -> str | None:
    """A step in one word, or the expression by which it cuts; None for one that cuts nothing."""
    kind = step.get("type")
    if kind == "ByteLevel":
        return "byte-level" if step.get("use_regex", True) else None
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step.get("pattern", {}).get("Regex"))
    return str(kind)


def _require_no_normalizer(part: dict[str, Any] | None, table: TokenTable) -> None:
    """NFC is let through: readers leave text as it is, which nearly always is NFC."""
    for step in flattened(part, "normalizers"):
        if step.get("type") != "NFC":
            raise table.refuse(
                f"normalises text ({step.get('type')}), which readers of byte-level tokenizers in "
                "GGUF do not"
            )
