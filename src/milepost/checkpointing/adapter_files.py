"""The documents beside weights and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from milepost.adapters.config import EXPERT_LORA, MIXED_LORA
from milepost.adapters.kinds import MARKER_NAME, marker_bytes
from milepost.checkpointing.adapter_save import Adapters, AdapterSave, joined
from milepost.checkpointing.capture import Captured, State
from milepost.checkpointing.files import PlannedFile, document_file, views_of_set
from milepost.checkpointing.stage_ties import ties_of
from milepost.format import strictjson
from milepost.format.manifest import AdapterEntry
from milepost.hf.aux_files import CARD, AuxFiles, collect_model_files
from milepost.hf.card import new_card
from milepost.hf.foreign_calls import attempt
from milepost.hf.processing import processing_files
from milepost.plan.inventory import Inventory


@dataclass(slots=True, kw_only=True)
class ModelDocuments:
    """`huggingface` are the keys of the models that load there."""

    files: list[PlannedFile] = field(default_factory=list)
    huggingface: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def files_of_models(
    state: State,
    captured: Captured,
    inventory: Inventory,
    adapters: Mapping[str, AdapterSave],
    processing_class: Any | None,
) -> ModelDocuments:
    """Config, tokenizer and card of every model, and what says what their adapters are."""
    found = ModelDocuments()
    for key in captured.models:
        prefix, saved = captured.prefixes[key], adapters.get(key)
        processing = processing_class if prefix == "" else None
        aux = _files_of_model(state[key], saved, key, inventory, processing)
        found.notes += [f"{key}: {note}" for note in aux.notes]
        if "config.json" in aux.files:
            found.huggingface.append(key)
        if saved is not None:
            found.files += adapter_files(saved, prefix)
        for name, data in aux.files.items():
            found.files.append(document_file(joined(prefix, name), data, "info"))
    return found


def _files_of_model(
    model: Any,
    saved: AdapterSave | None,
    key: str,
    inventory: Inventory,
    processing_class: Any | None,
) -> AuxFiles:
    """The documents beside the weights of the model `key`, or beside its adapter alone."""
    if saved is not None and saved.kind is Adapters.ALONE:
        return _beside_adapter(saved, processing_class)
    ties = ties_of(inventory, key)
    return collect_model_files(
        model if saved is None else saved.model,
        processing_class=processing_class,
        ties=ties,
        dtype_names=[leaf.dtype for leaf in inventory.sets[key].values()],
        saved_names=[*inventory.on_disk(key), *inventory.ties_on_disk(key, ties)],
    )


def _beside_adapter(saved: AdapterSave, processing_class: Any | None) -> AuxFiles:
    result = AuxFiles()
    if processing_class is not None:
        files, notes = processing_files(processing_class)
        result.files.update(files)
        result.notes.extend(notes)
    is_stock = saved.document.get("peft_type") not in (EXPERT_LORA, MIXED_LORA)
    base = saved.document.get("base_model_name_or_path")
    make = partial(new_card, library_name="peft" if is_stock else None, base_model=base)
    card, problem = attempt(make)
    if card is not None:
        result.files[CARD] = card
    else:
        result.notes.append(f"model card: not written: {problem}")
    return result


def adapter_entries(
    adapters: Mapping[str, AdapterSave], inventory: Inventory
) -> dict[str, AdapterEntry]:
    """What the manifest says of the adapters, by the keys of their models."""
    return {
        key: saved.entry(views_of_set(inventory, saved.placed)) for key, saved in adapters.items()
    }


def adapter_files(saved: AdapterSave, prefix: str) -> list[PlannedFile]:
    """The configuration of an adapter, and beside merged weights the marker that names it."""
    document = strictjson.dumps(saved.document, indent=2, sort_keys=True) + b"\n"
    files = [document_file(saved.config_name, document, "weights")]
    if saved.kind is Adapters.MERGED:
        files.append(document_file(joined(prefix, MARKER_NAME), marker_bytes(), "weights"))
    return files
