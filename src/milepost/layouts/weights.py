"""Reading weights out of tensor sets, ties included: shared by the layouts made of safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from milepost.errors import InvalidInputError
from milepost.geometry.blocks import normalise_spans
from milepost.layouts.checkpoint import Index
from milepost.layouts.tensor_set import TensorSet

if TYPE_CHECKING:
    import torch


def read_one(
    tensors: TensorSet, tied: Mapping[str, str], name: str, index: Index | None
) -> torch.Tensor:
    """One tensor or a slice of it, by its own name or one that is tied to it."""
    from milepost.engine.read import read_tensor

    stored = tensors.stored(tied.get(name, name))
    if index is None:
        return read_tensor(stored)
    try:
        spans = normalise_spans(stored.torch_shape(), index)
    except ValueError as error:
        raise InvalidInputError(
            f"{name}: {error}; the stored shape is {stored.torch_shape()}"
        ) from error
    return read_tensor(stored, spans)


def read_many(
    tensors: TensorSet, tied: Mapping[str, str], names: Iterable[str] | None
) -> dict[str, torch.Tensor]:
    """The named tensors (all of them, tied names included, by default), read in parallel."""
    import torch

    from milepost.engine.read import ReadOptions, fill_tensors

    wanted = [*tensors.tensors, *tied] if names is None else list(names)
    kept = dict.fromkeys(tied.get(name, name) for name in wanted)
    stored = {name: tensors.stored(name) for name in kept}
    filled = {
        name: torch.empty(place.torch_shape(), dtype=place.torch_dtype())
        for name, place in stored.items()
    }
    fill_tensors([(stored[name], filled[name]) for name in stored], ReadOptions())
    return {name: filled[tied.get(name, name)] for name in wanted}
