"""Stored tensors as a load looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from milepost.engine.read import read_tensor
from milepost.layouts.checkpoint import TensorInfo
from milepost.layouts.tensor_set import TensorSet


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of a set by name, each read when it is asked for."""

    def __init__(self, tensors: TensorSet) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors.tensors:
            raise KeyError(name)
        return read_stored(self._tensors, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.tensors)

    def __len__(self) -> int:
        return len(self._tensors.tensors)


def read_stored(tensors: TensorSet, name: str) -> torch.Tensor:
    """One tensor of a set, whole, on the CPU."""
    return read_tensor(tensors.stored(name))


def infos_of(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by name."""
    return {name: (info.dtype, info.shape) for name, info in tensors.items()}
