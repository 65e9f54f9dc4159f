"""What is odd about the files beside weights that are carried as they are; without transformers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from milepost.hf.foreign_calls import attempt
from milepost.hf.remote_code import module_names

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
# Values that mean "not set" for settings that only sampling reads.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0,
             "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}  # fmt: skip


def side_file_notes(texts: Mapping[str, bytes], present: Collection[str]) -> list[str]:
    """Notes about a generation config that contradicts itself, chat templates that differ, and
    Python modules that config.json names and that are not among the `present` files."""
    documents = {name: _object(raw) for name, raw in texts.items() if name.endswith(".json")}
    notes = _generation_notes(documents.get(_GENERATION, {}))
    notes += _template_notes(texts, documents)
    return notes + _code_notes(documents.get(_CONFIG, {}), present)


def _object(raw: bytes) -> dict[str, Any]:
    document, _ = attempt(lambda: json.loads(raw))
    return document if isinstance(document, dict) else {}


def _generation_notes(document: Mapping[str, Any]) -> list[str]:
    if document.get("do_sample", False):
        return []
    odd = [
        f"{key}={document[key]}"
        for key, unset in _SAMPLING.items()
        if document.get(key) is not None and document[key] != unset
    ]
    if not odd:
        return []
    return [
        f"{_GENERATION}: carried as it is, but transformers calls it invalid: {', '.join(odd)} "
        "without do_sample"
    ]


def _template_notes(
    texts: Mapping[str, bytes], documents: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    found = {
        name: documents.get(name, {}).get("chat_template")
        for name in (TOKENIZER_CONFIG, OLD_TEMPLATE)
    }
    if TEMPLATE in texts:
        found[TEMPLATE] = texts[TEMPLATE].decode("utf-8", "replace")
    held = {name: text for name, text in found.items() if isinstance(text, str)}
    if len({text.strip() for text in held.values()}) < 2:
        return []
    return [
        f"chat templates differ between {', '.join(sorted(held))}; all are carried, and readers "
        f"do not agree on which counts (transformers takes {TEMPLATE})"
    ]


def _code_notes(config: Mapping[str, Any], present: Collection[str]) -> list[str]:
    names = sorted(module_names(config.get("auto_map")))
    missing = [name for name in names if f"{name.replace('.', '/')}.py" not in present]
    if not missing:
        return []
    return [
        f"config.json: auto_map names {', '.join(missing)}, and no such Python module lies beside "
        "it; without it the model's code cannot be loaded from here"
    ]
