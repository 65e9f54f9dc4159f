"""The header of a safetensors file: read, checked, laid out and written.

A file is a u64 (little-endian) length n, n bytes of JSON, and the data section, which the
tensors tile without holes or overlaps. Nothing here takes memory that a header merely claims.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import msgspec

from milepost.errors import (
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnencodableError,
)
from milepost.format import strictjson
from milepost.format.dtypes import DTYPES
from milepost.format.places import printable, shown

MAX_HEADER_NBYTES = 100_000_000
MAX_DIMS = 64
METADATA_KEY = "__metadata__"
_LENGTH = struct.Struct("<Q")
_MAX_BITS = 2**64 - 1  # what safetensors itself can count
_ESCAPE = re.compile(rb"\\.", re.DOTALL)

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a tensor lies: `start` and `end` in bytes from the beginning of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`tensors` in file order; `data_start` is the file offset of the data section, in bytes."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    data_start: int
    file_nbytes: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor as the JSON has it."""

    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[_Natural, _Natural]


_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str])


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor; packed types need a whole number of bytes.

    Raises InvalidInputError for an unknown type, a negative dim, more than 64 dims, a product
    beyond 64 bits, or elements that end inside a byte.

    >>> tensor_nbytes("BF16", (3, 4)), tensor_nbytes("F6_E2M3", (4,)), tensor_nbytes("F32", ())
    (24, 3, 4)
    """
    row = DTYPES.get(dtype)
    if row is None:
        raise InvalidInputError(
            f"dtype: {shown(dtype)} is none of safetensors' types ({', '.join(DTYPES)})"
        )
    if len(shape) > MAX_DIMS:
        raise InvalidInputError(f"shape: {len(shape)} dims, at most {MAX_DIMS} are supported")
    count = 1
    for length in shape:
        if length < 0:
            raise InvalidInputError(f"shape: {_shape(shape)} has a negative dim")
        count *= length
        if count > _MAX_BITS:
            raise InvalidInputError(f"shape: {_shape(shape)} has more elements than 64 bits count")
    nbits = count * row.nbits
    if nbits > _MAX_BITS:
        raise InvalidInputError(f"shape: {_shape(shape)} of {dtype} is more than 64 bits count")
    if nbits % 8:
        raise InvalidInputError(
            f"shape: {count} elements of {dtype} take {nbits} bits, which is not a whole number"
            f" of bytes; the number of elements must be a multiple of {2 if row.nbits == 4 else 4}"
        )
    return nbits // 8


def layout_tensors(items: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, TensorEntry]:
    """Entries for (name, dtype, shape): widest elements first, else in the order given.

    So every tensor starts at a multiple of its element width, without holes. UnencodableError
    names the tensor that safetensors cannot hold, or that comes twice.
    """
    rows = [(name, dtype, tuple(shape)) for name, dtype, shape in items]
    rows.sort(key=lambda row: -DTYPES[row[1]].nbits if row[1] in DTYPES else 0)
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name, dtype, shape in rows:
        try:
            end = start + tensor_nbytes(dtype, shape)
        except InvalidInputError as e:
            raise UnencodableError(f"{printable(name)}: {e}", key=name) from e
        if name in entries:
            raise UnencodableError(f"{printable(name)}: two tensors have this name", key=name)
        if name == METADATA_KEY:
            raise UnencodableError(
                f"{name}: safetensors keeps this name for its metadata; rename it", key=name
            )
        entries[name] = TensorEntry(name=name, dtype=dtype, shape=shape, start=start, end=end)
        start = end
    return entries


def encode_header(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], *, align: int = 8
) -> bytes:
    """The first bytes of the file, up to the data section: length, JSON, spaces.

    Their number is a multiple of `align`. `format: pt` is the caller's to put in `metadata`.
    """
    document: dict[str, object] = {}
    if metadata:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidInputError(
                    f"{METADATA_KEY}: {shown(key)}: {shown(value)}: both must be strings"
                )
        document[METADATA_KEY] = dict(metadata)
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: (entry.start, entry.end)):
        assert entry.start == end, f"{entry.name}: a layout has no holes and no overlaps"
        assert entry.name not in document, f"{entry.name}: a name stands once in a header"
        document[entry.name] = _Entry(entry.dtype, entry.shape, (entry.start, entry.end))
        end = entry.end
    try:
        raw = msgspec.json.encode(document)
    except UnicodeEncodeError as e:
        raise InvalidInputError(
            f"the name {shown(e.object)} holds a lone surrogate, which UTF-8 cannot store"
        ) from e
    nbytes = len(raw) + -(_LENGTH.size + len(raw)) % align
    if nbytes > MAX_HEADER_NBYTES:
        raise InvalidInputError(
            f"{len(tensors)} tensors need a header of {nbytes} bytes, the limit of safetensors is"
            f" {MAX_HEADER_NBYTES}; write more parts"
        )
    return _LENGTH.pack(nbytes) + raw.ljust(nbytes)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of the file at `path`; reads nothing else of it.

    FormatError when it is no safetensors file, NotFoundError when there is no file.
    """
    where = os.fspath(path)
    try:
        # O_NONBLOCK: opening a pipe that somebody named *.safetensors must not hang.
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{where}: not a regular file", path=where)
            head = _read(descriptor, _LENGTH.size)
            nbytes = _LENGTH.size + _claim(head, status.st_size, where)
            raw = head + _read(descriptor, nbytes - len(head))
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise NotFoundError(f"{where}: no such file", path=where) from e
    except OSError as e:
        raise StorageError(f"{where}: {e.strerror}", path=where, number=e.errno) from e
    return parse_header(raw, file_nbytes=status.st_size, where=where)


def _read(descriptor: int, nbytes: int) -> bytes:
    """Up to `nbytes` from where the descriptor stands; fewer only at the end of the file."""
    pieces = []
    while nbytes:
        piece = os.read(descriptor, nbytes)
        if not piece:
            break
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


def _claim(raw: bytes, file_nbytes: int, where: str) -> int:
    """The number of bytes of the JSON, believed only if the file has them."""
    if len(raw) < _LENGTH.size or file_nbytes < _LENGTH.size:
        _refuse(where, f"{min(len(raw), file_nbytes)} bytes, a safetensors file has at least 8")
    claimed: int = _LENGTH.unpack_from(raw)[0]
    if claimed > MAX_HEADER_NBYTES:
        _refuse(where, f"header claims {claimed} bytes, limit is {MAX_HEADER_NBYTES}")
    if claimed > file_nbytes - _LENGTH.size:
        _refuse(
            where,
            f"header claims {claimed} bytes, the file has {file_nbytes - _LENGTH.size} after"
            f" its length; the file was cut short or is no safetensors file",
        )
    return claimed


def parse_header(raw: bytes, *, file_nbytes: int, where: str) -> Header:
    """The header in `raw`, the first 8 + n bytes of a file of `file_nbytes` bytes.

    FormatError names the tensor and the field that cannot be right.
    """
    data_start = _LENGTH.size + _claim(raw, file_nbytes, where)
    if len(raw) < data_start:
        _refuse(where, f"header ends after {len(raw)} bytes, {data_start} expected")
    document = raw[_LENGTH.size : data_start]
    if not document.startswith(b"{"):
        _refuse(where, f"header begins with {shown(document[:8])}, expected an opening brace")
    try:
        top = _TOP.decode(document)
    except (msgspec.DecodeError, RecursionError) as e:
        raise FormatError(f"{where}: header is not valid: {e}", path=where) from e
    metadata_raw = top.pop(METADATA_KEY, None)
    metadata = {} if metadata_raw is None else _parse_metadata(metadata_raw, where)
    entries = [_parse_entry(name, value, where) for name, value in top.items()]
    n_keys = (metadata_raw is not None) + len(metadata) + 4 * len(entries)
    if _count_keys(document) != n_keys:
        strictjson.loads(document, where)  # names the key and its place
        _refuse(where, "a key stands twice in the header")
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_tiling(entries, file_nbytes - data_start, where)
    return Header(
        metadata=metadata,
        tensors={entry.name: entry for entry in entries},
        data_start=data_start,
        file_nbytes=file_nbytes,
    )


def _refuse(where: str, problem: str) -> NoReturn:
    raise FormatError(f"{where}: {problem}", path=where)


def _parse_metadata(raw: msgspec.Raw, where: str) -> dict[str, str]:
    try:
        return _METADATA.decode(raw)
    except (msgspec.DecodeError, RecursionError) as e:
        cause = e
    try:
        values = _TOP.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        values = {}
    for key, value in values.items():
        if bytes(memoryview(value)[:1]) != b'"':
            _refuse(
                where, f"{METADATA_KEY}: {shown(key)}: expected a string, found {_excerpt(value)}"
            )
    raise FormatError(
        f"{where}: {METADATA_KEY}: expected an object of strings, found {_excerpt(raw)}: {cause}",
        path=where,
    ) from cause


def _parse_entry(name: str, raw: msgspec.Raw, where: str) -> TensorEntry:
    try:
        entry = _ENTRY.decode(raw)
        expected = tensor_nbytes(entry.dtype, entry.shape)
    except (msgspec.DecodeError, RecursionError) as e:
        _refuse_tensor(where, name, f"{_field(e)}; found {_excerpt(raw)}", cause=e)
    except InvalidInputError as e:
        _refuse_tensor(where, name, str(e), cause=e)
    start, end = entry.data_offsets
    if end - start != expected:
        _refuse_tensor(
            where,
            name,
            f"data_offsets: [{start}, {end}] hold {end - start} bytes,"
            f" shape {_shape(entry.shape)} of {entry.dtype} takes {expected}",
        )
    return TensorEntry(name=name, dtype=entry.dtype, shape=entry.shape, start=start, end=end)


def _refuse_tensor(
    where: str, name: str, problem: str, *, cause: Exception | None = None
) -> NoReturn:
    raise FormatError(f"{where}: tensor {shown(name)}: {problem}", path=where) from cause


def _field(error: Exception) -> str:
    """The complaint of msgspec, with the field first: `shape[0]: Expected `int`, got `str``."""
    problem, _, field = str(error).partition(" - at `$.")
    return printable(f"{field[:-1]}: {problem}" if field else problem)


def _excerpt(raw: msgspec.Raw) -> str:
    return printable(bytes(memoryview(raw)[:1000]).decode("utf-8", "backslashreplace"))


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(shown(length) for length in shape) + ")"


def _count_keys(document: bytes) -> int:
    """Keys of all objects in valid JSON, those that stand twice included: each has its colon.

    msgspec keeps the last of two equal keys without a word; counting is how it is noticed.
    """
    if b"\\" in document:
        document = _ESCAPE.sub(b"", document)
    return b"".join(document.split(b'"')[::2]).count(b":")


def _check_tiling(entries: Sequence[TensorEntry], data_nbytes: int, where: str) -> None:
    """Refuse holes, overlaps, and a data section of another size. `entries` are in file order."""
    end, before = 0, "the header"
    for entry in entries:
        if entry.start != end:
            kind = "a hole" if entry.start > end else "an overlap"
            _refuse_tensor(
                where,
                entry.name,
                f"data_offsets: starts at byte {entry.start}, {before} ends at {end}: {kind}",
            )
        end, before = entry.end, shown(entry.name)
    if end != data_nbytes:
        _refuse(
            where,
            f"the tensors take {end} bytes of data, the file holds {data_nbytes};"
            f" {'it was cut short' if end > data_nbytes else 'the rest belongs to no tensor'}",
        )
