"""The weights of a checkpoint as byte sources: streamed into new files, never all in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.engine.source import Scratch
from milepost.errors import DamagedError
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint, huggingface_stem
from milepost.layouts.tensor_set import TensorSet

if TYPE_CHECKING:
    import torch

PIECE_NBYTES = 4 * 2**20


class FileRange:
    """Bytes `[start, start + nbytes)` of a file, read piece by piece as they are written."""

    def __init__(self, path: Path, start: int, nbytes: int) -> None:
        self._path = path
        self._start = start
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        if start >= end:
            return
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < end:
                wanted = min(PIECE_NBYTES, end - start)
                piece = bytearray(os.pread(descriptor, wanted, self._start + start))
                if not piece:
                    raise DamagedError(
                        f"{self._path}: ends at byte {self._start + start}, "
                        f"{self._nbytes - start} bytes early",
                        path=self._path,
                    )
                yield memoryview(piece)
                start += len(piece)
        finally:
            os.close(descriptor)


def tensor_set_of(checkpoint: Checkpoint) -> TensorSet | None:
    """The safetensors parts that hold the weights; None for layouts that are made otherwise."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return checkpoint.weights()
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        path = checkpoint.path
        if not path.is_dir():
            return TensorSet(path.parent, path.name.removesuffix(".safetensors"))
        stem = huggingface_stem(path)
        return None if stem is None else TensorSet(path, stem)
    return None


def mapped_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All weights by name, tied names included; mapped from their files where that can be."""
    tensors = tensor_set_of(checkpoint)
    if tensors is None:
        return checkpoint.read_weights()
    from milepost.engine.read import map_tensor

    weights = {name: map_tensor(tensors.stored(name)) for name in checkpoint.tensors()}
    return weights | {name: weights[kept] for name, kept in checkpoint.tied.items()}
