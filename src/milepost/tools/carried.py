"""Which files beside the weights a new directory takes over from the checkpoint it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.adapters.kinds import ADAPTER_CONFIG, ADAPTER_STEM
from milepost.errors import InvalidInputError
from milepost.format.manifest import Role
from milepost.format.tree import decode
from milepost.hf.aux_files import CARD, CONFIG, GENERATION_CONFIG
from milepost.hf.card import new_card, tag_card
from milepost.hf.foreign_calls import attempt
from milepost.hf.side_file_notes import OLD_TEMPLATE, TEMPLATE, TOKENIZER_CONFIG, side_file_notes
from milepost.hf.sidecar_files import SIDECARS
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from milepost.storage.staging import STAGING_PREFIX
from milepost.tools.sources import tensor_set_of

TRAINER_STATE = "trainer_state.json"
_OTHER_FORMATS = frozenset({"original", "consolidated", "metal", "onnx", "openvino"})
_NOTED = (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, TEMPLATE, OLD_TEMPLATE)
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
)
_OF_A_TRAINER = frozenset({TRAINER_STATE, "training_args.bin", "reference_logps.pt"})


@dataclass(slots=True, kw_only=True)
class Carried:
    """`paths` are copied, `documents` are written anew, both by name in the new directory.

    `roles` are those of the manifest, for files that have another than theirs by `needs`."""

    paths: dict[str, Path] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)

    def role(self, name: str) -> Role:
        """What the file is to a load: weights and state must be intact, info only informs."""
        return self.roles.get(name, "weights" if name in self.needs else "info")

    @property
    def names(self) -> set[str]:
        return {*self.paths, *self.documents}


def needed_sidecars(checkpoint: Checkpoint) -> list[str]:
    """Files that must accompany the weights: what the manifest says, or what lies there."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return list(checkpoint.manifest.needs)
    if isinstance(checkpoint, HuggingFaceCheckpoint) and checkpoint.path.is_dir():
        return [name for name in SIDECARS if (checkpoint.path / name).is_file()]
    return []


def carried_files(checkpoint: Checkpoint) -> Carried:
    """Config, tokenizer, card, remote code and sidecars; no weights and no training state.

    `InvalidInputError` when a sidecar that the weights need is not there to be carried.
    """
    carried = Carried(needs=needed_sidecars(checkpoint))
    if isinstance(checkpoint, DirectoryCheckpoint):
        carried.paths.update(_of_directory(checkpoint))
    elif isinstance(checkpoint, HuggingFaceCheckpoint) and checkpoint.path.is_dir():
        carried.paths.update(_of_foreign(checkpoint.path))
    missing = [name for name in carried.needs if name not in carried.paths]
    if missing:
        raise InvalidInputError(
            f"{checkpoint.path}: its weights need {', '.join(missing)}, which is not there; an "
            "export without it would not be the model that was trained; put it back, or export "
            "another checkpoint",
            path=checkpoint.path,
        )
    tensors = tensor_set_of(checkpoint)
    if tensors is not None and tensors.stem == ADAPTER_STEM:
        _add_card(carried)
        return carried
    if carried.paths.pop(ADAPTER_CONFIG, None) is not None:
        carried.notes.append(
            f"{ADAPTER_CONFIG} is left behind: the weights are those of a whole model, and loaders "
            "would look for an adapter beside them"
        )
    _add_config(carried, checkpoint)
    _add_card(carried)
    _add_notes(carried)
    return carried


def _of_directory(checkpoint: DirectoryCheckpoint) -> Iterator[tuple[str, Path]]:
    manifest = checkpoint.manifest
    others = ["training", *(entry.prefix for entry in manifest.models.values() if entry.prefix)]
    for entry in manifest.files:
        inside = any(entry.name.startswith(f"{prefix}/") for prefix in others)
        wanted = entry.role == "info" and not inside and entry.name not in _OF_A_TRAINER
        if wanted or entry.name in manifest.needs or entry.name == ADAPTER_CONFIG:
            yield entry.name, checkpoint.path / entry.name


def _of_foreign(path: Path) -> Iterator[tuple[str, Path]]:
    """Everything but weights, training state and hidden files; symlinks are read through.

    Modules of a Sentence Transformers model lie in directories of their own, with their weights.
    """
    modules = _module_directories(path / "modules.json")
    for place in sorted(path.rglob("*")):
        relative = place.relative_to(path)
        name = relative.as_posix()
        if not place.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        if relative.parts[0].startswith(("checkpoint-", STAGING_PREFIX)):
            continue  # steps of a run that has its final model at the top
        if len(relative.parts) > 1 and _is_left_behind(relative.parts[0]):
            continue
        is_weights = place.suffix in _WEIGHT_SUFFIXES or name.endswith(".index.json")
        is_weights = is_weights and relative.parts[0] not in modules
        if name in SIDECARS or not (is_weights or name in _OF_A_TRAINER):
            yield name, place


def _module_directories(listing: Path) -> set[str]:
    """The directories that a `modules.json` names; empty without one."""
    modules, _ = attempt(lambda: json.loads(listing.read_bytes()))
    found = modules if isinstance(modules, list) else []
    paths = [module.get("path") for module in found if isinstance(module, dict)]
    return {path.partition("/")[0] for path in paths if isinstance(path, str)} - {""}


def _is_left_behind(directory: str) -> bool:
    """Directories with the same weights in other formats, or with nothing of the model."""
    return directory in _OTHER_FORMATS or directory.startswith("_")


def _add_notes(carried: Carried) -> None:
    """What a reader of the files that go along should know; they are carried as they are."""
    texts = {name: _text_of(carried, name) for name in carried.names if name in _NOTED}
    carried.notes += side_file_notes(texts, carried.names)


def _text_of(carried: Carried, name: str) -> bytes:
    return (
        carried.documents[name] if name in carried.documents else carried.paths[name].read_bytes()
    )


def _add_config(carried: Carried, checkpoint: Checkpoint) -> None:
    """`config.json` out of the recorded configuration where that is one of transformers."""
    if CONFIG in carried.names:
        return
    config = _recorded_config(checkpoint)
    if isinstance(config.get("model_type"), str):
        carried.documents[CONFIG] = json.dumps(config, indent=2, default=str).encode() + b"\n"
    else:
        carried.notes.append(
            "no config.json: the checkpoint records no transformers configuration, so "
            "from_pretrained cannot load this directory"
        )


def _recorded_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.info.model_config
    if isinstance(checkpoint, DirectoryCheckpoint) and config is not None:
        config = decode(config, None, where=f"{checkpoint.path}: model_config")
    return dict(config) if isinstance(config, Mapping) else {}


def _add_card(carried: Carried) -> None:
    """The card with our tag; as it is where it cannot be edited."""
    place = carried.paths.get(CARD)
    text = None if place is None else place.read_bytes()
    card, problem = attempt(lambda: tag_card(text) if text is not None else new_card())
    if card is not None and card != text:
        carried.paths.pop(CARD, None)
        carried.documents[CARD] = card
    if problem is not None:
        carried.notes.append(f"model card: copied without the tag: {problem}")
