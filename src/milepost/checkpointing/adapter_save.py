"""What of a model with adapters is saved: the adapter alone, or folded into the weights.

A model whose adapter is saved has its tensors in other sets than a model as it is: those of the
adapter under the names of its file, in a directory of their own where the weights are there too,
and tensors that are neither base nor adapter (a value head, persistent buffers) beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from milepost.adapters.base import (
    adapted_model,
    base_identity,
    merged_base,
    resized_embeddings,
    vocabulary_of,
)
from milepost.adapters.fold import Change, changes_of
from milepost.adapters.kinds import ADAPTER_CONFIG, ADAPTER_STEM, RESUME_ADAPTER
from milepost.adapters.live import LiveAdapter, find_adapter
from milepost.adapters.names import PREFIX
from milepost.adapters.shapes import misfits
from milepost.checkpointing.capture import AttachedSet, Captured, State
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError
from milepost.format.manifest import AdapterEntry, ViewRule
from milepost.plan.hub_views import ViewRun, Views, whole_kind
from milepost.state.declared import detached
from milepost.state.leaves import Leaves, collect_leaves
from milepost.state.model import ModelState
from milepost.state.names import FQN, Model, own_tensors, places
from milepost.state.tensors import global_shape

EXTRA_STEM = "adapter_extra"


class Adapters(Enum):
    """What a save writes of a model that carries adapters; others are not concerned."""

    ALONE = "alone"
    """The adapter, what is trained with it, and no weights of the base: `adapter_config.json` and
    `adapter_model.safetensors`, as peft has them."""
    MERGED = "merged"
    """All weights with the adapter folded in, as `from_pretrained` wants them, and in
    `resume_adapter/` the adapter as it is, to go on training it."""
    WITH_BASE = "with-base"
    """All tensors as the modules have them, base and adapter, under the names that they have."""


@dataclass(slots=True, kw_only=True)
class AdapterSave:
    """The adapter of one model of a save. `live` is None on a rank that has none of it.

    `whole` is the model as it is, `model` the one whose names and files are on disk. `placed` is
    the set whose placements are those of the model.
    """

    kind: Adapters
    live: LiveAdapter | None
    whole: ModelState
    model: Model
    directory: str
    placed: str
    extra: str | None
    document: dict[str, Any]
    base: dict[str, Any]
    changes: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    vocabulary: int | None = None

    def entry(self, views: tuple[ViewRule, ...]) -> AdapterEntry:
        """What the manifest says; `views` are those of the adapter's own set."""
        return AdapterEntry(
            kind="adapter" if self.kind is Adapters.ALONE else "merged_adapter",
            peft_type=str(self.document.get("peft_type")),
            prefix=self.directory,
            stem=ADAPTER_STEM,
            extra=EXTRA_STEM if self.extra is not None else None,
            base=self.base,
            vocabulary=self.vocabulary,
            views=views if self.kind is Adapters.MERGED else (),
        )

    @property
    def config_name(self) -> str:
        return joined(self.directory, ADAPTER_CONFIG)


def joined(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def take_adapters(
    talk: Conversation, captured: Captured, state: State, wanted: Adapters
) -> dict[str, AdapterSave]:
    """Put what is to be saved of models with adapters in place of them; collective.

    `captured` has the models as they are, and afterwards what of them is written. What cannot be
    saved in the wanted way is refused on all ranks.
    """
    if wanted is Adapters.WITH_BASE:
        return {}
    leaves = {key: collect_leaves(state[key]) for key in captured.models}
    found = {key: find_adapter(state[key], own) for key, own in leaves.items()}
    carrying = _of_all(talk, [key for key, live in found.items() if live is not None])
    saves: dict[str, AdapterSave] = {}
    for key in carrying:
        taken = _Taken(talk, key, state[key], leaves[key], found[key], captured)
        saves[key] = taken.alone() if wanted is Adapters.ALONE else taken.merged()
    return saves


class _Taken:
    """The model under `key`, taken apart."""

    def __init__(
        self,
        talk: Conversation,
        key: str,
        model: Model,
        leaves: Leaves,
        live: LiveAdapter | None,
        captured: Captured,
    ) -> None:
        self.talk, self.key, self.model, self.leaves = talk, key, model, leaves
        self.live, self.captured = live, captured
        self.whole = captured.models[key]
        self.prefix = captured.prefixes[key]
        self.tensors, self.extra = names_of_adapter(model, leaves, live)
        resized = {} if live is None else resized_embeddings(model)
        self.tensors = _with_resized(resized, leaves, live, self.tensors)
        self.vocabulary = vocabulary_of(model) if resized else None
        self._check()

    def _check(self) -> None:
        """Refuse an adapter without tensors, on all ranks, or with tensors that are not whole."""
        if not self._anywhere("tensors", self.tensors):
            raise InvalidInputError(
                f"{self.key}: the adapter of the model has no tensors, so its file would be empty; "
                "nothing was written"
            )
        for fqn in self.tensors:
            if 0 in global_shape(self.leaves.tensors[fqn]):
                raise InvalidInputError(
                    f"{self.key}: {fqn} has shape {global_shape(self.leaves.tensors[fqn])}: a "
                    "placeholder of a tensor that lies elsewhere (ZeRO-3, FSDP1); gather it, or "
                    "shard with fully_shard; nothing was written"
                )
        for misfit in () if self.live is None else misfits(self.live):
            raise InvalidInputError(
                f"{self.key}: {misfit}: a rank's part stands in the place of the whole; leave it "
                "a DTensor, or say what it is a slice of (declare_placement); nothing was written"
            )

    def _anywhere(self, what: str, own: Mapping[FQN, str]) -> bool:
        """Whether any rank has such tensors; collective."""
        return bool(_of_all(self.talk, [self.key] if own else [], name=f"{what}/{self.key}"))

    def alone(self) -> AdapterSave:
        leaves = {fqn: detached(self.leaves.tensors[fqn]) for fqn in self.tensors}
        self.captured.models[self.key] = ModelState(
            leaves=leaves, ties={}, extra={}, names=self.whole.names
        )
        self.captured.renamed[self.key] = dict(self.tensors)
        self.captured.stems[self.key] = ADAPTER_STEM
        return self._save(Adapters.ALONE, self.prefix, self.key)

    def merged(self) -> AdapterSave:
        changes = {} if self.live is None else changes_of(self.live)
        model = adapted_model(self.model)
        changed: Mapping[str, Sequence[Change]] = {}
        if self.live is not None:
            base = merged_base(self.live, self.leaves, self.whole, changes)
            self.captured.models[self.key], changed = base.state, base.changes
        directory = joined(self.prefix, RESUME_ADAPTER)
        placed = f"{self.key}/adapter"
        self._attach(placed, directory, ADAPTER_STEM, self.tensors)
        saved = self._save(Adapters.MERGED, directory, placed)
        saved.model, saved.changes = model, changed
        return saved

    def _save(self, kind: Adapters, directory: str, placed: str) -> AdapterSave:
        extra = None
        if self._anywhere("extra", self.extra):
            extra = f"{self.key}/extra"
            self._attach(extra, directory, EXTRA_STEM, self.extra)
        base = base_identity(self.model)
        return AdapterSave(
            kind=kind,
            live=self.live,
            whole=self.whole,
            model=self.model,
            directory=directory,
            placed=placed,
            extra=extra,
            document={} if self.live is None else self.live.document(base.get("name")),
            base=base,
            vocabulary=self.vocabulary,
        )

    def _attach(self, name: str, directory: str, stem: str, names: Mapping[FQN, str]) -> None:
        self.captured.attached[name] = AttachedSet(
            directory=directory,
            stem=stem,
            leaves={fqn: detached(self.leaves.tensors[fqn]) for fqn in names},
        )
        self.captured.renamed[name] = dict(names)


def names_of_adapter(
    model: Model, leaves: Leaves, live: LiveAdapter | None
) -> tuple[dict[FQN, str], dict[FQN, str]]:
    """What is saved of a model beside its base: live names with those in the adapter's file, and
    with those in the file of what is neither.

    What is trained inside the adapted model is in the adapter's file, where peft finds it.
    """
    tensors = {} if live is None else dict(live.tensors)
    extra: dict[FQN, str] = {}
    for fqn, tensor in beside_base(model, leaves, live):
        stored = None if live is None else live.inside.get(id(tensor))
        if isinstance(tensor, nn.Parameter) and stored is not None:
            tensors[fqn] = PREFIX + stored
        else:
            extra[fqn] = fqn
    return tensors, extra


def _with_resized(
    resized: Mapping[str, nn.Module],
    leaves: Leaves,
    live: LiveAdapter | None,
    tensors: Mapping[FQN, str],
) -> dict[FQN, str]:
    """`tensors`, and those of embeddings whose rows the base does not have."""
    found = dict(tensors)
    for module in resized.values():
        found |= _of_module(module, leaves, live, found)
    return found


def _of_module(
    module: nn.Module, leaves: Leaves, live: LiveAdapter | None, known: Mapping[FQN, str]
) -> dict[FQN, str]:
    """The tensors of a module of the base, by live name, with the names in the adapter's file."""
    own = {id(tensor) for place in places(module) for _, tensor in own_tensors(place.module)}
    inside = {} if live is None else live.inside
    taken = {id(leaves.tensors[fqn]) for fqn in known}
    return {
        fqn: PREFIX + inside[id(tensor)]
        for fqn, tensor in leaves.tensors.items()
        if id(tensor) in own - taken and id(tensor) in inside
    }


def beside_base(
    model: Model, leaves: Leaves, live: LiveAdapter | None
) -> Iterator[tuple[FQN, Tensor]]:
    """Leaves that belong neither to the adapter nor to a base that stays as it was: what is trained
    besides, and persistent buffers.

    Buffers of a quantised model are its weights.
    """
    own = {} if live is None else live.tensors
    adapter = {id(leaves.tensors[fqn]) for fqn in own}
    is_quantised = any(getattr(p.module, "hf_quantizer", None) is not None for p in places(model))
    for fqn, tensor in leaves.tensors.items():
        if id(tensor) in adapter or fqn in leaves.indirect:
            continue
        if isinstance(tensor, nn.Parameter):
            if tensor.requires_grad:
                yield fqn, tensor
        elif not is_quantised:
            yield fqn, tensor


def carries_adapter(talk: Conversation, key: str, model: Model) -> bool:
    """Whether any rank's part of `model` has an adapter; collective."""
    live = find_adapter(model, collect_leaves(model))
    return bool(_of_all(talk, [key] if live is not None else [], name=f"carries/{key}"))


def adapter_leaves(model: Model) -> dict[FQN, Tensor]:
    """The tensors of the adapter of `model`, as a save takes them."""
    leaves = collect_leaves(model)
    live = find_adapter(model, leaves)
    tensors, _ = names_of_adapter(model, leaves, live)
    resized = {} if live is None else resized_embeddings(model)
    names = _with_resized(resized, leaves, live, tensors)
    return {fqn: detached(leaves.tensors[fqn]) for fqn in names}


def rename_views(names: Mapping[FQN, str], leaves: Mapping[FQN, Tensor]) -> Views:
    """Views by which tensors lie on disk as they are, under other names."""
    return {
        fqn: (ViewRun(stored, None, whole_kind(global_shape(leaves[fqn])), ()),)
        for fqn, stored in names.items()
        if fqn != stored
    }


def _of_all(talk: Conversation, own: list[str], *, name: str = "adapters") -> list[str]:
    """The keys that any rank names, in order; collective."""
    if talk.world_size == 1:
        return own
    found: dict[str, None] = {}
    for raw in talk.gather(name, json.dumps(own).encode()):
        found.update(dict.fromkeys(json.loads(raw)))
    told = json.dumps(list(found)).encode() if talk.is_coordinator else None
    agreed: list[str] = json.loads(talk.broadcast(f"{name}-of-all", told))
    return agreed
