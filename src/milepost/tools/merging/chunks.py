"""Tensors of several models, a bounded number of elements at a time, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_NUMEL = 2**17


class Inputs(NamedTuple):
    """One tensor of every model, all of one shape, on the CPU; `base` is None where there is none.

    `key` seeds what is random: it differs for every tensor of a merge.
    """

    models: Sequence[Tensor]
    base: Tensor | None = None
    key: str = ""

    @property
    def shape(self) -> torch.Size:
        return self.models[0].shape

    @property
    def numel(self) -> int:
        return self.models[0].numel()

    def values(self, part: slice) -> list[Tensor]:
        """The elements `part` of the flattened models, fp32; less those of the base if there is."""
        found = [model.reshape(-1)[part].float() for model in self.models]
        if self.base is None:
            return found
        origin = self.origin(part)
        return [value - origin for value in found]

    def value(self, number: int, part: slice) -> Tensor:
        """The same for one of the models."""
        found = self.models[number].reshape(-1)[part].float()
        return found if self.base is None else found - self.origin(part)

    def origin(self, part: slice) -> Tensor:
        """The elements `part` of the flattened base, fp32."""
        assert self.base is not None, "a method with a base was given none"
        return self.base.reshape(-1)[part].float()


def parts_of(numel: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of about `CHUNK_NUMEL` flattened elements, each a multiple of `multiple` but the last
    if `numel` is none."""
    length = max(1, CHUNK_NUMEL // multiple) * multiple
    for start in range(0, numel, length):
        yield slice(start, min(start + length, numel))


def put(out: Tensor, part: slice, values: Tensor) -> None:
    """Store fp32 elements in the flattened `out`, cast once to its dtype."""
    out.view(-1)[part].copy_(values)
