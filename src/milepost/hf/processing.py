"""Files of the tokenizer or processor, with the chat template that training used."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from milepost.hf.foreign_calls import attempt
from milepost.hf.live import source_directory

ChatTemplate: TypeAlias = str | dict[str, str]

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
# The file that processors of transformers 4 read; it holds one template and no more.
PROCESSOR_TEMPLATE = "chat_template.json"
_EXTRA_TEMPLATES = "additional_chat_templates"
# What a tokenizer or processor directory can consist of, beside Python modules and weights.
_SOURCE_FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "*processor_config.json",
    "chat_template.*",
    f"{_EXTRA_TEMPLATES}/*.jinja",
)


def processing_files(processing_class: Any) -> tuple[dict[str, bytes], list[str]]:
    """Files by relative name, and notes; never raises for what the tokenizer does.

    A tokenizer that cannot save itself is replaced by the files it was loaded from.
    """
    notes: list[str] = []
    files, problem = attempt(lambda: _saved(processing_class))
    if files is None:
        files, failed = attempt(lambda: _copied(processing_class))
        notes.append(_not_saved(processing_class, str(problem), failed, files))
        files = files or {}
    template = template_in_use(processing_class)
    conflicts, _ = attempt(lambda: _template_conflicts(processing_class, template))
    notes += conflicts or []
    if template is not None:
        notes += _put_template(files, processing_class, template)
    return files, notes


def _saved(processing_class: Any) -> dict[str, bytes]:
    """What `save_pretrained` writes, by way of a private directory outside the run."""
    with tempfile.TemporaryDirectory(prefix="milepost-") as name:
        directory = Path(name)
        processing_class.save_pretrained(str(directory))
        return {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }


def _copied(processing_class: Any) -> dict[str, bytes]:
    """The files the processing class came from, when it cannot save itself."""
    source = source_directory(processing_class)
    if source is None:
        return {}
    found = {path for pattern in _SOURCE_FILES for path in source.glob(pattern) if path.is_file()}
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in sorted(found)}


def _not_saved(
    processing_class: Any, problem: str, failed: str | None, files: dict[str, bytes] | None
) -> str:
    start = f"tokenizer: {type(processing_class).__name__}.save_pretrained failed ({problem})"
    if files:
        source = source_directory(processing_class)
        return f"{start}; the files of {source} are copied, without what the run changed in it"
    why = f"its source cannot be read ({failed})" if failed else "it has no local source"
    return f"{start} and {why}; the checkpoint has no tokenizer files, add them before using it"


def template_in_use(processing_class: Any) -> ChatTemplate | None:
    """The chat template that the live object renders with; one by name when it has several."""
    for holder in (processing_class, getattr(processing_class, "tokenizer", None)):
        template = getattr(holder, "chat_template", None)
        if isinstance(template, Mapping):
            return {str(k): str(v) for k, v in template.items()}
        if template is not None:
            return str(template)
    return None


def _put_template(
    files: dict[str, bytes], processing_class: Any, template: ChatTemplate
) -> list[str]:
    """Write the template into each place that some reader looks at; all of them say the same."""
    for name in [n for n in files if n.startswith(f"{_EXTRA_TEMPLATES}/")]:
        del files[name]
    files.pop(JINJA, None)
    files.pop(PROCESSOR_TEMPLATE, None)
    named = {"default": template} if isinstance(template, str) else template
    for name, text in named.items():
        place = JINJA if name == "default" else f"{_EXTRA_TEMPLATES}/{name}.jinja"
        files[place] = text.encode()
    if isinstance(template, str) and getattr(processing_class, "tokenizer", None) is not None:
        document = {"chat_template": template}
        files[PROCESSOR_TEMPLATE] = (json.dumps(document, indent=2) + "\n").encode()
    return _put_inline(files, template)


def _put_inline(files: dict[str, bytes], template: ChatTemplate) -> list[str]:
    """The template inside tokenizer_config.json, where servers before the jinja file look."""
    raw = files.get(TOKENIZER_CONFIG)
    if raw is None:
        return []
    document, problem = attempt(lambda: json.loads(raw))
    if not isinstance(document, dict):
        return [f"{TOKENIZER_CONFIG}: left as it is, it is no JSON object ({problem})"]
    if isinstance(template, str):
        document["chat_template"] = template
    else:
        document["chat_template"] = [{"name": k, "template": v} for k, v in template.items()]
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files[TOKENIZER_CONFIG] = text.encode()
    return []


def _template_conflicts(processing_class: Any, used: ChatTemplate | None) -> list[str]:
    """Where the live object and the files it came from do not agree on the chat template."""
    notes = []
    inner = getattr(getattr(processing_class, "tokenizer", None), "chat_template", None)
    own = getattr(processing_class, "chat_template", None)
    if own is not None and inner is not None and own != inner:
        notes.append(
            "chat template: the processor and its tokenizer have different ones; the processor's "
            "is written"
        )
    source = source_directory(processing_class)
    stored = {} if source is None else stored_templates(source)
    if len({json.dumps(template, sort_keys=True) for template in stored.values()}) > 1:
        notes.append(
            f"chat template: {' and '.join(stored)} of {source} hold different ones; the one in "
            f"use in this run is written to every place"
        )
    elif stored and used not in stored.values():
        now = "has none" if used is None else "uses another, which is written"
        notes.append(f"chat template: {next(iter(stored))} of {source} has one, this run {now}")
    return notes


def stored_templates(directory: Path) -> dict[str, ChatTemplate]:
    """The default chat templates of a directory by the file that holds them.

    One that cannot be read counts as absent. Several by name are a mapping, one is its text.
    """
    found: dict[str, ChatTemplate] = {}
    for name in (TOKENIZER_CONFIG, PROCESSOR_TEMPLATE):
        document, _ = attempt(lambda name=name: json.loads((directory / name).read_bytes()))  # type: ignore[misc]
        template = document.get("chat_template") if isinstance(document, dict) else None
        if isinstance(template, str):
            found[name] = template
        elif isinstance(template, list):
            entries = [e for e in template if isinstance(e, dict) and {"name", "template"} <= {*e}]
            found[name] = {str(e["name"]): str(e["template"]) for e in entries}
    named = {path.stem: path for path in sorted((directory / _EXTRA_TEMPLATES).glob("*.jinja"))}
    if (directory / JINJA).is_file():
        named["default"] = directory / JINJA
    texts = {k: path.read_text("utf-8", "replace") for k, path in named.items()}
    if texts:
        found[JINJA] = texts["default"] if [*texts] == ["default"] else texts
    return found
