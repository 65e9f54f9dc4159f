"""What the entries of a DCP directory are: weights, optimizers, everything else.

DCP stores one state dict, flattened, and says where each entry stood. Programs nest it in their
own ways; the containers tell the parts apart: one with `state` and `param_groups` is an optimizer,
one called `model` holds weights, and where there is none the tensors at the top do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from milepost.layouts.dcp_metadata import DcpMetadata, DcpTensor, Key

MODEL = "model"
STATE, GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpParts:
    """`models` maps the place of each model to its weights by name; `optimizers` the place of each
    optimizer to the flat names below it, by the rest of their place; `others` the same for the
    remaining entries, by place."""

    models: Mapping[Key, Mapping[str, DcpTensor]]
    optimizers: Mapping[Key, Mapping[Key, str]]
    others: Mapping[Key, str]


def sort_parts(metadata: DcpMetadata) -> DcpParts:
    """The parts of a directory."""
    places = {name: _split(place) for name, place in metadata.places.items()}
    roots = sorted(_optimizer_roots(places.values()), key=len, reverse=True)
    optimizers: dict[Key, dict[Key, str]] = {root: {} for root in roots}
    rest: dict[str, Key] = {}
    for name, place in places.items():
        root = next((r for r in roots if _is_below(place, r)), None)
        if root is None:
            rest[name] = metadata.places[name]
        else:
            optimizers[root][place[len(root) :]] = name
    models: dict[Key, dict[str, DcpTensor]] = {}
    for container in _model_places(metadata, rest):
        models[container] = {
            ".".join(map(str, place[len(container) :])): metadata.tensors[name]
            for name, place in rest.items()
            if name in metadata.tensors and _is_in(place, container)
        }
    taken = {tensor.name for own in models.values() for tensor in own.values()}
    return DcpParts(
        models=models,
        optimizers=optimizers,
        others={place: name for name, place in rest.items() if name not in taken},
    )


def _split(place: Key) -> Key:
    """A place in which a flattened optimizer's `state.<name>.<slot>` is taken apart."""
    for position, part in enumerate(place):
        if not isinstance(part, str):
            continue
        for word in (STATE, GROUPS):
            if part.startswith(f"{word}."):
                name, _, slot = part.removeprefix(f"{word}.").rpartition(".")
                inner = (name, slot) if name else (slot,)
                return (*place[:position], word, *inner, *place[position + 1 :])
            head, dot, tail = part.partition(f".{word}.")
            if dot and position == len(place) - 1 and len(place) == 1:
                name, _, slot = tail.rpartition(".")
                inner = (name, slot) if name else (slot,)
                return (*head.split("."), word, *inner)
    return place


def _optimizer_roots(places: Iterable[Key]) -> Iterator[Key]:
    """Containers that hold parameter groups; their `state` may be empty."""
    found: dict[Key, None] = {}
    for place in places:
        if GROUPS in place:
            found.setdefault(place[: place.index(GROUPS)])
    yield from found


def _is_below(place: Key, root: Key) -> bool:
    return (
        len(place) > len(root)
        and place[: len(root)] == root
        and place[len(root)] in (STATE, GROUPS)
    )


def _is_in(place: Key, container: Key) -> bool:
    """Whether a tensor is one of the container's weights: at the top, only what stands there."""
    if not container:
        return len(place) == 1
    return len(place) > len(container) and place[: len(container)] == container


def _model_places(metadata: DcpMetadata, rest: Mapping[str, Key]) -> list[Key]:
    """Containers of weights: those called `model`, else the top, else the one that holds most."""
    sizes: dict[Key, int] = {}
    for name, place in rest.items():
        if name in metadata.tensors:
            count = prod(metadata.tensors[name].shape)
            sizes[place[:-1]] = sizes.get(place[:-1], 0) + count
            if MODEL in place[:-1]:
                inner = place[: place.index(MODEL) + 1]
                sizes.setdefault(inner, 0)
    named = [place for place in sizes if place and place[-1] == MODEL]
    if named:
        return sorted(named, key=len)
    if () in sizes:
        return [()]
    return [max(sizes, key=lambda place: sizes[place])] if sizes else []
