from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import DamagedError, DigestMismatchError, UnencodableError
from milepost.format import selfdigest, strictjson

DOCUMENT: dict[str, Any] = {
    "format": "milepost",
    "step": 1000,
    "loss": 2.25,
    "names": ["ä", "self_digest", {"self_digest": "0" * 32, "deep": {"self_digest": None}}],
    "trap": '\n  "self_digest": "' + "0" * 32 + '"',
    "created": "2025-01-01T00:00:00Z",
}
KEY = b'"self_digest"'


def read(raw: bytes) -> Any:
    """What every reader of such a document does."""
    document = strictjson.loads(raw, "x")
    if isinstance(document, dict):
        selfdigest.check(raw, document, "x")
    return document


@pytest.mark.parametrize("order", [True, False])
def test_a_sealed_document_reads_back(order: bool) -> None:
    raw = selfdigest.seal(DOCUMENT, sort_keys=order)
    document = read(raw)
    digest = document.pop("self_digest")
    assert document == DOCUMENT
    assert len(digest) == 32
    assert raw.endswith(b"\n}\n")
    assert (list(document) == sorted(DOCUMENT)) is order


def test_sealing_again_changes_nothing() -> None:
    raw = selfdigest.seal(DOCUMENT)
    assert selfdigest.seal(read(raw)) == raw


def test_an_empty_document_can_be_sealed() -> None:
    assert list(read(selfdigest.seal({}))) == ["self_digest"]


def test_what_cannot_be_json_is_refused_with_its_place() -> None:
    with pytest.raises(UnencodableError, match=r"^metrics\.loss: nan is not a finite number"):
        selfdigest.seal({"metrics": {"loss": float("nan")}})


def test_every_flipped_bit_is_found() -> None:
    raw = selfdigest.seal(DOCUMENT)
    for position in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            with pytest.raises(DamagedError):
                read(bytes(flipped))


def test_every_replaced_byte_is_found_by_the_digest_alone() -> None:
    """Even when the parser gave the document as it was, as if it had not looked at the bytes."""
    raw = selfdigest.seal(DOCUMENT)
    document = strictjson.loads(raw, "x")
    for position in range(len(raw)):
        for byte in (0, 0x20, 0x30, 0x41, 0x61, 0xFF):
            if raw[position] != byte:
                changed = raw[:position] + bytes([byte]) + raw[position + 1 :]
                with pytest.raises(DigestMismatchError):
                    selfdigest.check(changed, document, "x")


@given(st.data())
def test_any_other_bytes_are_found(data: st.DataObject) -> None:
    raw = selfdigest.seal(DOCUMENT)
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, min(len(raw), start + 40)))
    changed = raw[:start] + data.draw(st.binary(max_size=40)) + raw[end:]
    if changed != raw:
        with pytest.raises(DamagedError):
            read(changed)


@pytest.mark.parametrize("piece", [b"\n", b" ", b"\t"])
def test_white_space_at_the_end_is_a_change_too(piece: bytes) -> None:
    with pytest.raises(DigestMismatchError, match="the document was changed after it was written"):
        read(selfdigest.seal(DOCUMENT) + piece)


def test_a_document_without_a_digest_is_refused() -> None:
    raw = strictjson.dumps({"a": 1, "b": {"self_digest": "0" * 32}}, indent=2)
    with pytest.raises(DigestMismatchError, match="x: self_digest stands 0 times"):
        read(raw)


def test_a_digest_that_moved_into_an_inner_object_does_not_count() -> None:
    raw = selfdigest.seal({"a": 1})
    inner = raw.replace(b"{\n", b'{"inner": {\n').replace(b"\n}\n", b"\n}}\n")
    with pytest.raises(DigestMismatchError, match="the document holds None, its bytes"):
        read(inner)


def test_a_document_written_in_another_style_is_refused() -> None:
    document = json.loads(selfdigest.seal(DOCUMENT))
    for indent in (None, 1, 4):
        with pytest.raises(DigestMismatchError, match="stands 0 times"):
            read(json.dumps(document, indent=indent).encode())


@pytest.mark.parametrize("value", [None, 3, "", "0" * 31, "G" * 32, ["0" * 32]])
def test_a_digest_that_is_none_is_refused(value: object) -> None:
    raw = strictjson.dumps({"a": 1, "self_digest": value}, indent=2) + b"\n"
    with pytest.raises(DigestMismatchError):
        read(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["self_digest", "a", "\n  "]), inner)
    ),
)


@given(st.dictionaries(st.text(max_size=12) | st.just("self_digest"), json_values), st.booleans())
def test_any_document_can_be_sealed_and_checked(document: dict[str, Any], order: bool) -> None:
    found = read(selfdigest.seal(document, sort_keys=order))
    found.pop("self_digest")
    document.pop("self_digest", None)
    assert found == document
