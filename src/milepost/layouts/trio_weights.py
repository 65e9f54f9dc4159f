"""The weights of an opened trio, read through a descriptor that another save cannot take away."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import (
    DamagedError,
    DigestMismatchError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from milepost.format.digests import Extent
from milepost.format.names import strip_compile_segments
from milepost.geometry.blocks import normalise_spans
from milepost.layouts.checkpoint import Index, TensorInfo
from milepost.layouts.legacy import plain_weights, stored_names
from milepost.layouts.trio_open import TrioDocuments

if TYPE_CHECKING:
    import torch

    from milepost.engine.read import StoredTensor


class TrioWeights:
    """Tensors by their plain names; ties as the metadata records them.

    Whole tensors are checked against the recorded digests: `DigestMismatchError` names the one
    whose bytes are wrong. The descriptor is closed with this object.
    """

    def __init__(self, documents: TrioDocuments, descriptor: int) -> None:
        self._documents = documents
        self._descriptor = descriptor
        self.header = documents.header
        self.shown = documents.file(documents.names.weights)
        weakref.finalize(self, os.close, descriptor)

    @cached_property
    def path(self) -> Path:
        """A path to the file that was opened, whatever has its name now."""
        path = Path(f"/dev/fd/{self._descriptor}")
        return path if path.exists() else self._documents.places[self.shown.name].path

    @cached_property
    def stored(self) -> dict[str, str]:
        """From plain names to those in the file; `FormatError` when two become one."""
        plain = plain_weights(self.header.tensors, where=str(self.shown))[0]
        changed = stored_names(self.header.tensors)
        return {name: changed.get(name, name) for name in plain}

    def tensors(self) -> dict[str, TensorInfo]:
        entries = {name: self.header.tensors[stored] for name, stored in self.stored.items()}
        return {
            name: TensorInfo(
                name=name,
                dtype=entry.dtype,
                shape=entry.shape,
                nbytes=entry.nbytes,
                file=self.shown.name,
            )
            for name, entry in entries.items()
        }

    def _find(self, name: str) -> StoredTensor:
        from milepost.engine.read import StoredTensor

        kept = self._documents.meta.tied.get(name, name)
        stored = self.stored.get(kept, self.stored.get(strip_compile_segments(kept), kept))
        entry = self.header.tensors.get(stored)
        if entry is None:
            raise absent_tensor(self.shown, name, self.stored)
        return StoredTensor(
            name=stored,
            path=self.path,
            start=self.header.data_start + entry.start,
            dtype=entry.dtype,
            shape=entry.shape,
        )

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        from milepost.engine.read import read_tensor

        if index is None:
            return self.read_many([name])[name]
        stored = self._find(name)
        with self._named():
            return read_tensor(stored, spans_of(name, stored.torch_shape(), index))

    def read_many(self, names: Iterable[str] | None) -> dict[str, torch.Tensor]:
        """See `Checkpoint.read_weights`."""
        import torch

        from milepost.engine.read import ReadOptions, fill_tensors

        wanted = [*self.stored, *self._documents.meta.tied] if names is None else list(names)
        stored = {name: self._find(name) for name in wanted}
        places = {place.name: place for place in stored.values()}
        with self._named():
            filled = {
                name: torch.empty(place.torch_shape(), dtype=place.torch_dtype())
                for name, place in places.items()
            }
            fill_tensors([(places[name], filled[name]) for name in places], ReadOptions())
        self._check(filled)
        return {name: filled[stored[name].name] for name in wanted}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors about the open descriptor name the file as people know it."""
        try:
            yield
        except (DamagedError, StorageError) as error:
            text = str(error).replace(str(self.path), str(self.shown))
            if isinstance(error, StorageError):
                raise StorageError(text, path=self.shown, number=error.errno) from error
            raise type(error)(text, path=self.shown) from error

    @cached_property
    def extents(self) -> list[Extent]:
        """The extents of the file with their digests; empty when none are recorded."""
        recorded = self._documents.meta.weights
        if recorded is None:
            return []
        if recorded.nbytes != self.header.file_nbytes:
            raise FormatError(
                f"{self.shown}: has {self.header.file_nbytes} bytes, {recorded.nbytes} were saved",
                path=self.shown,
            )
        return recorded.matched(self.header, str(self.shown))

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import xxhash

        from milepost.engine.source import memory_of

        by_start = {extent.start: extent for extent in self.extents}
        for name, tensor in tensors.items() if by_start else ():
            entry, memory = self.header.tensors[name], memory_of(tensor)
            at = 0
            while at < entry.nbytes:
                extent = by_start[self.header.data_start + entry.start + at]
                found = xxhash.xxh3_128_digest(memory[at : at + extent.nbytes])
                if found != extent.digest:
                    raise DigestMismatchError(
                        f"{self.shown}: tensor {name}: its bytes are not those that were saved; "
                        "use another checkpoint",
                        path=self.shown,
                    )
                at += extent.nbytes


def absent_tensor(path: Path, name: str, names: Iterable[str]) -> NotFoundError:
    """The error for a name that no tensor has, with those that are close."""
    known = list(names)
    close = get_close_matches(name, known, n=3)
    hint = f"; close: {', '.join(close)}" if close else ""
    return NotFoundError(f"{path}: no tensor {name!r} among {len(known)}{hint}", path=path)


def spans_of(name: str, shape: Sequence[int], index: Index) -> tuple[tuple[int, int], ...]:
    """The box that `index` cuts out of a tensor of `shape`. `InvalidInputError` when it cannot."""
    try:
        return normalise_spans(tuple(shape), index)
    except ValueError as error:
        raise InvalidInputError(f"{name}: {error}; the stored shape is {tuple(shape)}") from error
