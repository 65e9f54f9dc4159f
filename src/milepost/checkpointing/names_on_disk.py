"""The names and shapes that a model's tensors have on disk: those of hub checkpoints of its family.

Every rank derives them from its own leaves, and all ranks follow one decision: where one of them
cannot, the runtime names are kept, and a note says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from milepost._collector import collector_paused
from milepost.checkpointing.capture import Captured
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError
from milepost.geometry.axis_view import (
    NEW_DIM,
    AxisKind,
    Fixed,
    LocalBox,
    has_fixed,
    local_boxes,
    view_held,
)
from milepost.geometry.placement import IndexSet, local_shape, whole
from milepost.hf.hub_names import derive_hub_map
from milepost.plan.holding import Holding
from milepost.plan.hub_map import HubMap, same_names
from milepost.plan.hub_views import HubView, ViewRun, Views, views_of
from milepost.plan.inventory import SELF, Inventory, LeafInfo
from milepost.state.names import FQN, Model
from milepost.state.placements import Held
from milepost.state.tensors import global_shape

_Signature = tuple[tuple[FQN, tuple[int, ...], torch.dtype], ...]


class Derived(NamedTuple):
    """How tensors are called on disk. `unknown` says why the map is that of the runtime names, if
    there should be another. A save uses `views`; `problem` says why it keeps the runtime names."""

    hub_map: HubMap
    views: Views
    unknown: str | None
    problem: str | None


_derived: WeakKeyDictionary[nn.Module, tuple[_Signature, Derived]] = WeakKeyDictionary()


def derive(model: Model, tensors: Mapping[FQN, Tensor]) -> Derived:
    """The hub names of live tensors, tied ones under each of their names; kept by model."""
    signature = tuple((name, global_shape(t), t.dtype) for name, t in tensors.items())
    root = model if isinstance(model, nn.Module) else model[0]
    known = _derived.get(root)
    if known is not None and known[0] == signature:
        return known[1]
    hollow = {n: torch.empty(shape, dtype=d, device="meta") for n, shape, d in signature}
    found = _derive(model, hollow)
    _derived[root] = signature, found
    return found


@collector_paused()
def _derive(model: Model, hollow: Mapping[FQN, Tensor]) -> Derived:
    try:
        hub_map = derive_hub_map(model, hollow)
    except InvalidInputError as error:
        problem = f"not in hub spelling: {error}"
        shapes = {name: tuple(tensor.shape) for name, tensor in hollow.items()}
        return Derived(same_names(shapes), {}, problem, problem)
    try:
        return Derived(hub_map, views_of(hub_map), None, None)
    except InvalidInputError as error:
        return Derived(hub_map, {}, None, f"not in hub spelling: {error}")


@dataclass(slots=True, kw_only=True)
class NamesOnDisk:
    """What all ranks agreed on: the views of each model by key, and notes for the report."""

    views: dict[str, Views] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def agree_on_names(
    talk: Conversation, models: Mapping[str, Model], captured: Captured
) -> NamesOnDisk:
    """The names under which every model is saved; collective, one small value for each rank."""
    found = NamesOnDisk()
    problems: dict[str, str] = {}
    for key, model in captured.models.items():
        if key in captured.renamed:
            continue
        every = {**model.leaves, **{a: model.leaves[kept] for a, kept in model.ties.items()}}
        derived = derive(models[key], every)
        if derived.problem is not None:
            problems[key] = derived.problem
        elif derived.views:
            found.views[key] = derived.views
    for key, problem in _first_problems(talk, problems).items():
        found.views.pop(key, None)
        found.notes.append(f"{key}: {problem}")
    return found


def _first_problems(talk: Conversation, own: Mapping[str, str]) -> dict[str, str]:
    if talk.world_size == 1:
        return dict(own)
    first: dict[str, str] = {}
    for raw in talk.gather("names-on-disk", json.dumps(own).encode()):
        first = {**json.loads(raw), **first}
    told = json.dumps(first).encode() if talk.is_coordinator else None
    found: dict[str, str] = json.loads(talk.broadcast("names-kept", told))
    return found


@collector_paused()
def held_on_disk(
    sets: Mapping[str, Mapping[str, Held]], inventory: Inventory, rank: int
) -> dict[str, dict[str, Held]]:
    """What this rank holds, by the names on disk: views of its local tensors.

    Left out are tensors of which it has nothing since it lacks a fixed index, such as the experts
    of other ranks.
    """
    found: dict[str, dict[str, Held]] = {}
    for key, leaves in sets.items():
        views, on_disk = inventory.views.get(key, {}), inventory.on_disk(key)
        found[key] = {}
        for fqn, held in leaves.items():
            if fqn not in views:
                found[key][fqn] = held
                continue
            index_set = _index_set(held.info, rank)
            for name, kind, fixed in _views_held(views[fqn], index_set):
                local = local_view(held.local, kind, fixed, index_set)
                found[key][name] = Held(on_disk[name], local)
    return found


@lru_cache(maxsize=4096)
def _views_held(runs: tuple[ViewRun, ...], index_set: IndexSet) -> tuple[HubView, ...]:
    """The views of one leaf whose fixed indices a rank has."""
    return tuple(
        view for run in runs for view in run.views() if has_fixed(view.kind, view.fixed, index_set)
    )


def _index_set(info: LeafInfo, rank: int) -> IndexSet:
    """What this rank holds of a leaf, by its own description of it."""
    (own,) = info.classes
    if own == SELF:
        return whole(info.shape)
    if own.coordinate(rank) is None:
        return tuple(() for _ in info.shape)
    return Holding((own,)).held(info.shape, own.shard_coordinate(rank))


def local_view(local: Tensor, kind: AxisKind, fixed: Fixed, held: IndexSet) -> Tensor:
    """What a rank holds of a view, out of its local tensor: a strided view of it, or a copy where
    a step does not go on evenly."""
    boxes = local_boxes(kind, fixed, held)
    if len(boxes) == 1:
        return view_of_box(local, kind, boxes[0])
    whole = local.new_empty(local_shape(view_held(kind, held)))
    for box in boxes:
        whole[tuple(slice(*span) for span in box.place)] = view_of_box(local, kind, box)
    return whole


def view_of_box(local: Tensor, kind: AxisKind, box: LocalBox) -> Tensor:
    """The elements of one box, as a view of the local tensor."""
    strides = local.stride()
    offset = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    return local.as_strided(
        [end - start for start, end in box.place],
        [0 if d.source == NEW_DIM else strides[d.source] * d.step for d in kind.dims],
        local.storage_offset() + offset,
    )
