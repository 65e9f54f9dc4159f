"""Folding adapters into the weights that a save writes, wherever ranks hold what of both.

Each rank folds what it holds of a weight. Where it lacks the part of a factor that belongs to it,
the factor, which is small, travels whole, before anything is written and through Milepost's own
group; so do sums of squares of rows that are cut (DoRA).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.adapters.arithmetic import check_fits, fold_bias, squared_norms
from milepost.adapters.fold import Change, Factor, low_rank_of, take
from milepost.adapters.merged_tensor import Folded, merged
from milepost.checkpointing.adapter_save import Adapters, AdapterSave
from milepost.checkpointing.capture import Captured
from milepost.checkpointing.world import agreed_exchange_group
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError
from milepost.geometry.placement import (
    IndexSet,
    Replicate,
    boxes_of,
    intersect_spans,
    span_length,
    whole,
)
from milepost.plan.holding import Holding, PlacementClass
from milepost.plan.inventory import SELF
from milepost.state.placements import Held, describe, local_part, own_rank
from milepost.state.tensors import torch_dtype

_BATCH_NBYTES = 64 * 2**20
_ROWS_AT_A_TIME = 4096


class _Weight(NamedTuple):
    """What this rank holds of a weight that changes."""

    key: str
    name: str
    held: Held
    part: IndexSet
    change: Change


def fold_adapters(
    talk: Conversation,
    captured: Captured,
    adapters: Mapping[str, AdapterSave],
    held: Mapping[str, Mapping[str, Held]],
) -> dict[str, dict[str, Held]]:
    """`held` of the models whose adapters are folded in, changed weights in place of live ones.

    Collective. Nothing live changes, and no whole weight is made: the values are computed when they
    are read.
    """
    if all(saved.kind is not Adapters.MERGED for saved in adapters.values()):
        return {}
    weights = list(_weights(captured, adapters, held))
    every = {
        factor.name: factor
        for saved in adapters.values()
        for changes in saved.changes.values()
        for change in changes
        for factor in change.factors
    }
    factors = _Factors(talk, [f for weight in weights for f in _needed(weight)], every)
    found = {key: dict(held[key]) for key in adapters}
    squares = _Squares(talk, weights, factors)
    by_weight: dict[tuple[str, str], list[_Weight]] = {}
    for weight in weights:
        by_weight.setdefault((weight.key, weight.name), []).append(weight)
    for (key, name), changes in by_weight.items():
        local = _folded(changes, factors, squares)
        found[key][name] = changes[0].held._replace(local=local)
    return found


def _weights(
    captured: Captured,
    adapters: Mapping[str, AdapterSave],
    held: Mapping[str, Mapping[str, Held]],
) -> Iterator[_Weight]:
    for key, saved in adapters.items():
        for name, changes in saved.changes.items():
            tensor = captured.models[key].leaves[name]
            part, local = local_part(tensor)
            if local.numel():
                for change in changes:
                    yield _Weight(key, name, held[key][name], part, change)


def _needed(weight: _Weight) -> Iterator[tuple[Factor, IndexSet]]:
    for factor in weight.change.factors:
        yield factor, factor.wanted(weight.part)


def _folded(changes: list[_Weight], factors: _Factors, squares: _Squares) -> Tensor:
    """The local part of one changed weight or bias."""
    first = changes[0]
    local = first.held.local
    matrices = [weight for weight in changes if weight.change.form is not None]
    if len(matrices) > 1:
        raise InvalidInputError(
            f"{first.name}: {len(matrices)} adapters change this weight; merge them into one first"
        )
    biases = [w.change for w in changes if w.change.form is None and w.change.b is not None]
    for change in biases:
        assert change.b is not None
        return fold_bias(local, factors.value(change.b, change.b.wanted(first.part)), change.scale)
    rows: dict[int, Tensor] = {}
    for weight in changes:
        rows |= _rows_of(weight, factors)
    if not matrices:
        return merged(Folded(weight=local, rows=rows))
    (weight,) = matrices
    low_rank = low_rank_of(weight.change, weight.part, factors.value)
    flat = local if local.dim() == len(low_rank.shape) else _as_matrix(weight)
    check_fits(low_rank, tuple(flat.shape), name=weight.name)
    folded = Folded(weight=flat, low_rank=low_rank, squares=squares.of(weight), rows=rows)
    return merged(folded).view(local.shape)


def _as_matrix(weight: _Weight) -> Tensor:
    shape = weight.held.info.shape
    if weight.part[1:] != whole(shape)[1:]:
        raise InvalidInputError(
            f"{weight.name}: a convolution that is cut inside cannot be folded; save with "
            "adapters=Adapters.ALONE"
        )
    return weight.held.local.flatten(1)


def _rows_of(weight: _Weight, factors: _Factors) -> dict[int, Tensor]:
    """New rows of a weight, by their local index."""
    change = weight.change
    if change.rows is None:
        return {}
    values = factors.value(change.rows, change.rows.wanted(weight.part))
    found: dict[int, Tensor] = {}
    position = 0
    for start, end in weight.part[0]:
        for number, index in enumerate(change.indices):
            if start <= index < end:
                found[position + index - start] = values[number]
        position += end - start
    return found


class _Factors:
    """Parts of factors: of what this rank holds where that is enough, else of whole ones."""

    def __init__(
        self,
        talk: Conversation,
        needed: Iterable[tuple[Factor, IndexSet]],
        every: Mapping[str, Factor],
    ) -> None:
        lacking = {f.name: f for f, part in needed if not _covers(f, part)}
        self._whole: dict[str, Tensor] = {}
        if talk.world_size > 1:
            self._whole = _gathered(talk, lacking, every)

    def value(self, factor: Factor, part: IndexSet) -> Tensor:
        """The part of `factor`, where its weight is."""
        found = self._whole.get(factor.name)
        if found is not None:
            return take(found, part)
        held, local = local_part(factor.tensor)
        return _taken(local, held, part)


def _covers(factor: Factor, part: IndexSet) -> bool:
    held, _ = local_part(factor.tensor)
    return all(
        sum(length for _, _, length in intersect_spans(wanted, own)) == span_length(wanted)
        for wanted, own in zip(part, held, strict=True)
    )


def _taken(local: Tensor, held: IndexSet, part: IndexSet) -> Tensor:
    """The part of a tensor out of what a rank holds of it."""
    for dim, (own, wanted) in enumerate(zip(held, part, strict=True)):
        if own != wanted:
            runs = [
                local.narrow(dim, position, length)
                for _, position, length in intersect_spans(wanted, own)
            ]
            local = torch.cat(runs or [local.narrow(dim, 0, 0)], dim)
    return local


def _gathered(
    talk: Conversation, lacking: Mapping[str, Factor], every: Mapping[str, Factor]
) -> dict[str, Tensor]:
    """Whole factors that any rank lacks, on every rank that has a part of them; collective."""
    own = {
        name: [list(f.shape), describe(f.tensor, key=name).info.dtype]
        for name, f in lacking.items()
    }
    wanted: dict[str, list[object]] = {}
    for raw in talk.gather("factors-lacking", json.dumps(own).encode()):
        wanted.update(json.loads(raw))
    told = json.dumps(wanted).encode() if talk.is_coordinator else None
    agreed: dict[str, tuple[list[int], str]] = json.loads(talk.broadcast("factors-travel", told))
    here = {name: _placement(every[name].tensor) for name in agreed if name in every}
    givers = _givers(talk, "factors", here)
    group = agreed_exchange_group(talk, "factors") if agreed else None
    found: dict[str, Tensor] = {}
    for batch in _batches(agreed):
        memory = torch.zeros(sum(nbytes for _, nbytes in batch), dtype=torch.uint8)
        position = 0
        for name, nbytes in batch:
            shape, word = agreed[name]
            dtype = _dtype(word)
            end = position + prod(shape) * dtype.itemsize
            target = memory[position:end].view(dtype).view(shape)
            if name in every:
                if name in givers:
                    _put(every[name].tensor, target)
                found[name] = target
            position += nbytes
        # Not a sum: meshes of the same shape beside each other have the same bytes.
        dist.all_reduce(memory, op=dist.ReduceOp.MAX, group=group)
    return found


def _batches(wanted: Mapping[str, tuple[list[int], str]]) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    total = 0
    for name, (shape, word) in wanted.items():
        nbytes = -(-prod(shape) * _dtype(word).itemsize // 8) * 8
        if batch and total + nbytes > _BATCH_NBYTES:
            yield batch
            batch, total = [], 0
        batch.append((name, nbytes))
        total += nbytes
    if batch:
        yield batch


def _dtype(word: str) -> torch.dtype:
    dtype = torch_dtype(word)
    assert dtype is not None, "a factor has a dtype of torch"
    return dtype


def _put(tensor: Tensor, target: Tensor) -> None:
    """Put what this rank has of a tensor into zeros."""
    held, local = local_part(tensor)
    for box, place in boxes_of(held):
        part = local[tuple(slice(*span) for span in place)]
        target[tuple(slice(*span) for span in box)] = part.to(target.device)


def _placement(tensor: Tensor) -> PlacementClass:
    return describe(tensor, key="a factor").info.classes[0]


def _givers(talk: Conversation, topic: str, here: Mapping[str, PlacementClass]) -> set[str]:
    """The tensors of which this rank gives what it holds: each element has one giver; collective.

    A tensor may lie whole on several meshes (one for each tensor-parallel rank): the mesh of the
    lowest rank gives it, and on that the first of those that hold the same.
    """
    own = {name: own_rank() if p == SELF else min(p.ranks) for name, p in here.items()}
    lowest: dict[str, int] = {}
    for raw in talk.gather(f"{topic}-held", json.dumps(own).encode()):
        for name, rank in json.loads(raw).items():
            lowest[name] = min(rank, lowest.get(name, rank))
    told = json.dumps(lowest).encode() if talk.is_coordinator else None
    chosen: dict[str, int] = json.loads(talk.broadcast(f"{topic}-givers", told))
    return {name for name, p in here.items() if chosen[name] == own[name] and _is_first(p)}


def _is_first(placement: PlacementClass) -> bool:
    """Whether this rank is the first on its mesh of those that hold the same."""
    rank = own_rank()
    if placement == SELF:
        return True
    coordinate = placement.coordinate(rank)
    if coordinate is None:
        return False
    pairs = zip(coordinate, placement.placements, strict=True)
    return all(index == 0 for index, each in pairs if isinstance(each, Replicate))


class _Squares:
    """Sums of squares along the dim that a magnitude does not follow, of weights that are cut
    there; collective."""

    def __init__(self, talk: Conversation, weights: Iterable[_Weight], factors: _Factors) -> None:
        self._found: dict[tuple[str, str], Tensor] = {}
        with_magnitude = [w for w in weights if w.change.magnitude is not None]
        for weight in with_magnitude:
            self._found[weight.key, weight.name] = _squares(weight, factors)
        if talk.world_size > 1:
            self._add_up(talk, with_magnitude)

    def of(self, weight: _Weight) -> Tensor | None:
        return self._found.get((weight.key, weight.name))

    def _add_up(self, talk: Conversation, weights: list[_Weight]) -> None:
        own = {f"{w.key}/{w.name}": w for w in weights if _is_cut_across(w)}
        for name, each in own.items():
            if Holding(each.held.info.classes).is_shared:
                raise InvalidInputError(
                    f"{name}: the norms of DoRA would count the blocks twice that ranks share; "
                    "save with adapters=Adapters.ALONE"
                )
        lengths = {n: w.held.info.shape[w.change.magnitude_dim] for n, w in own.items()}
        every: dict[str, int] = {}
        for raw in talk.gather("squares", json.dumps(lengths).encode()):
            every.update(json.loads(raw))
        told = json.dumps(every).encode() if talk.is_coordinator else None
        agreed: dict[str, int] = json.loads(talk.broadcast("squares-of-all", told))
        here = {name: weight.held.info.classes[0] for name, weight in own.items()}
        givers = _givers(talk, "squares", here)
        group = agreed_exchange_group(talk, "squares") if agreed else None
        for name, length in agreed.items():
            total = torch.zeros(length, dtype=torch.float32)
            weight = own.get(name)
            if weight is not None and name in givers:
                self._spread(weight, total)
            dist.all_reduce(total, group=group)
            if weight is not None:
                spans = weight.part[weight.change.magnitude_dim]
                mine = take(total, (spans,))
                self._found[weight.key, weight.name] = mine.to(weight.held.local.device)

    def _spread(self, weight: _Weight, total: Tensor) -> None:
        own = self._found[weight.key, weight.name]
        for (span,), (place,) in boxes_of((weight.part[weight.change.magnitude_dim],)):
            total[slice(*span)] = own[slice(*place)].cpu()


def _is_cut_across(weight: _Weight) -> bool:
    other = 1 - weight.change.magnitude_dim
    return weight.part[other] != whole(weight.held.info.shape)[other]


def _squares(weight: _Weight, factors: _Factors) -> Tensor:
    """Of the part of this rank, some rows at a time."""
    low_rank = low_rank_of(weight.change, weight.part, factors.value)
    local = weight.held.local
    check_fits(low_rank, tuple(local.shape), name=weight.name)
    every = slice(None)
    found = []
    with torch.no_grad():
        for first in range(0, local.shape[0], _ROWS_AT_A_TIME):
            rows = slice(first, first + _ROWS_AT_A_TIME)
            found.append(squared_norms(local[rows], low_rank.box((rows, every))))
    if low_rank.magnitude_dim == 0:
        return torch.cat(found)
    return torch.stack(found).sum(dim=0)
