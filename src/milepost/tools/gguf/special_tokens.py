"""Ids with a meaning, what is put around a text, and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.gguf.token_table import TokenTable

_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def special_keys(
    directory: Path,
    document: dict[str, Any],
    settings: dict[str, Any],
    config: dict[str, Any],
    table: TokenTable,
) -> Keys:
    """From `tokenizer_config.json` (`settings`); ids that it does not name from config.json.

    `document` is the content of tokenizer.json, empty without one.
    """
    keys: Keys = {}
    for short, name in _NAMES.items():
        number = _id(settings.get(f"{short}_token"), config.get(f"{short}_token_id"), table)
        if number is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = number
    around = _around(document)
    is_sentencepiece = not document  # its models of this kind start with bos
    for short, place in (("bos", 0), ("eos", -1)):
        stated = settings.get(f"add_{short}_token")
        if around is not None:
            token = _text(settings.get(f"{short}_token"))
            is_added = token is not None and around[place] == token
        else:
            is_added = stated if isinstance(stated, bool) else is_sentencepiece and short == "bos"
        keys[f"tokenizer.ggml.add_{short}_token"] = is_added
    template = _chat_template(directory, settings)
    if template:
        keys["tokenizer.chat_template"] = template
    return keys


def _text(entry: Any) -> str | None:
    """The text of a token that is written as such, or as an added token."""
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def _id(entry: Any, stated: Any, table: TokenTable) -> int | None:
    number = table.ids.get(_text(entry) or "")
    if number is not None:
        return number
    first = stated[0] if isinstance(stated, list) and stated else stated
    is_known = isinstance(first, int) and first in set(table.ids.values())
    return first if is_known else None


def _around(document: dict[str, Any]) -> list[str | None] | None:
    """The template of a text: special tokens, None where the text is; None without a template."""
    processor = document.get("post_processor") or {}
    for part in processor.get("processors", [processor]):
        if part.get("type") == "TemplateProcessing" and part.get("single"):
            return [step.get("SpecialToken", {}).get("id") for step in part["single"]]
    return None


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | list[Any] | None:
    """One template, or several as `[{"name": ..., "template": ...}]`."""
    found = settings.get("chat_template")
    if isinstance(found, str | list) and found:
        return found
    try:
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        return _older_template(directory / "chat_template.json")
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if not others:
        return template
    named = [("default", template), *((p.stem, p.read_text(encoding="utf-8")) for p in others)]
    return [{"name": name, "template": text} for name, text in named]


def _older_template(path: Path) -> str | None:
    try:
        found = json.loads(path.read_bytes()).get("chat_template")
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
