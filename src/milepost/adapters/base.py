"""The model under an adapter: its tensors without what peft put around them, and where it is from.

In the names of files a merged model has no adapter: modules that were trained as a whole stand in
place of those they replaced, and every other tensor has the name that it had before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from milepost.adapters.fold import Change
from milepost.adapters.live import LiveAdapter, is_peft_model
from milepost.adapters.names import PREFIX, without_wrappers
from milepost.errors import CheckpointError
from milepost.format import strictjson
from milepost.format.digests import digest_of
from milepost.hf.foreign_calls import attempt
from milepost.hf.live import hf_config, source_directory
from milepost.hf.live import unwrap as unwrap_all
from milepost.layouts.directory import read_manifest
from milepost.state.leaves import Leaves
from milepost.state.model import ModelState
from milepost.state.names import FQN, Model, unwrap

_COPIED = re.compile(r"(^|\.)modules_to_save\.[^.]+\.")
_PEFT_MODEL = re.compile(rf"(^|\.){re.escape(PREFIX)}")
_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HEADER_NBYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class MergedBase:
    """A model as it is on disk with its adapter folded in. `state` has live tensors of the base
    under the names of files; `changes` says by these names what is folded into which."""

    state: ModelState
    changes: Mapping[str, Sequence[Change]]


def adapted_model(model: Model) -> Model:
    """The model whose names and files are those on disk: what is inside a `PeftModel`."""
    if not isinstance(model, nn.Module):
        return [_inside(part) for part in model]
    return _inside(model)


def _inside(model: nn.Module) -> nn.Module:
    inner = unwrap(model)
    if not is_peft_model(inner):
        return model
    found: nn.Module = inner.get_base_model()  # type: ignore[operator]
    return found


def merged_base(
    adapter: LiveAdapter,
    leaves: Leaves,
    whole: ModelState,
    changes: Mapping[FQN, Sequence[Change]],
) -> MergedBase:
    """The base of `adapter` under the names of files. `whole` is the state of the live model, whose
    ties hold where both sides are changed in the same way."""
    originals = _replaced(adapter, leaves)
    own = {
        fqn: _base_name(fqn)
        for fqn in leaves.tensors
        if fqn not in originals and (fqn not in adapter.tensors or _COPIED.search(fqn))
    }
    kept: dict[tuple[FQN, tuple[Any, ...]], str] = {}
    state_leaves, ties, changed = {}, {}, {}
    order = sorted(own, key=lambda fqn: fqn in whole.ties)  # kept names before their aliases
    for fqn in order:
        kept_fqn = whole.ties.get(fqn, fqn)
        identity = tuple(change.identity for change in changes.get(fqn, ()))
        first = kept.setdefault((kept_fqn, identity), own[fqn])
        if first != own[fqn]:
            ties[own[fqn]] = first
            continue
        state_leaves[own[fqn]] = whole.leaves[kept_fqn]
        if fqn in changes:
            changed[own[fqn]] = list(changes[fqn])
    names = [own[fqn] for fqn in own if own[fqn] in state_leaves]
    state = ModelState(
        leaves={name: state_leaves[name] for name in names},
        ties=ties,
        extra={_base_name(fqn): value for fqn, value in whole.extra.items()},
        names=whole.names,
        frozen=frozenset(
            own[fqn] for fqn in whole.frozen if own.get(fqn) in state_leaves and fqn not in changes
        ),
    )
    return MergedBase(state=state, changes=changed)


def _base_name(fqn: FQN) -> str:
    return _PEFT_MODEL.sub(r"\1", _COPIED.sub(r"\1", without_wrappers(fqn)), count=1)


def _replaced(adapter: LiveAdapter, leaves: Leaves) -> set[FQN]:
    """Tensors of modules in whose place a trained copy stands."""
    copies = {_base_name(fqn) for fqn in adapter.tensors if _COPIED.search(fqn)}
    return {
        fqn
        for fqn in leaves.tensors
        if "original_module." in fqn and _base_name(fqn) in copies and not _COPIED.search(fqn)
    }


def base_identity(model: Model) -> dict[str, Any]:
    """What is known of where the base of a model lies, and of its content there.

    `name` is the path or Hub id that it was loaded from; of what lies on this machine,
    `checkpoint_id` where Milepost wrote it, else digests of its configuration and of the index, or
    the header, of its weights. Reads no tensor.
    """
    inner = unwrap_all(model[0] if isinstance(model, list | tuple) else model)
    config = hf_config(inner)
    name = getattr(config, "_name_or_path", None) or None
    found: dict[str, Any] = {"name": name} if name else {}
    directory = source_directory(inner)
    return found if directory is None else {**found, **directory_identity(directory)}


def directory_identity(directory: Path) -> dict[str, Any]:
    """What `base_identity` says of the content of a directory."""
    found: dict[str, Any] = {}
    try:
        return {"checkpoint_id": read_manifest(directory).checkpoint_id}
    except (CheckpointError, OSError):
        pass
    for key, path in (("config", directory / "config.json"), ("weights", _weights(directory))):
        if path is not None and path.is_file():
            with path.open("rb") as file:
                found[key] = f"xxh3-128:{digest_of(file.read(_HEADER_NBYTES))}"
    return found


def _weights(directory: Path) -> Path | None:
    """The index of the weights in `directory`, or their one file."""
    names = [*_WEIGHTS, "model.safetensors", "pytorch_model.bin"]
    return next((directory / name for name in names if (directory / name).is_file()), None)


def resized_embeddings(model: Model) -> dict[str, nn.Module]:
    """The input and output embeddings of a model whose vocabulary was resized since it was loaded.

    By what they are; empty where they have the rows that the configuration in the model's source
    directory states, or nothing is known of it.
    """
    inner = unwrap_all(model[0] if isinstance(model, list | tuple) else model)
    directory = source_directory(inner)
    getter = getattr(inner, "get_input_embeddings", None)
    if directory is None or not callable(getter):
        return {}
    embedding, _ = attempt(getter)
    stated = _vocabulary(directory / "config.json")
    rows = vocabulary_of(model)
    if embedding is None or rows is None or stated in (None, rows):
        return {}
    found = {"input": embedding}
    head, _ = attempt(getattr(inner, "get_output_embeddings", lambda: None))
    return found if head is None else {**found, "output": head}


def vocabulary_of(model: Model) -> int | None:
    """The rows of a model's input embedding; None for a model that has none."""
    inner = unwrap_all(model[0] if isinstance(model, list | tuple) else model)
    embedding, _ = attempt(getattr(inner, "get_input_embeddings", lambda: None))
    weight = getattr(embedding, "weight", None)
    return None if weight is None else int(weight.shape[0])


def _vocabulary(path: Path) -> int | None:
    try:
        document = strictjson.loads(path.read_bytes(), where=str(path))
    except (CheckpointError, OSError):
        return None
    for each in (document, document.get("text_config")) if isinstance(document, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("vocab_size"), int):
            return int(each["vocab_size"])
    return None


def differs(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """How the base that an adapter was saved for is another than the live one; None if it may be
    the same. Paths do not count: a base may have moved."""
    for key in ("checkpoint_id", "weights"):
        if key in saved and key in live and saved[key] != live[key]:
            return f"{key} was {saved[key]} and is {live[key]}"
    return None
