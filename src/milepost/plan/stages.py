"""Pipeline stages, recognised in the inventory: which group of ranks holds which layers.

Ranks of one stage hold the same names and share no layer with the ranks of another. That is seen
from the inventory alone, so all ranks see the same stages without another word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from milepost.plan.inventory import LeafInfo

Ranks: TypeAlias = frozenset[int]
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """`owner` maps each tensor to the number of its stage, in order of the lowest rank of each;
    None where no stage owns it. `layers` are the numbers of the layers of each stage, ascending.
    """

    count: int
    owner: Mapping[str, int | None]
    layers: tuple[tuple[int, ...], ...]

    def partition(self) -> list[list[int]]:
        """`[first_layer, end_layer]` of each stage, the end exclusive; empty without layers.

        A rank with several virtual stages has one such pair after the other in its entry.
        """
        return [[bound for span in _spans(numbers) for bound in span] for numbers in self.layers]


def find_stages(leaves: Mapping[str, LeafInfo], tied: Collection[str] = ()) -> Stages | None:
    """The stages of a model whose layers lie whole on different groups of ranks; None for a model
    that is no pipeline: every rank knows all names, or a layer is spread over groups.

    A tensor that ranks of several stages hold belongs to none of them, unless it is one of `tied`
    (kept in place of a tied one that another stage has): that belongs to the first.
    """
    by_classes = {leaf.classes: _ranks(leaf) for leaf in leaves.values()}
    distinct = list(dict.fromkeys(by_classes.values()))
    members = _members(distinct)
    if len(members) < 2:
        return None
    number_of = {ranks: number for number, ranks in enumerate(members)}
    holders = {name: by_classes[leaf.classes] for name, leaf in leaves.items()}
    layers = _layers(holders, number_of)
    if layers is None:
        return None
    return Stages(
        count=len(members),
        owner={
            name: _owner(ranks, number_of, first=name in tied) for name, ranks in holders.items()
        },
        layers=layers,
    )


def one_stage(leaves: Mapping[str, LeafInfo]) -> Stages:
    """The stages of a model that is not divided."""
    lists: dict[str, set[int]] = {"": set()}
    for name in leaves:
        place = layer_of(name)
        if place is not None:
            lists.setdefault(place[0], set()).add(place[1])
    longest = max(lists.values(), key=len)
    return Stages(count=1, owner=dict.fromkeys(leaves, 0), layers=(tuple(sorted(longest)),))


def _ranks(leaf: LeafInfo) -> Ranks:
    return frozenset(rank for placement_class in leaf.classes for rank in placement_class.ranks)


def _members(distinct: Sequence[Ranks]) -> list[Ranks]:
    """Ranks in groups that hold the same tensors, by lowest rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(frozenset().union(*distinct)):
        held = tuple(number for number, ranks in enumerate(distinct) if rank in ranks)
        groups.setdefault(held, []).append(rank)
    return [frozenset(ranks) for ranks in groups.values()]


def _layers(
    holders: Mapping[str, Ranks], number_of: Mapping[Ranks, int]
) -> tuple[tuple[int, ...], ...] | None:
    """The layers of each stage, of the longest list that is divided among stages."""
    lists: dict[str, dict[int, Ranks]] = {}
    for name, ranks in holders.items():
        place = layer_of(name)
        if place is None:
            continue
        layers = lists.setdefault(place[0], {})
        if layers.setdefault(place[1], ranks) != ranks:
            return None
    divided = [
        layers
        for layers in lists.values()
        if len({ranks for ranks in layers.values() if ranks in number_of}) > 1
        and all(ranks in number_of for ranks in layers.values())
    ]
    if not divided:
        return None
    longest = max(divided, key=len)
    return tuple(
        tuple(sorted(layer for layer, ranks in longest.items() if number_of[ranks] == number))
        for number in range(len(number_of))
    )


def layer_of(name: str) -> tuple[str, int] | None:
    """The list of layers that a tensor lies in, and the number of its layer; None outside of one.

    >>> layer_of("model.layers.12.mlp.experts.3.up_proj.weight"), layer_of("model.norm.weight")
    (('model.layers', 12), None)
    """
    found = _NUMBER.search(name)
    return None if found is None else (name[: found.start()], int(found.group(1)))


def _owner(ranks: Ranks, number_of: Mapping[Ranks, int], *, first: bool) -> int | None:
    if ranks in number_of:
        return number_of[ranks]
    if not first:
        return None
    return min(number for members, number in number_of.items() if members & ranks)


def _spans(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs of numbers that follow one another, as (first, end)."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans
