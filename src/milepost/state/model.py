"""Capture of a model: references to its live leaves, taken at the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.state.declared import detached
from milepost.state.leaves import Leaves, collect_leaves
from milepost.state.names import FQN, Model
from milepost.state.tensors import refuse_unstorable
from milepost.state.ties import find_ties


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """What a save needs of a model.

    `leaves` holds each tensor once, detached and by reference, in module order; DTensors stay
    DTensors and views stay views. `ties` maps each further name of a leaf to the name it has in
    `leaves`. `extra` holds what is no weight: module extra state and values in the state dict.
    `names` gives the name of a live parameter or buffer by `id`, for optimizers. `frozen` are the
    leaves that are parameters and not trained, under any of their names.
    """

    leaves: dict[FQN, Tensor]
    ties: dict[FQN, FQN]
    extra: dict[FQN, Any]
    names: dict[int, FQN]
    frozen: frozenset[FQN] = frozenset()


def capture_model(model: Model) -> ModelState:
    """The state of `model`, a module or a list of modules whose names do not collide.

    Nothing is copied, and buffers that are not persistent are skipped. Tensors without values (on
    meta) and those that are no plain elements are refused, naming them.
    """
    leaves = collect_leaves(model)
    _refuse_meta(leaves)
    for name, tensor in leaves.tensors.items():
        refuse_unstorable(tensor, key=name)
    return _state_of(model, leaves)


def model_state(model: Model) -> ModelState:
    """The same for a look at how `model` is held; its tensors may be on meta."""
    return _state_of(model, collect_leaves(model))


def _state_of(model: Model, leaves: Leaves) -> ModelState:
    ties = find_ties(model, leaves.tensors)
    return ModelState(
        leaves={name: detached(t) for name, t in leaves.tensors.items() if name not in ties},
        ties=ties,
        extra=leaves.extra,
        names=_names_by_id(leaves, ties),
        frozen=_frozen_names(leaves, ties),
    )


def _frozen_names(leaves: Leaves, ties: Mapping[FQN, FQN]) -> frozenset[FQN]:
    frozen: set[FQN] = set()
    trained: set[FQN] = set()
    for name, tensor in leaves.tensors.items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        (frozen if is_frozen else trained).add(ties.get(name, name))
    return frozenset(frozen - trained)


def parameter_names(models: Mapping[str, Model], *, primary: str | None = None) -> dict[int, FQN]:
    """Name of each live parameter by `id`, over all models of a state.

    Names of the model under `primary` stand as they are, those of another under `<key>/`. One
    parameter that several models share has the name of the first.
    """
    names: dict[int, FQN] = {}
    for key, model in sorted(models.items(), key=lambda item: item[0] != primary):
        leaves = collect_leaves(model)
        prefix = "" if key == primary else f"{key}/"
        ties = find_ties(model, leaves.tensors)
        for identity, name in _names_by_id(leaves, ties).items():
            names.setdefault(identity, prefix + name)
    return names


def _names_by_id(leaves: Leaves, ties: Mapping[FQN, FQN]) -> dict[int, FQN]:
    names: dict[int, FQN] = {}
    for name, tensor in leaves.tensors.items():
        if name not in leaves.indirect:
            kept = ties.get(name, name)
            # Two parameters may share memory without being one: each then has its own moments.
            same = leaves.tensors[kept] is tensor
            names.setdefault(id(tensor), kept if same else name)
    return names


def _refuse_meta(leaves: Leaves) -> None:
    meta = [name for name, tensor in leaves.tensors.items() if tensor.device.type == "meta"]
    if meta:
        shown = ", ".join(meta[:5]) + (", ..." if len(meta) > 5 else "")
        raise InvalidInputError(
            f"{len(meta)} of {len(leaves.tensors)} tensors of the model are on the meta device "
            f"and have no values to save: {shown}"
        )
