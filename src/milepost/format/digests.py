"""Digests of extents: the records of `digests.bin`, their root, and where extents are cut.

A record is 32 bytes: the XXH3-128 digest (16 bytes, big-endian as xxhash writes it), the first
byte of the extent in its part (u64, little-endian) and the number of its bytes (u64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec
import xxhash

from milepost.errors import FormatError

Buffer: TypeAlias = bytes | bytearray | memoryview

EXTENT_NBYTES = 64 * 2**20
RECORD_NBYTES = 32
DIGEST_NBYTES = 16
_RECORD = struct.Struct("<16sQQ")
_MAX_OFFSET = 2**63 - 1


class Extent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A byte range of a part, with its digest (16 bytes)."""

    digest: bytes
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.nbytes


def digest_of(data: Buffer) -> str:
    """XXH3-128 of `data`, 32 hex digits."""
    return str(xxhash.xxh3_128(data).hexdigest())


def pack_records(extents: Iterable[Extent]) -> bytes:
    """The records of `extents`, one after the other."""
    packed = bytearray()
    for extent in extents:
        assert len(extent.digest) == DIGEST_NBYTES, "a digest of XXH3-128 has 16 bytes"
        packed += _RECORD.pack(extent.digest, extent.start, extent.nbytes)
    return bytes(packed)


def unpack_records(raw: Buffer, where: str) -> list[Extent]:
    """The extents in `raw`; FormatError when it does not consist of records."""
    if len(raw) % RECORD_NBYTES:
        raise FormatError(
            f"{where}: {len(raw)} bytes are no whole number of {RECORD_NBYTES}-byte records"
        )
    extents = [
        Extent(digest=digest, start=start, nbytes=nbytes)
        for digest, start, nbytes in _RECORD.iter_unpack(raw)
    ]
    for number, extent in enumerate(extents):
        if extent.nbytes > EXTENT_NBYTES or extent.end > _MAX_OFFSET:
            raise FormatError(
                f"{where}: record {number}: an extent of {extent.nbytes} bytes from byte"
                f" {extent.start} on; extents have at most {EXTENT_NBYTES} bytes"
            )
    return extents


def root_digest(records: Buffer) -> str:
    """The digest over packed records that stands in the manifest, 32 hex digits."""
    return digest_of(records)


def cut_extents(borders: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of the extents between `borders`, ascending offsets in a file.

    No extent crosses a border or has more than 64 MiB; equal borders give none.

    >>> cut_extents([0, 100, 100, 70_000_000])
    [(0, 100), (100, 67108964), (67108964, 70000000)]
    """
    extents = []
    for start, end in pairwise(borders):
        assert start <= end, "borders of extents ascend"
        extents += [
            (first, min(first + EXTENT_NBYTES, end)) for first in range(start, end, EXTENT_NBYTES)
        ]
    return extents
