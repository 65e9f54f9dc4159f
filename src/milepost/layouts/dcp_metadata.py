"""The `.metadata` of a torch DCP directory: which chunks a tensor has and where each of them lies.

It is a pickle, read by the safe unpickler with the names of DCP's own records allowed and no other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from milepost.errors import CheckpointIncompleteError, FormatError, StorageError
from milepost.format.dtypes import by_torch_name
from milepost.format.lazy import Opaque, TorchKind, TorchValue
from milepost.format.manifest import check_file_name
from milepost.format.pickles import loads

METADATA_NAME = ".metadata"
MAX_METADATA_NBYTES = 2**30
_MAX_CELLS = 2**20

_RECORDS = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *(
            f"{_RECORDS}.{name}"
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
                "MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
    }
)
"""What may stand in a `.metadata` besides plain data; its instances stay inert records."""

Key: TypeAlias = tuple[Any, ...]
"""The place of an entry in the state dict that was saved, as keys of its containers."""


class Item(NamedTuple):
    """A byte range of a file of the directory."""

    file: str
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, `offsets` and `sizes` in elements per dim, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor by its flat name: torch's word for the dtype, the global shape, its chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype as safetensors calls it; torch's word where it has no name for it."""
        row = by_torch_name(self.dtype)
        return self.dtype if row is None else row.name

    def header_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` as a safetensors header counts it: packed elements one by one."""
        row = by_torch_name(self.dtype)
        pack = 1 if row is None else row.elements_per_torch
        return (*shape[:-1], shape[-1] * pack) if shape and pack > 1 else shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What `.metadata` says: tensors and other values by flat name, and the place of each.

    `version` is DCP's; the place of a name is the name alone where none is recorded.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Item]
    places: Mapping[str, Key]
    version: str | None


def read_metadata(directory: Path) -> DcpMetadata:
    """`UnsafePickleError` names what is more than data, `FormatError` what is malformed."""
    place = directory / METADATA_NAME
    try:
        if place.stat().st_size > MAX_METADATA_NBYTES:
            raise FormatError(f"{place}: {place.stat().st_size} bytes are no metadata", path=place)
        raw = place.read_bytes()
    except OSError as error:
        raise StorageError(f"{place}: {error.strerror}", path=place, number=error.errno) from error
    return parse_metadata(raw, str(place))


def parse_metadata(raw: bytes, where: str) -> DcpMetadata:
    tree = loads(raw, where=where, allow=ALLOWED)
    top = _fields(tree, "Metadata", where)
    entries = _mapping(top.get("state_dict_metadata"), f"{where}: state_dict_metadata")
    items = dict(_items(_mapping(top.get("storage_data"), f"{where}: storage_data"), where))
    planned = top.get("planner_data")
    known = planned if isinstance(planned, dict) else {}
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, Item] = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, Opaque):
            raise FormatError(f"{where}: state_dict_metadata: an entry is no record of a tensor")
        if entry.class_name.endswith(".TensorStorageMetadata"):
            tensors[name] = _tensor(name, entry, items, f"{where}: {name}")
        elif (name, None) in items:
            values[name] = items[name, None]
        else:
            raise CheckpointIncompleteError(f"{where}: {name}: nothing says where it lies")
    version = top.get("version")
    return DcpMetadata(
        tensors=tensors,
        values=values,
        places={name: _place(known.get(name), name) for name in entries},
        version=version if isinstance(version, str) else None,
    )


def _place(recorded: object, name: str) -> Key:
    if isinstance(recorded, tuple) and all(type(part) in (str, int) for part in recorded):
        return recorded or (name,)
    return (name,)


def _fields(value: object, kind: str, where: str) -> dict[str, object]:
    if not isinstance(value, Opaque) or value.class_name.rpartition(".")[2] != kind:
        found = value.class_name if isinstance(value, Opaque) else type(value).__name__
        raise FormatError(f"{where}: expected a record {kind}, found {found}")
    return value.fields()


def _mapping(value: object, where: str) -> dict[Any, object]:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a mapping, found {type(value).__name__}")
    return value


def _items(
    storage: Mapping[Any, object], where: str
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Item]]:
    """Where each chunk (name, offsets) and each other value (name, None) lies."""
    for index, info in storage.items():
        own = _fields(index, "MetadataIndex", where)
        name = own.get("fqn")
        if not isinstance(name, str):
            raise FormatError(f"{where}: storage_data: a key has no name")
        offset = own.get("offset")
        place = f"{where}: {name}"
        key = (name, None if offset is None else _lengths(offset, f"{place}: offset"))
        found = _fields(info, "_StorageInfo", place)
        if found.get("transform_descriptors"):
            raise FormatError(
                f"{place}: written through the stream extension "
                f"{found['transform_descriptors']!r:.100}, which is not undone here; load it with "
                "torch.distributed.checkpoint and save it without extensions"
            )
        file, start, nbytes = (found.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _is_natural(start) or not _is_natural(nbytes):
            raise FormatError(f"{place}: its file, offset or length is malformed")
        check_file_name(file, place)
        yield key, Item(file, start, nbytes)  # type: ignore[arg-type]


def _is_natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _lengths(value: object, where: str) -> tuple[int, ...]:
    if isinstance(value, TorchValue) and value.kind is TorchKind.SIZE:
        value = value.value
    if not isinstance(value, tuple) or not all(_is_natural(n) for n in value):
        raise FormatError(f"{where}: expected lengths, found {value!r:.80}")
    return value


def _tensor(
    name: str, entry: Opaque, items: Mapping[tuple[str, tuple[int, ...] | None], Item], where: str
) -> DcpTensor:
    fields = entry.fields()
    shape = _lengths(fields.get("size"), f"{where}: size")
    boxes = fields.get("chunks")
    if not isinstance(boxes, list):
        raise FormatError(f"{where}: its chunks are no list")
    chunks = []
    for box in boxes:
        own = _fields(box, "ChunkStorageMetadata", where)
        offsets = _lengths(own.get("offsets"), f"{where}: offsets")
        sizes = _lengths(own.get("sizes"), f"{where}: sizes")
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start + length <= whole
            for start, length, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise FormatError(
                f"{where}: a chunk at {offsets} of {sizes} lies outside of the shape {shape}"
            )
        if (name, offsets) not in items:
            raise CheckpointIncompleteError(
                f"{where}: nothing says where its chunk at {offsets} lies"
            )
        chunks.append(Chunk(offsets=offsets, sizes=sizes, item=items[name, offsets]))
    _check_cover(shape, chunks, where)
    return DcpTensor(name=name, dtype=_dtype(fields, where), shape=shape, chunks=tuple(chunks))


def _dtype(fields: Mapping[str, object], where: str) -> str:
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Opaque) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, TorchValue) or dtype.kind is not TorchKind.DTYPE:
        raise FormatError(f"{where}: no dtype is recorded")
    return str(dtype.value)


def _check_cover(shape: tuple[int, ...], chunks: list[Chunk], where: str) -> None:
    """Refuse chunks that leave a hole: a rank's part is missing from the metadata."""
    if prod(shape) == 0:
        return
    full = [chunk for chunk in chunks if prod(chunk.sizes)]
    borders = [
        sorted({b for c in full for b in (c.offsets[dim], c.offsets[dim] + c.sizes[dim])})
        for dim in range(len(shape))
    ]
    cells = prod(max(0, len(marks) - 1) for marks in borders)
    if cells > _MAX_CELLS:
        raise FormatError(f"{where}: its {len(full)} chunks are cut in {cells} ways")
    covered: set[tuple[int, ...]] = set()
    for chunk in full:
        spans = [
            range(bisect_left(marks, start), bisect_left(marks, start + length))
            for marks, start, length in zip(borders, chunk.offsets, chunk.sizes, strict=True)
        ]
        covered.update(product(*spans))
    ends = all(m and m[0] == 0 and m[-1] == n for m, n in zip(borders, shape, strict=True))
    if not full or not ends or len(covered) != cells:
        raise CheckpointIncompleteError(
            f"{where}: its {len(chunks)} chunks do not cover the shape {shape}; the part of a rank "
            "is missing"
        )
