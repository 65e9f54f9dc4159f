"""Live models under the names and shapes that hub checkpoints of their family have.

Experts that are fused in memory are separate on disk, projections lie transposed or joined, names
differ. Which element goes where is found by running transformers' own conversion on tensors
without data; nothing is copied where a view will do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.geometry.blocks import Shape, Span
from milepost.geometry.strided import StridedCopy, contiguous_strides
from milepost.hf.foreign_calls import attempt
from milepost.hf.hub_family import Family, family_of, names_on_load, refuse_partial, revert
from milepost.hf.hub_trace import Trace
from milepost.plan.hub_map import HubMap, HubSlice, HubTensor, drop_aliases, same_names
from milepost.state.names import FQN, Model

_NUMBER = re.compile(r"\d+")


class HubState(NamedTuple):
    """`tensors` by hub name, views of live ones wherever strides allow; `notes` for the report."""

    tensors: dict[str, Tensor]
    hub_map: HubMap
    notes: list[str]


class HubTarget(NamedTuple):
    """A view of a live tensor, and the box of a hub tensor that fills it.

    `box` has a span for each dim of `grid`, the shape of the hub tensor or a finer one of the same
    row-major order (see `milepost.plan.hub_map.HubSlice`). `view` has the shape of the box.
    """

    grid: Shape
    box: tuple[Span, ...]
    view: Tensor


def derive_hub_map(
    model: Model, leaves: Mapping[FQN, Tensor], ties: Mapping[FQN, FQN] | None = None
) -> HubMap:
    """The map between `leaves` of `model` and hub names; only global shapes and dtypes count.

    `model` gives the family alone, so it may be on meta, wrapped or sharded, and `leaves` may be
    those of one pipeline stage. `ties` gives for each alias the name in `leaves` it is tied to.
    Names stay as they are where transformers has no conversion. `InvalidInputError`, naming the
    family, where it has one that cannot be followed exactly.
    """
    family, problem = attempt(partial(family_of, model))
    if problem is not None:
        raise InvalidInputError(
            f"{type(model).__name__}: transformers gave no hub names: {problem}"
        )
    aliases = dict(ties or {})
    if family is None or not family.conversions:
        return same_names(_shapes(leaves), aliases)
    everything = {**leaves, **{alias: leaves[kept] for alias, kept in aliases.items()}}
    try:
        return _traced_map(family, everything, aliases)
    except InvalidInputError as e:
        raise InvalidInputError(f"{family.name}: no exact way to its hub names: {e}") from e


def hub_map_or_same_names(
    model: Model, leaves: Mapping[FQN, Tensor], ties: Mapping[FQN, FQN] | None = None
) -> tuple[HubMap, list[str]]:
    """`derive_hub_map`, or the names of the live model and a note that says why."""
    try:
        return derive_hub_map(model, leaves, ties), []
    except InvalidInputError as e:
        return same_names(_shapes(leaves), ties), [f"not in hub spelling: {e}"]


def hub_state(
    model: Model, leaves: Mapping[FQN, Tensor], ties: Mapping[FQN, FQN] | None = None
) -> HubState:
    """`leaves` of `model`, which are whole and plain tensors, as the hub tensors to write."""
    hub_map, notes = hub_map_or_same_names(model, leaves, ties)
    return HubState(apply_forward(hub_map, leaves), hub_map, notes)


def apply_forward(hub_map: HubMap, tensors: Mapping[FQN, Tensor]) -> dict[str, Tensor]:
    """Hub tensors from whole runtime tensors: views, or copies where strides cannot express it."""
    return {name: _assembled(hub_map, tensor, tensors) for name, tensor in hub_map.tensors.items()}


def hub_targets(hub_map: HubMap, targets: Mapping[FQN, Tensor]) -> dict[str, list[HubTarget]]:
    """Views of live tensors, to be filled in place from boxes of the hub tensors.

    `targets` are whole and plain, of any strides. Runtime names that are not among them have no
    views, and hub tensors that would fill nothing are left out. The views are each element of
    `targets` once.
    """
    found: dict[str, list[HubTarget]] = {}
    layouts = _layouts(targets)
    for name, tensor in hub_map.tensors.items():
        source = hub_map.renamed.get(name, "")
        if source in targets and targets[source].shape == tensor.shape:
            box = tuple((0, length) for length in tensor.shape)
            found[name] = [HubTarget(tensor.shape, box, targets[source].detach())]
            continue
        views = [
            HubTarget(part.grid, part.box, _view(targets[part.source], part))
            for part in tensor.slices(layouts)
            if part.source in targets
        ]
        if views:
            found[name] = views
    return found


def _traced_map(family: Family, leaves: Mapping[FQN, Tensor], aliases: Mapping[FQN, FQN]) -> HubMap:
    hollow = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in leaves.items()
    }
    refuse_partial(family, hollow)
    trace = Trace(hollow)
    with torch.no_grad(), trace:
        reverted, problem = attempt(partial(revert, family, hollow))
    if reverted is None:
        raise InvalidInputError(f"transformers cannot revert its conversion: {problem}")
    tensors = []
    for name, result in reverted.items():
        try:
            pieces = trace.pieces_of(result)
        except InvalidInputError as e:
            raise InvalidInputError(f"{name}: {e}") from e
        tensors.append(HubTensor(name=name, shape=tuple(result.shape), pieces=pieces))
    hub_map = drop_aliases(tensors, _shapes(leaves), aliases)
    _check_load(family, hub_map, leaves)
    return hub_map


def _check_load(family: Family, hub_map: HubMap, leaves: Mapping[FQN, Tensor]) -> None:
    """Refuse names that `from_pretrained` would not lead back to where they came from.

    Of names that differ in their numbers only and have the same source, one is looked at.
    """
    sources: dict[str, set[FQN]] = {}
    seen: set[tuple[str, FQN]] = set()
    for name, tensor in hub_map.tensors.items():
        if (_NUMBER.sub("*", name), tensor.pieces[0].source) not in seen:
            seen.add((_NUMBER.sub("*", name), tensor.pieces[0].source))
            sources[name] = {piece.source for piece in tensor.pieces}
    found, problem = attempt(partial(names_on_load, family, sources, leaves))
    if found is None:
        raise InvalidInputError(f"transformers cannot convert its own names: {problem}")
    for name, loaded in found.items():
        if not loaded & sources[name]:
            raise InvalidInputError(
                f"{name} holds {', '.join(sorted(sources[name]))}, but from_pretrained would "
                f"look there for {', '.join(sorted(loaded))}"
            )


def _shapes(tensors: Mapping[FQN, Tensor]) -> dict[FQN, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _layouts(tensors: Mapping[FQN, Tensor]) -> dict[FQN, StridedCopy]:
    """How the tensors that are not contiguous lie in their memory."""
    return {
        name: StridedCopy(
            tuple(tensor.shape),
            0,
            contiguous_strides(tuple(tensor.shape)),
            0,
            tensor.stride(),
        )
        for name, tensor in tensors.items()
        if not tensor.is_contiguous()
    }


def _view(tensor: Tensor, part: HubSlice) -> Tensor:
    data = tensor.detach()
    return data.as_strided(part.lengths, part.strides, data.storage_offset() + part.offset)


def _assembled(hub_map: HubMap, tensor: HubTensor, tensors: Mapping[FQN, Tensor]) -> Tensor:
    source = hub_map.renamed.get(tensor.name)
    if source is not None:
        return tensors[source].detach().reshape(tensor.shape)
    parts = tensor.slices(_layouts({p.source: tensors[p.source] for p in tensor.pieces}))
    if len(parts) == 1:
        return _view(tensors[parts[0].source], parts[0]).reshape(tensor.shape)
    return _copied(tensor, parts, tensors)


def _copied(tensor: HubTensor, parts: list[HubSlice], tensors: Mapping[FQN, Tensor]) -> Tensor:
    example = tensors[parts[0].source]
    whole = torch.empty(tensor.shape, dtype=example.dtype, device=example.device)
    with torch.no_grad():
        for part in parts:
            box = tuple(slice(*span) for span in part.box)
            whole.view(part.grid)[box] = _view(tensors[part.source], part)
    return whole
