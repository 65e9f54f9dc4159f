"""The items of `.distcp` files: where the bytes of a chunk lie, and values that are no tensors.

An item is an archive of `torch.save` at an offset of its file, or lies in a safetensors file there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from milepost.errors import CheckpointIncompleteError, DamagedError, FormatError
from milepost.format.header import Header, parse_header
from milepost.format.lazy import ITEM_NBYTES, LazyTensor
from milepost.geometry.blocks import Span
from milepost.geometry.placement import IndexSet, intersect_spans
from milepost.layouts.archive_reader import TorchArchive
from milepost.layouts.dcp_metadata import Chunk, DcpTensor, Item

if TYPE_CHECKING:
    import torch

    from milepost.engine.read import StoredTensor

Box: TypeAlias = tuple[Span, ...]
_ZIP = b"PK\x03\x04"


class DcpItems:
    """The files of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self, name: str, item: Item) -> None:
        """`CheckpointIncompleteError` when the file of an item is absent or ends before it."""
        place = self.directory / item.file
        try:
            nbytes = place.stat().st_size
        except FileNotFoundError:
            raise CheckpointIncompleteError(
                f"{place}: is missing, though {name} lies in it; the directory was copied or "
                "written incompletely",
                path=place,
            ) from None
        if nbytes < item.end:
            raise DamagedError(
                f"{place}: has {nbytes} bytes, {name} lies at {item.start} to {item.end}; the file "
                "was cut short: use another copy",
                path=place,
            )

    def archive(self, name: str, item: Item) -> TorchArchive:
        """The archive of an item; the caller closes it."""
        self.check(name, item)
        place = self.directory / item.file
        try:
            return TorchArchive.open(place, window=(item.start, item.end))
        except FormatError as error:
            raise FormatError(f"{name}: {error} (item at byte {item.start})", path=place) from error

    def value(self, name: str, item: Item) -> Any:
        """A value that is no tensor, with plain data only."""
        with self.archive(name, item) as archive:
            return archive.materialise(archive.tree)

    def stored(self, tensor: DcpTensor, chunk: Chunk) -> StoredTensor | None:
        """Where the bytes of a chunk lie in its file; None when its elements do not lie row by row,
        so that only `chunk` gives it."""
        from milepost.engine.read import StoredTensor

        found = self._place(tensor, chunk)
        if found is None:
            return None
        return StoredTensor(
            name=tensor.name,
            path=self.directory / chunk.item.file,
            start=found,
            dtype=tensor.dtype_name,
            shape=tensor.header_shape(chunk.sizes),
        )

    def chunk(self, tensor: DcpTensor, chunk: Chunk) -> torch.Tensor:
        """The whole chunk as a tensor."""
        with self.archive(tensor.name, chunk.item) as archive:
            return archive.read_tensor(self._lazy(archive, tensor, chunk))

    def is_archive(self, name: str, item: Item) -> bool:
        """Whether an item is an archive of `torch.save`; its file must be there."""
        self.check(name, item)
        with open(self.directory / item.file, "rb") as file:
            file.seek(item.start)
            return file.read(len(_ZIP)) == _ZIP

    def _place(self, tensor: DcpTensor, chunk: Chunk) -> int | None:
        """Absolute first byte of a chunk in its file."""
        if not self.is_archive(tensor.name, chunk.item):
            return self._in_safetensors(tensor, chunk)
        with self.archive(tensor.name, chunk.item) as archive:
            lazy = self._lazy(archive, tensor, chunk)
            plain = not lazy.conjugated and not lazy.negated
            if not plain or lazy.stride != _row_major(lazy.shape):
                return None
            record = archive.storage_record(lazy.storage)
            offset = lazy.storage_offset * ITEM_NBYTES[lazy.dtype]
            return chunk.item.start + record.start + offset

    def _lazy(self, archive: TorchArchive, tensor: DcpTensor, chunk: Chunk) -> LazyTensor:
        lazy = archive.tree
        if not isinstance(lazy, LazyTensor):
            raise self._unexpected(tensor, chunk, f"a {type(lazy).__name__}")
        if lazy.shape != chunk.sizes or lazy.dtype != tensor.dtype:
            raise self._unexpected(tensor, chunk, f"{lazy.dtype} {lazy.shape}")
        return lazy

    def _in_safetensors(self, tensor: DcpTensor, chunk: Chunk) -> int:
        place = self.directory / chunk.item.file
        header = _header_at(place, chunk.item.start, place.stat().st_size)
        entry = header.tensors.get(tensor.name)
        if entry is None:
            raise self._unexpected(tensor, chunk, "other tensors")
        if entry.shape != tensor.header_shape(chunk.sizes) or entry.dtype != tensor.dtype_name:
            raise self._unexpected(tensor, chunk, f"{entry.dtype} {entry.shape}")
        return chunk.item.start + header.data_start + entry.start

    def _unexpected(self, tensor: DcpTensor, chunk: Chunk, found: str) -> FormatError:
        place = self.directory / chunk.item.file
        return FormatError(
            f"{place}: at byte {chunk.item.start}, {tensor.name} of {tensor.dtype} {chunk.sizes} "
            f"is expected, found {found}; the files are not of one save",
            path=place,
        )


@lru_cache(maxsize=64)
def _header_at(path: Path, start: int, file_nbytes: int) -> Header:
    """The header of a safetensors file that begins at `start` of another file."""
    with open(path, "rb") as file:
        file.seek(start)
        claim = file.read(8)
        length = min(int.from_bytes(claim, "little"), file_nbytes - start)
        raw = claim + file.read(length)
    return parse_header(raw, file_nbytes=file_nbytes - start, where=f"{path} at byte {start}")


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def fill_from_chunks(
    items: DcpItems,
    wanted: Sequence[tuple[DcpTensor, IndexSet, torch.Tensor]],
    *,
    threads: int | None = None,
) -> None:
    """Fill each local tensor with the index set of a stored one; only the bytes needed are read.

    An error leaves some unfilled.
    """
    import torch

    from milepost.engine.read import ReadOptions
    from milepost.engine.read_shard import ShardRead, fill_shards

    reads = []
    with torch.no_grad():
        for tensor, held, target in wanted:
            for chunk in tensor.chunks:
                for inside, local in _common(held, chunk):
                    place = tuple(slice(*span) for span in local)
                    stored = items.stored(tensor, chunk)
                    if stored is None:
                        piece = items.chunk(tensor, chunk)[tuple(slice(*s) for s in inside)]
                        target[place].copy_(piece)
                        continue
                    box = tuple((span,) for span in inside)
                    reads.append(ShardRead(stored=stored, held=box, target=target[place]))
    fill_shards(reads, ReadOptions() if threads is None else ReadOptions(threads=threads))


def _common(held: IndexSet, chunk: Chunk) -> list[tuple[Box, Box]]:
    """Boxes of what is wanted of a chunk: (inside the chunk, inside the local tensor)."""
    dims = [
        [
            ((inside, inside + length), (local, local + length))
            for local, inside, length in intersect_spans(spans, ((start, start + size),))
        ]
        for spans, start, size in zip(held, chunk.offsets, chunk.sizes, strict=True)
    ]
    return [
        (tuple(inside for inside, _ in box), tuple(local for _, local in box))
        for box in product(*dims)
    ]
