"""A typed tree with its tensors as one run of bytes, for state that each rank has of its own.

The blob is the magic, the length of the JSON (u64, little-endian), the JSON of the tree, and a
safetensors file with the tensors it refers to.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from milepost.errors import FormatError
from milepost.format import strictjson
from milepost.format.dtypes import DTYPES
from milepost.format.header import encode_header, layout_tensors, parse_header
from milepost.format.tree import decode, encode
from milepost.state.tensors import flat_bytes, stored_dtype, stored_shape
from milepost.state.tree_torch import MappingSource, StateTensors

_MAGIC = b"MPTREE01"
_LENGTH = struct.Struct("<Q")


def pack_tree(value: Any, *, key: str) -> bytes:
    """`value` with all its tensors; `UnencodableError` as `format.tree.encode`."""
    sink = StateTensors()
    text = strictjson.dumps(encode(value, sink, key=key))
    tensors = {name: t.detach().cpu().contiguous() for name, t in sink.tensors.items()}
    entries = layout_tensors((n, stored_dtype(t), stored_shape(t)) for n, t in tensors.items())
    parts = [_MAGIC, _LENGTH.pack(len(text)), text, encode_header(entries, {})]
    parts += [_raw(tensors[name]) for name in entries]
    return b"".join(parts)


def _raw(tensor: torch.Tensor) -> bytes:
    data: bytes = flat_bytes(tensor).numpy().tobytes()
    return data


def unpack_tree(blob: bytes, *, where: str) -> Any:
    """What `pack_tree` was given; `FormatError` for anything else. Zeros may follow the blob."""
    start = len(_MAGIC) + _LENGTH.size
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < start:
        raise FormatError(f"{where}: begins with {blob[:8]!r}, expected {_MAGIC!r}")
    end = start + _LENGTH.unpack_from(blob, len(_MAGIC))[0]
    text, rest = blob[start:end], blob[end:]
    if len(text) != end - start or len(rest) < _LENGTH.size:
        raise FormatError(f"{where}: ends at byte {len(blob)}, before what it promises")
    tensors = _tensors(rest, where)
    return decode(strictjson.loads(text, where), MappingSource(tensors), where=where)


def _tensors(rest: bytes, where: str) -> dict[str, torch.Tensor]:
    header_nbytes = _LENGTH.size + _LENGTH.unpack_from(rest, 0)[0]
    if header_nbytes > len(rest):
        raise FormatError(f"{where}: a header of {header_nbytes} bytes, {len(rest)} are there")
    claimed = _claimed_nbytes(rest[:header_nbytes], where)
    header = parse_header(rest[:header_nbytes], file_nbytes=header_nbytes + claimed, where=where)
    if header_nbytes + claimed > len(rest):
        raise FormatError(f"{where}: tensors end past byte {len(rest)}")
    found = {}
    for name, entry in header.tensors.items():
        torch_name = DTYPES[entry.dtype].torch_name
        if torch_name is None:
            raise FormatError(f"{where}: tensor {name!r} has dtype {entry.dtype}")
        raw = bytearray(rest[header_nbytes + entry.start : header_nbytes + entry.end])
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        found[name] = flat.view(getattr(torch, torch_name)).reshape(_torch_shape(entry))
    return found


def _torch_shape(entry: Any) -> tuple[int, ...]:
    pack = DTYPES[entry.dtype].elements_per_torch
    return entry.shape if pack == 1 else (*entry.shape[:-1], entry.shape[-1] // pack)


def _claimed_nbytes(raw: bytes, where: str) -> int:
    """Bytes of tensor data that a header speaks of, so that zeros after them are allowed."""
    document = strictjson.loads(raw[_LENGTH.size :], where)
    ends = [
        entry["data_offsets"][1]
        for name, entry in (document.items() if isinstance(document, dict) else ())
        if name != "__metadata__" and isinstance(entry, dict)
        and isinstance(entry.get("data_offsets"), list) and len(entry["data_offsets"]) == 2
    ]  # fmt: skip
    return max((end for end in ends if isinstance(end, int)), default=0)
