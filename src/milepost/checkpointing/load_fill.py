"""Where the second phase of a load has tensors from: files, or memory beside the live state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

import torch

from milepost.checkpointing.load_model import Fill
from milepost.checkpointing.load_request import LoadPlan
from milepost.engine.read import StoredTensor, read_tensor
from milepost.engine.read_shard import ShardRead
from milepost.state.optimizer_record import part_name
from milepost.state.placements import local_part

FillAll: TypeAlias = Callable[[list[ShardRead]], None]
"""Fills the targets of all reads, alone or with the other ranks."""


class Tensors(Protocol):
    """The stored tensors that a plan needs."""

    def fill(self, plan: LoadPlan) -> None:
        """Fill the live tensors, which have memory."""

    def whole(self, place: str, name: str) -> torch.Tensor:
        """A stored tensor of the optimizer at `place`, whole."""


class InFiles:
    """They are read from the files straight into live memory."""

    def __init__(self, plan: LoadPlan, fill_all: FillAll) -> None:
        self._sets = {place: tensors for place, (_, tensors) in plan.optimizers.items()}
        self._fill_all = fill_all

    def fill(self, plan: LoadPlan) -> None:
        self._fill_all(_reads(plan))

    def whole(self, place: str, name: str) -> torch.Tensor:
        return read_tensor(self._sets[place].stored(name))


class InMemory:
    """They have been read into host memory of their own; nothing is left to read."""

    def __init__(self, plan: LoadPlan, fill_all: FillAll) -> None:
        # An optimizer keeps its targets, and models may have no memory yet: copies make them here.
        optimizers = {place: (replace(o), s) for place, (o, s) in plan.optimizers.items()}
        self._reads = [_beside(read) for read in _reads(replace(plan, optimizers=optimizers))]
        fill_all(self._reads)
        self._wholes = {
            (place, name): read_tensor(tensors.stored(name))
            for place, (optimizer, tensors) in plan.optimizers.items()
            for state in optimizer.wrapped.anew
            for name in (part_name(state, part) for part in optimizer.wrapped.forms[state].dtypes)
        }

    def fill(self, plan: LoadPlan) -> None:
        with torch.no_grad():
            for live, read in zip(_reads(plan), self._reads, strict=True):
                live.target.copy_(read.target)
        self._reads = []

    def whole(self, place: str, name: str) -> torch.Tensor:
        return self._wholes[place, name]


def _beside(read: ShardRead) -> ShardRead:
    """The same read into new memory, in the stored dtype."""
    memory = torch.empty(read.target.shape, dtype=read.stored.torch_dtype(), device="cpu")
    return replace(read, target=memory)


def _reads(plan: LoadPlan) -> list[ShardRead]:
    """All that is read into live tensors, in an order that is the same at every call."""
    reads = [
        _model_read(stored(fill.name), fill)
        for key, (load, stored) in plan.models.items()
        if key not in plan.already_read
        for fill in load.fills()
    ]
    for optimizer, tensors in plan.optimizers.values():
        for name, target in optimizer.targets().items():
            held, local = local_part(target)
            reads.append(ShardRead(stored=tensors.stored(name), held=held, target=local))
    return reads


def _model_read(stored: StoredTensor, fill: Fill) -> ShardRead:
    if fill.grid is not None and fill.grid != stored.torch_shape():
        stored = replace(stored, shape=fill.grid)
    return ShardRead(stored=stored, held=fill.held, target=fill.target)
