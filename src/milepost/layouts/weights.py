"""Reading weights out of tensor sets, ties included: shared by the layouts made of safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from milepost.errors import (
    DtypeMismatchError,
    InvalidInputError,
    NotFoundError,
    ShapeMismatchError,
)
from milepost.geometry.blocks import normalise_spans
from milepost.layouts.checkpoint import Index, TensorInfo
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


def check_targets(
    stored: Mapping[str, TensorInfo], tied: Mapping[str, str], targets: Mapping[str, torch.Tensor]
) -> None:
    """Refuse targets of another shape or dtype than the stored tensor of their name."""
    from milepost.state.tensors import stored_dtype, stored_shape

    for name, target in targets.items():
        info = stored.get(tied.get(name, name))
        if info is None:
            raise NotFoundError(f"no tensor {name!r} among the {len(stored)} that are stored")
        if stored_shape(target) != info.shape:
            raise ShapeMismatchError(
                f"{name}: the target has shape {stored_shape(target)}, the checkpoint {info.shape}"
            )
        if stored_dtype(target) != info.dtype:
            raise DtypeMismatchError(
                f"{name}: the target has dtype {stored_dtype(target)}, the checkpoint {info.dtype}"
            )


def fill_one_by_one(
    read: Callable[[str], torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> None:
    """Fill targets from a layout that has no tensor bytes in place."""
    import torch

    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(read(name))


def read_into(
    tensors: TensorSet, tied: Mapping[str, str], targets: Mapping[str, torch.Tensor]
) -> None:
    """Fill targets in parallel, straight from the files."""
    from milepost.engine.read import ReadOptions, fill_tensors

    check_targets(tensors.tensors, tied, targets)
    pairs = [(tensors.stored(tied.get(name, name)), target) for name, target in targets.items()]
    fill_tensors(pairs, ReadOptions())


def map_one(tensors: TensorSet, tied: Mapping[str, str], name: str) -> torch.Tensor:
    """One tensor as a private map of its file."""
    from milepost.engine.read import map_tensor

    return map_tensor(tensors.stored(tied.get(name, name)))


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
