"""What a rewrite reads: any checkpoint as named tensors, headers only until bytes are asked for."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from milepost.adapters.kinds import ADAPTER_STEM
from milepost.engine.read import StoredTensor
from milepost.engine.source import memory_of
from milepost.errors import InvalidInputError, NotFoundError
from milepost.format.digests import digest_of
from milepost.format.dtypes import DTYPES
from milepost.format.manifest import MANIFEST_NAME
from milepost.format.tree import decode
from milepost.layouts.checkpoint import Checkpoint, TensorInfo
from milepost.layouts.directory import DirectoryCheckpoint, require_intact
from milepost.layouts.directory_verify import recorded_extents
from milepost.layouts.tensor_set import TensorSet
from milepost.storage.fileops import PathLike
from milepost.tools.carried import needed_sidecars
from milepost.tools.rewrite.proof import prove_layout
from milepost.tools.rewrite.streams import (
    FileStream,
    MemoryStream,
    RowsStream,
    SourceFiles,
    Stream,
    rows_at_a_time,
)
from milepost.tools.sources import tensor_set_of

if TYPE_CHECKING:
    from milepost.format.digests import Extent


_PIECE_NBYTES = 2**20


class EpSlices(Enum):
    """What to do with a save whose experts lie one slice for each rank."""

    REFUSE = "refuse"
    """Only merge-ep-shards understands it."""
    TAKE = "take"
    """The tensors as they lie, `<name>.shard_<rank>` among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a source: safetensors dtype and shape, and where its bytes lie.

    `path` and `start` (the absolute first byte) are None in layouts that do not hold the bytes of
    a tensor as they will be written; such a tensor is read by rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: Source
    path: Path | None = None
    start: int | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index along dim 0; a scalar is one row."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    @property
    def stored_dtype(self) -> str:
        """The dtype that the checkpoint has, where `dtype` is that of values made of it."""
        return self.dtype

    @property
    def held_nbytes(self) -> int:
        """What a stream of it holds at a time: nothing where its bytes lie in a file."""
        if self.path is not None:
            return 0
        if not self.shape or not self.row_nbytes:
            return self.nbytes
        return 2 * min(self.nbytes, rows_at_a_time(self.row_nbytes) * self.row_nbytes)

    @property
    def stored(self) -> StoredTensor:
        """As the engine reads it: torch's dtype and shape."""
        return StoredTensor(
            name=self.name,
            path=self.path or self.source.path,
            start=self.start or 0,
            dtype=self.dtype,
            shape=self.shape,
        )

    def read(self, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A new CPU tensor: all of it, proven where digests are recorded, or rows `[a, b)`."""
        if self.path is None:
            index = None if rows is None else [slice(*rows)]
            return self.source.checkpoint.read(self.name, index)
        shape = self.stored.torch_shape()
        first, last = (0, self.nbytes) if rows is None else (r * self.row_nbytes for r in rows)
        if rows is not None:
            shape = (rows[1] - rows[0], *shape[1:])
        out = torch.empty(shape, dtype=self.stored.torch_dtype())
        self.stream(first, last).read_into(memory_of(out))
        return out

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        """The bytes `[first, last)` of the tensor in order."""
        end = self.nbytes if last is None else last
        if self.path is None or self.start is None:
            return self._read_rows(first, end)
        begin, stop = self.start + first, self.start + end
        extents = self.source.extents_over(self.path, begin, stop)
        return FileStream(
            self.source.files, self.path, begin, stop, what=self.name, extents=extents
        )

    def _read_rows(self, first: int, end: int) -> Stream:
        """The rows that hold these bytes, out of a layout without bytes in place."""
        checkpoint = self.source.checkpoint
        if not self.shape or not self.row_nbytes:
            return MemoryStream(checkpoint.read(self.name), first)
        return RowsStream(
            lambda begin, last: checkpoint.read(self.name, [slice(begin, last)]),
            start=first,
            end=end,
            count=self.shape[0],
            row_nbytes=self.row_nbytes,
        )


class Source:
    """A checkpoint that is an input of a rewrite. `tensors` are its weights in file order."""

    def __init__(self, checkpoint: Checkpoint, slices: EpSlices) -> None:
        self.checkpoint = checkpoint
        self.path = checkpoint.path
        self.files = SourceFiles()
        self.set: TensorSet | None = tensor_set_of(checkpoint)
        if isinstance(checkpoint, DirectoryCheckpoint):
            require_intact(checkpoint, ["weights"])
        if self.set is not None and slices is EpSlices.REFUSE:
            self.set.require_loadable()
        self.is_ep_sharded = self.set is not None and self.set.is_ep_sharded
        self.tensors: Mapping[str, SourceTensor] = self._read_headers()
        if isinstance(checkpoint, DirectoryCheckpoint) and self.set is not None:
            prove_layout(checkpoint, self.set, self.extents_of)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def _read_headers(self) -> dict[str, SourceTensor]:
        if self.set is None:
            return {info.name: self._made(info) for info in self.checkpoint.tensors().values()}
        found = {}
        for part, header in self.set.headers.items():
            for name, entry in header.tensors.items():
                found[name] = SourceTensor(
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    nbytes=entry.nbytes,
                    source=self,
                    path=self.set.directory / part,
                    start=header.data_start + entry.start,
                )
        return found

    def _made(self, info: TensorInfo) -> SourceTensor:
        if info.dtype not in DTYPES:
            raise InvalidInputError(
                f"{self.path}: {info.name}: safetensors cannot hold {info.dtype}; cast it first"
            )
        return SourceTensor(
            name=info.name, dtype=info.dtype, shape=info.shape, nbytes=info.nbytes, source=self
        )

    def __getitem__(self, name: str) -> SourceTensor:
        """`NotFoundError` when there is no such tensor."""
        if name not in self.tensors:
            raise NotFoundError(f"{self.path}: no tensor {name!r}", path=self.path)
        return self.tensors[name]

    @property
    def tied(self) -> Mapping[str, str]:
        """Names without a tensor of their own, and the name whose tensor they share."""
        return self.checkpoint.tied

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, or the recorded configuration; empty when there is none."""
        directory = self.path if self.path.is_dir() else self.path.parent
        try:
            document = json.loads((directory / "config.json").read_bytes())
            if isinstance(document, dict):
                return document
        except (OSError, ValueError):
            pass
        config = self.checkpoint.info.model_config
        if isinstance(self.checkpoint, DirectoryCheckpoint) and config is not None:
            config = decode(config, None, where=f"{self.path}: model_config")
        return dict(config) if isinstance(config, Mapping) else {}

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model: that of a part where the model has several."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def model_types(self) -> tuple[str, ...]:
        """`model_type` of the whole and of its language model, as far as they are stated."""
        found = [self.config.get("model_type"), self.text_config.get("model_type")]
        return tuple(dict.fromkeys(kind for kind in found if isinstance(kind, str)))

    @property
    def stem(self) -> str:
        """The stem of its weights where it is one that loaders know, else `model`."""
        is_known = self.set is not None and self.set.stem in ("model", ADAPTER_STEM)
        return self.set.stem if self.set is not None and is_known else "model"

    @property
    def needs(self) -> list[str]:
        """Sidecars without which the weights are not what was trained."""
        return needed_sidecars(self.checkpoint)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def identity(self) -> dict[str, Any]:
        """What provenance records of an input: its id where it has one, and a digest.

        The digest is that of the manifest, or of all names, dtypes and shapes.
        """
        found: dict[str, Any] = {"name": self.path.name, "layout": self.checkpoint.layout.value}
        if isinstance(self.checkpoint, DirectoryCheckpoint):
            found["checkpoint_id"] = self.checkpoint.manifest.checkpoint_id
            found["manifest"] = digest_of((self.path / MANIFEST_NAME).read_bytes())
        else:
            rows = sorted((t.name, t.dtype, list(t.shape)) for t in self.tensors.values())
            found["headers"] = digest_of(json.dumps(rows).encode())
        return found

    @cached_property
    def _recorded(self) -> dict[Path, list[Extent]]:
        if not isinstance(self.checkpoint, DirectoryCheckpoint):
            return {}
        return {
            self.path / entry.name: recorded_extents(self.path, entry)
            for entry in self.checkpoint.manifest.files
            if entry.role == "weights" and entry.records is not None
        }

    def extents_of(self, path: Path) -> list[Extent]:
        """The digests that are recorded for a file, ascending; empty when there are none."""
        return self._recorded.get(path, [])

    def extents_over(self, path: Path, start: int, end: int) -> list[Extent]:
        """Those of `extents_of` that have bytes of `[start, end)`."""
        extents = self.extents_of(path) if start < end else []
        first = bisect_right(extents, start, key=lambda extent: extent.end)
        last = bisect_left(extents, end, lo=first, key=lambda extent: extent.start)
        return extents[first:last]


def same_bytes(first: SourceTensor, second: SourceTensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes; read piece by piece."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pieces = memoryview(bytearray(_PIECE_NBYTES)), memoryview(bytearray(_PIECE_NBYTES))
    streams = first.stream(), second.stream()
    for start in range(0, first.nbytes, _PIECE_NBYTES):
        ours, theirs = (piece[: first.nbytes - start] for piece in pieces)
        streams[0].read_into(ours)
        streams[1].read_into(theirs)
        if ours != theirs:
            return False
    return True


def open_source(path: PathLike, *, slices: EpSlices = EpSlices.REFUSE) -> Source:
    """A checkpoint of any layout, or a training checkpoint as it lies: its weights.

    `NotFoundError`, `CheckpointIncompleteError` for parts that the index names and that are not
    there or hold other tensors, `DamagedError` for a torn checkpoint or one whose index or headers
    are not those that were saved, `FormatError` for `ep_sharded` unless it is taken. No tensor is
    read.
    """
    return Source(Checkpoint.open(path), slices)
