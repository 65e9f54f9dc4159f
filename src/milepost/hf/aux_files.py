"""Everything that makes a directory a complete Hugging Face model, besides the weights.

The functions return content; whoever saves writes it in its own crash-safe way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from milepost.hf.card import tag_card
from milepost.hf.foreign import drop_draft_layers, foreign_notes, foreign_weights
from milepost.hf.foreign_calls import attempt
from milepost.hf.generation import generation_document
from milepost.hf.live import hf_config, source_directory, unwrap
from milepost.hf.model_config import config_document, encode
from milepost.hf.processing import processing_files
from milepost.hf.remote_code import (
    collect_modules,
    live_auto_map,
    local_auto_map,
    module_names,
)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
CARD = "README.md"
_WITH_AUTO_MAP = (
    CONFIG,
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

_warned_cards: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxFiles:
    """`files`: content by name relative to the checkpoint; `notes`: what the caller reports."""

    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def collect_model_files(
    model: Any,
    *,
    processing_class: Any | None = None,
    ties: Mapping[str, str],
    dtype_names: Iterable[str],
    saved_names: Iterable[str] | None = None,
) -> AuxFiles:
    """The files beside the weights of `model`, which may still be wrapped (DDP, FSDP, PEFT), or a
    list of modules that together are one.

    `ties` maps each tied name that was left out to the saved name of its tensor; `dtype_names` is
    the dtype of every saved tensor. With `saved_names`, tensors of the source directory that are
    neither saved nor tied are reported, and counts of prediction layers that are not saved are 0.

    Nothing is executed, downloaded or changed in the model, and trouble with a side file is a
    note, never an error. No tensor is read, so one rank may call it.
    """
    return _collect(model, processing_class, _Saved(ties, tuple(dtype_names), saved_names))


def check_model_files(model: Any, processing_class: Any | None = None) -> list[str]:
    """What a save of this model would report, found at the start of a run instead of its end."""
    return _collect(model, processing_class, _Saved(None, (), None)).notes


@dataclass(frozen=True, slots=True)
class _Saved:
    """What is known about the weight files; None where nobody looked."""

    ties: Mapping[str, str] | None
    dtype_names: tuple[str, ...]
    names: Iterable[str] | None


def _collect(model: Any, processing_class: Any | None, saved: _Saved) -> AuxFiles:
    # The stages of a pipeline are one model, and each holds its configuration.
    inner = unwrap(model[0] if isinstance(model, list | tuple) else model)
    config = hf_config(inner)
    result = AuxFiles()
    if processing_class is not None:
        files, notes = processing_files(processing_class)
        result.files.update(files)
        result.notes.extend(notes)
    if config is None:
        kind = type(inner).__name__
        result.notes.append(f"not a Hugging Face model: {kind} has no config.json")
    else:
        _guarded(result, CONFIG, lambda: _add_config(result, inner, config, saved))
        _guarded(result, GENERATION_CONFIG, lambda: _add_generation(result, inner))
        _guarded(result, CARD, lambda: _add_card(result, source_directory(inner)))
    things = [inner, config, processing_class]
    _guarded(result, "remote code not copied", lambda: _add_remote_code(result, things))
    return result


def _guarded(result: AuxFiles, what: str, add: Callable[[], None]) -> None:
    """Run one step; whatever it raises is a note, because the weights matter more."""
    _, problem = attempt(add)
    if problem is not None:
        result.notes.append(f"{what}: {problem}")


def _add_config(result: AuxFiles, model: Any, config: Any, saved: _Saved) -> None:
    document, notes = config_document(model, config, ties=saved.ties, dtype_names=saved.dtype_names)
    live = live_auto_map([model, config])
    if live:
        document["auto_map"] = {**(document.get("auto_map") or {}), **live}
    result.notes.extend(notes)
    source = source_directory(model)
    if saved.names is not None and source is not None:
        names = {*saved.names, *(saved.ties or {})}
        _guarded(
            result,
            "weights of the source not compared",
            lambda: _compare(result, document, source, names),
        )
    result.files[CONFIG] = encode(document)


def _compare(result: AuxFiles, document: dict[str, Any], source: Path, saved: set[str]) -> None:
    foreign = foreign_weights(source, saved)
    result.notes.extend(foreign_notes(source, foreign))
    result.notes.extend(drop_draft_layers(document, foreign))


def _add_generation(result: AuxFiles, model: Any) -> None:
    content, notes = generation_document(model)
    result.notes.extend(notes)
    if content is not None:
        result.files[GENERATION_CONFIG] = content


def _add_remote_code(result: AuxFiles, things: list[Any]) -> None:
    """Copy the modules that the documents name in auto_map, and make those maps local."""
    files = result.files
    documents = {name: document for name, document in _documents(files) if "auto_map" in document}
    names = {name for document in documents.values() for name in module_names(document["auto_map"])}
    if not names:
        return
    present = {name for name in names if f"{name}.py" in files}  # copied by the tokenizer's save
    modules = collect_modules(names - present, things)
    for name, document in documents.items():
        auto_map = document["auto_map"]
        if isinstance(auto_map, Mapping):
            document["auto_map"] = local_auto_map(auto_map, modules.names | present)
            files[name] = encode(document)
    files.update(modules.files)
    result.notes.extend(modules.notes)


def _documents(files: Mapping[str, bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, raw in files.items():
        if name in _WITH_AUTO_MAP:
            document, _ = attempt(partial(json.loads, raw))
            if isinstance(document, dict):
                yield name, document


def _add_card(result: AuxFiles, source: Path | None) -> None:
    """The source's card, tagged; as it is where it cannot be edited; a new one without a source."""
    path = None if source is None else source / CARD
    text = path.read_bytes() if path is not None and path.is_file() else None
    card, problem = attempt(partial(tag_card, text, where=str(path)))
    result.files[CARD] = card if card is not None else text or b""
    if problem is not None and str(path) not in _warned_cards:
        _warned_cards.add(str(path))
        result.notes.append(f"model card: copied without the tag: {problem}")
