from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError
from milepost.format.digests import (
    EXTENT_NBYTES,
    RECORD_NBYTES,
    Extent,
    cut_extents,
    digest_of,
    pack_records,
    root_digest,
    unpack_records,
)

extents = st.lists(
    st.builds(
        Extent,
        digest=st.binary(min_size=16, max_size=16),
        start=st.integers(0, 2**60),
        nbytes=st.integers(0, EXTENT_NBYTES),
    )
)


@given(extents)
def test_records_read_back(written: list[Extent]) -> None:
    raw = pack_records(written)
    assert len(raw) == RECORD_NBYTES * len(written)
    assert unpack_records(raw, "x") == written
    assert unpack_records(memoryview(raw), "x") == written


def test_a_record_is_digest_start_and_nbytes_in_32_bytes() -> None:
    digest = bytes.fromhex(digest_of(b"abc"))
    assert digest == xxhash.xxh3_128(b"abc").digest()
    record = pack_records([Extent(digest=digest, start=0x0102, nbytes=3)])
    assert record == digest + bytes([2, 1, 0, 0, 0, 0, 0, 0]) + bytes([3, 0, 0, 0, 0, 0, 0, 0])
    assert unpack_records(record, "x")[0].end == 0x0105


def test_digests_are_those_of_xxh3_128() -> None:
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"  # vector of the specification
    assert root_digest(b"abc") == digest_of(bytearray(b"abc")) == digest_of(memoryview(b"abc"))


@pytest.mark.parametrize("nbytes", [1, 31, 33, 63])
def test_a_torn_record_is_refused(nbytes: int) -> None:
    with pytest.raises(FormatError, match=f"d.bin: {nbytes} bytes are no whole number of 32-byte"):
        unpack_records(bytes(nbytes), "d.bin")


@pytest.mark.parametrize(("start", "nbytes"), [(0, EXTENT_NBYTES + 1), (2**63, 1), (2**64 - 1, 5)])
def test_a_record_that_cannot_be_right_is_refused(start: int, nbytes: int) -> None:
    good = Extent(digest=bytes(16), start=0, nbytes=5)
    raw = pack_records([good, Extent(digest=bytes(16), start=start, nbytes=nbytes)])
    with pytest.raises(FormatError, match=f"d.bin: record 1: an extent of {nbytes} bytes from"):
        unpack_records(raw, "d.bin")


borders = st.lists(st.integers(0, 5 * EXTENT_NBYTES), max_size=8).map(sorted)


@given(borders)
def test_extents_tile_the_file_without_crossing_a_border(given_borders: list[int]) -> None:
    cuts = cut_extents(given_borders)
    if len(given_borders) < 2:
        assert cuts == []
        return
    end = given_borders[0]
    for start, stop in cuts:
        assert start == end
        assert 0 < stop - start <= EXTENT_NBYTES
        end = stop
    assert end == given_borders[-1]
    assert set(given_borders) <= {given_borders[0], *(stop for _, stop in cuts)}


def test_a_border_at_the_limit_needs_no_second_extent() -> None:
    assert cut_extents([0, EXTENT_NBYTES]) == [(0, EXTENT_NBYTES)]
    assert cut_extents([5, 5 + EXTENT_NBYTES + 1]) == [
        (5, 5 + EXTENT_NBYTES),
        (5 + EXTENT_NBYTES, 6 + EXTENT_NBYTES),
    ]
