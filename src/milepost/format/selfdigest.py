"""JSON documents that carry a digest of their own bytes, under the key `self_digest`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import xxhash

from milepost.errors import DigestMismatchError
from milepost.format import strictjson
from milepost.format.places import shown

KEY = "self_digest"
_ZEROS = "0" * 32
# With indent 2 only a key of the outermost object follows a newline and exactly two spaces:
# deeper keys are indented more, and a string cannot hold a raw newline.
_PLACE = re.compile(rb'\n  "self_digest": "([0-9a-f]{32})"')


def seal(document: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    """`document` as strict JSON with indent 2, a newline at the end and its `self_digest`.

    The digest is XXH3-128 over all bytes, with its own 32 hex digits as zeros. One that
    `document` already has is replaced.
    """
    zeroed = {**document, KEY: _ZEROS}
    raw = strictjson.dumps(zeroed, indent=2, sort_keys=sort_keys) + b"\n"
    start, end = _only_place(raw)
    return raw[:start] + _digest(raw, start, end).encode() + raw[end:]


def check(raw: bytes, document: Mapping[str, Any], where: str) -> None:
    """DigestMismatchError unless `raw`, parsed as `document`, is as it was sealed."""
    recorded = document.get(KEY)
    places = [match.span(1) for match in _PLACE.finditer(raw)]
    if len(places) != 1:
        raise DigestMismatchError(
            f"{where}: {KEY} stands {len(places)} times in the document where it was written"
            f" once; it was changed after it was written"
        )
    (start, end) = places[0]
    if recorded != raw[start:end].decode():
        raise DigestMismatchError(
            f"{where}: {KEY}: the document holds {shown(recorded)}, its bytes"
            f" {shown(raw[start:end].decode())}; it was changed after it was written"
        )
    found = _digest(raw, start, end)
    if found != recorded:
        raise DigestMismatchError(
            f"{where}: {KEY}: recorded {recorded}, the bytes give {found};"
            f" the document was changed after it was written"
        )


def _only_place(raw: bytes) -> tuple[int, int]:
    places = [match.span(1) for match in _PLACE.finditer(raw)]
    assert len(places) == 1, "a sealed document has one self_digest at its top"
    return places[0]


def _digest(raw: bytes, start: int, end: int) -> str:
    view = memoryview(raw)
    state = xxhash.xxh3_128(view[:start])
    state.update(_ZEROS.encode())
    state.update(view[end:])
    return str(state.hexdigest())
