"""Phase 1 for a model with an adapter: the adapter is filled, its base stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from torch import Tensor

from milepost.adapters.base import base_identity, differs
from milepost.adapters.config import AdapterConfig, read_adapter_config
from milepost.adapters.kinds import ADAPTER_PICKLE, ADAPTER_STEM, adapter_directory
from milepost.adapters.live import LiveAdapter, find_adapter
from milepost.adapters.names import PREFIX, aligned, without_wrappers
from milepost.checkpointing.adapter_save import names_of_adapter
from milepost.checkpointing.adapter_vocabulary import other_vocabulary
from milepost.checkpointing.agree import names_elsewhere
from milepost.checkpointing.load_model import ModelLoad
from milepost.checkpointing.load_names import LiveNames, stored_names
from milepost.engine.rendezvous import Conversation, led
from milepost.errors import (
    CheckpointIncompleteError,
    InvalidInputError,
    KeyMismatchError,
    MismatchError,
)
from milepost.format.manifest import AdapterEntry
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.tensor_set import TensorSet
from milepost.plan.hub_map import HubMap, HubTensor, whole_piece
from milepost.plan.hub_views import parts_of
from milepost.state.leaves import Leaves, collect_leaves
from milepost.state.mismatch import first_few
from milepost.state.model_plan import StoredInfo, plan_restore_model
from milepost.state.names import FQN, Model
from milepost.state.policies import ShapePolicy
from milepost.state.tensors import global_shape

if TYPE_CHECKING:
    from milepost.checkpointing.load_request import LoadPolicies
    from milepost.engine.read import StoredTensor

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """An adapter on disk. `entry` is what a manifest says of it, None for files of other writers.

    `sets` are its tensors, and those of what is trained besides where there are such.
    """

    directory: Path
    config: AdapterConfig
    sets: tuple[TensorSet, ...]
    entry: AdapterEntry | None = None

    def infos(self) -> dict[str, StoredInfo]:
        return {
            name: (info.dtype, info.shape)
            for tensors in self.sets
            for name, info in tensors.tensors.items()
        }

    def stored(self, name: str) -> StoredTensor:
        """Where the bytes of a tensor lie."""
        found = next((each for each in self.sets if name in each.tensors), self.sets[0])
        return found.stored(name)


def stored_adapter(checkpoint: Checkpoint, key: str | None = None) -> StoredAdapter | None:
    """The adapter of a saved model, or the one that lies in a directory of another writer.

    None where there is none. `CheckpointIncompleteError` for one whose files are not all there.
    """
    if isinstance(checkpoint, DirectoryCheckpoint):
        entry = checkpoint.model_entry(key).adapter
        if entry is None:
            return None
        directory = checkpoint.path / entry.prefix if entry.prefix else checkpoint.path
        return _opened(directory, entry.stem, entry.extra, entry)
    path = checkpoint.path
    if not path.is_dir():
        return None
    directory_of_marker = adapter_directory(path)
    if directory_of_marker is not None:
        return _opened(directory_of_marker, ADAPTER_STEM, None, None)
    if TensorSet(path, "model").exists() or not TensorSet(path, ADAPTER_STEM).exists():
        return None
    return _opened(path, ADAPTER_STEM, None, None)


def _opened(
    directory: Path, stem: str, extra: str | None, entry: AdapterEntry | None
) -> StoredAdapter:
    sets = [TensorSet(directory, stem)]
    if extra is not None:
        sets.append(TensorSet(directory, extra))
    for each in sets:
        if not each.exists():
            _refuse_pickle(directory)
            raise CheckpointIncompleteError(
                f"{directory}: {each.stem}.safetensors is not there, though the checkpoint says "
                "that its adapter lies here; it was copied or written incompletely",
                path=directory,
            )
    config = read_adapter_config(directory)
    return StoredAdapter(directory=directory, config=config, sets=tuple(sets), entry=entry)


def _refuse_pickle(directory: Path) -> None:
    """Say of an adapter that old versions of peft saved what it is, and what makes it readable."""
    if (directory / ADAPTER_PICKLE).is_file():
        raise InvalidInputError(
            f"{directory}: its adapter is {ADAPTER_PICKLE}, a pickle, which is not read; load it "
            "with PeftModel.from_pretrained where you trust it, and save_pretrained writes "
            f"{ADAPTER_STEM}.safetensors",
            path=directory,
        )


def plan_adapter(
    talk: Conversation,
    key: str,
    model: Model,
    saved: StoredAdapter,
    policies: LoadPolicies,
    undo: ExitStack,
) -> ModelLoad:
    """Check that a stored adapter is that of `model`, and say what fills what; collective.

    What differs is raised under the policies; another scaling, other kinds of adapters, and names
    of which none fits are always refused. A base with fewer tokens than the adapter was saved with
    gets rows for them, which closing `undo` takes away again.
    """
    leaves = collect_leaves(model)
    live = find_adapter(model, leaves)
    infos = saved.infos()
    notes: list[str] = []
    _require_same_files(talk, key, saved, infos)
    if live is None:
        names = sorted(infos)
        if talk.world_size == 1 or not names_elsewhere(talk, f"adapter/{key}", [], names):
            raise KeyMismatchError(
                f"{saved.directory}: holds an adapter ({saved.config.peft_type}, {len(infos)} "
                f"tensors), and {key} has none to fill; put the adapter on the model first, with "
                "the configuration beside it",
                unexpected=names,
            )
        live_names_of: dict[FQN, str] = {}
    else:
        _check_kind(saved, live, key)
        _check_scaling(saved, live, key)
        if policies.shape is ShapePolicy.ERROR:
            _check_ranks(saved, live, key)
        live_names_of = _wanted(model, leaves, live, saved)
        tokens = other_vocabulary(
            model,
            _names_of(leaves, live, live_names_of),
            infos,
            None if saved.entry is None else saved.entry.vocabulary,
            where=f"{saved.directory}: {key}",
        )
        if tokens is not None:
            notes.append(tokens.enlarge(undo, world_size=talk.world_size))
    load = _planned(talk, key, model, leaves, live, live_names_of, infos, saved, policies)
    base = {} if saved.entry is None else saved.entry.base
    other = differs(base, base_identity(model))
    if other is not None:
        notes.append(f"the base is another than the one it was trained on: {other}")
    return replace(load, note="; ".join(notes) or None)


def _names_of(
    leaves: Leaves, live: LiveAdapter, wanted: Mapping[FQN, str]
) -> Callable[[Tensor], list[str]]:
    """The names that a live tensor may have in a file, ours first."""
    ours = {id(leaves.tensors[fqn]): stored for fqn, stored in wanted.items()}

    def names(tensor: Tensor) -> list[str]:
        inner = live.inside.get(id(tensor))
        of_base = [] if inner is None else [PREFIX + inner, PREFIX + without_wrappers(inner)]
        return [ours[id(tensor)], *of_base] if id(tensor) in ours else of_base

    return names


def _planned(
    talk: Conversation,
    key: str,
    model: Model,
    leaves: Leaves,
    live: LiveAdapter | None,
    wanted: Mapping[FQN, str],
    infos: Mapping[str, StoredInfo],
    saved: StoredAdapter,
    policies: LoadPolicies,
) -> ModelLoad:
    spelled = _spelled(wanted, infos)
    _require_some(saved, wanted, spelled, infos, key)
    names = {fqn: spelled.get(fqn, stored) for fqn, stored in wanted.items()}
    names |= _of_base(leaves, live, set(infos) - set(names.values()))
    known = _live_names(leaves, names)
    if live is not None:
        elsewhere = names_elsewhere(talk, f"adapter/{key}", known.wanted, sorted(infos))
    else:
        elsewhere = set(infos)
    here = {name: info for name, info in infos.items() if name not in elsewhere}
    found = stored_names(known, here, {})
    restore = plan_restore_model(
        model,
        found.infos,
        found.ties,
        missing=policies.missing,
        unexpected=policies.unexpected,
        dtype=policies.dtype,
        shape=policies.shape,
        device=policies.device,
        parts=found.differences,
        leaves=replace(
            leaves,
            tensors={fqn: leaves.tensors[fqn] for fqn in names},
            extra={},
            indirect=set(),
            sinks={},
        ),
    )
    return ModelLoad(restore=restore, parts=found.parts, ties={}, note=None)


def _wanted(
    model: Model, leaves: Leaves, live: LiveAdapter, saved: StoredAdapter
) -> dict[FQN, str]:
    """The tensors that are to be filled, with the names that they have in our own files."""
    tensors, extra = names_of_adapter(model, leaves, live)
    if saved.entry is None:  # other writers leave buffers out
        buffers = set(extra) - {n for n, t in leaves.tensors.items() if t.requires_grad}
        extra = {fqn: name for fqn, name in extra.items() if fqn not in buffers}
    return tensors | extra


def _spelled(wanted: Mapping[FQN, str], infos: Mapping[str, StoredInfo]) -> dict[FQN, str]:
    """The names under which wanted tensors are stored: ours, live ones, or those of other
    prefixes."""
    by_name = {stored: fqn for fqn, stored in wanted.items()}
    found = {by_name[name]: name for name in infos if name in by_name}
    found |= {name: name for name in infos if name in wanted and name not in found}
    if not found:
        found = {by_name[new]: name for name, new in aligned(infos, by_name).items()}
    return found


def _require_some(
    saved: StoredAdapter,
    wanted: Mapping[FQN, str],
    spelled: Mapping[FQN, str],
    infos: Mapping[str, StoredInfo],
    key: str,
) -> None:
    if wanted and not spelled:
        raise KeyMismatchError(
            f"{saved.directory}: none of its {len(infos)} tensors is one of the {len(wanted)} of "
            f"the adapter of {key}; it holds {first_few(sorted(infos))}, the model wants "
            f"{first_few(sorted(wanted.values()))}: it was trained on another model, or other "
            "modules were adapted",
            missing=sorted(wanted.values()),
            unexpected=sorted(infos),
        )


def _of_base(leaves: Leaves, live: LiveAdapter | None, names: Iterable[str]) -> dict[FQN, str]:
    """Stored tensors of the base: resized embeddings, biases, what peft keeps with an adapter."""
    if live is None:
        return {}
    inside: dict[str, FQN] = {}
    for fqn, tensor in leaves.tensors.items():
        inner = live.inside.get(id(tensor))
        if inner is not None and fqn not in live.tensors:
            inside.setdefault(PREFIX + inner, fqn)
            inside.setdefault(PREFIX + without_wrappers(inner), fqn)
    return {inside[name]: name for name in names if name in inside}


def _live_names(leaves: Leaves, names: Mapping[FQN, str]) -> LiveNames:
    shapes = {fqn: global_shape(leaves.tensors[fqn]) for fqn in names}
    hub = {
        stored: HubTensor(name=stored, shape=shapes[fqn], pieces=whole_piece(fqn, shapes[fqn]))
        for fqn, stored in names.items()
    }
    hub_map = HubMap(hub, shapes)
    parts = {
        name: parts_of(hub_map, tensor)
        for name, tensor in hub.items()
        if name not in hub_map.identity
    }
    tensors = {fqn: leaves.tensors[fqn] for fqn in names}
    return LiveNames(
        tensors=tensors, hub_map=hub_map, parts=parts, runtime=hub_map.renamed, note=None
    )


def _require_same_files(
    talk: Conversation, key: str, saved: StoredAdapter, infos: Mapping[str, StoredInfo]
) -> None:
    """Refuse when ranks see different adapters; collective.

    No rank goes on before that is known: one that did might be the first to fail, and tell of what
    its own adapter lacks instead.
    """
    seen = json.dumps([sorted(infos.items()), saved.config.document], sort_keys=True, default=str)
    digests = talk.gather(f"adapter-seen/{key}", xxhash.xxh3_128(seen.encode()).digest())
    with led(talk, f"adapter-same/{key}"):
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise MismatchError(
                    f"{saved.directory}: rank 0 and rank {rank} see different adapters there; give "
                    "every rank the same files"
                )


def _check_kind(saved: StoredAdapter, live: LiveAdapter, key: str) -> None:
    found, wanted = saved.config.peft_type, str(live.document(None)["peft_type"])
    if found != wanted:
        raise MismatchError(
            f"{saved.directory}: holds an adapter of the kind {found}, {key} has one of the kind "
            f"{wanted}; put the same kind on the model"
        )


def _check_scaling(saved: StoredAdapter, live: LiveAdapter, key: str) -> None:
    """Refuse factors that would be multiplied by something else than in training."""
    differing = list(_other_scaling(saved.config, live))
    if differing:
        raise MismatchError(
            f"{saved.directory}/adapter_config.json: the adapter of {key} is scaled in another way "
            f"than when it was saved: {_told(differing)}; build it with the saved r, lora_alpha, "
            "use_rslora and patterns"
        )


def _check_ranks(saved: StoredAdapter, live: LiveAdapter, key: str) -> None:
    """Refuse factors of another rank, which another alpha can scale alike."""
    differing = list(_other_rank(saved.config, live))
    if differing:
        raise MismatchError(
            f"{saved.directory}/adapter_config.json: the adapter of {key} has another rank than "
            f"the one that was saved: {_told(differing)}; build it with the saved r and "
            "rank_pattern"
        )


def _told(differing: list[str]) -> str:
    more = "" if len(differing) <= _SHOWN else f", and {len(differing) - _SHOWN} more"
    return "; ".join(differing[:_SHOWN]) + more


def _other_scaling(config: AdapterConfig, live: LiveAdapter) -> Iterator[str]:
    if config.lora is not None:
        for path, _, scale in live.scalings():
            saved = config.lora.scaling(path)
            if saved != scale:
                yield f"{path}: saved with {saved:g}, is {scale:g}"
    settings = live.settings
    if config.experts is not None and settings is not None:
        if config.experts.scaling != settings.scaling:
            yield f"experts: saved with {config.experts.scaling:g}, are {settings.scaling:g}"
        if set(config.experts.projections) != set(settings.projections):
            yield (
                f"experts: saved for {', '.join(sorted(config.experts.projections))}, are adapted "
                f"at {', '.join(sorted(settings.projections))}"
            )


def _other_rank(config: AdapterConfig, live: LiveAdapter) -> Iterator[str]:
    if config.lora is not None:
        for path, rank, _ in live.scalings():
            saved = config.lora.rank(path)
            if saved != rank:
                yield f"{path}: saved with rank {saved}, has rank {rank}"
    settings = live.settings
    if config.experts is not None and settings is not None and config.experts.r != settings.r:
        yield f"experts: saved with rank {config.experts.r}, have rank {settings.r}"
