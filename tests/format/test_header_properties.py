"""Random layouts and random damage of headers."""

from __future__ import annotations

import json

import safetensors
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError, InvalidInputError
from milepost.format.dtypes import DTYPES
from milepost.format.header import (
    METADATA_KEY,
    Header,
    encode_header,
    layout_tensors,
    parse_header,
    tensor_nbytes,
)

Item = tuple[str, str, tuple[int, ...]]

texts = st.text(max_size=12)  # hypothesis leaves lone surrogates out of text() by default
names = texts.filter(lambda name: name != METADATA_KEY)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def fits(item: Item) -> bool:
    try:
        return tensor_nbytes(*item[1:]) >= 0
    except InvalidInputError:
        return False


items = st.lists(
    st.tuples(names, st.sampled_from(list(DTYPES)), shapes).filter(fits),
    max_size=8,
    unique_by=lambda item: item[0],
)
metadata = st.dictionaries(texts, texts, max_size=3)
aligns = st.sampled_from([8, 64, 4096])


def file_of(layout: list[Item], marks: dict[str, str], align: int = 8) -> tuple[bytes, int]:
    """The header and the length of the whole file."""
    entries = layout_tensors(layout)
    raw = encode_header(entries, marks, align=align)
    return raw, len(raw) + max((entry.end for entry in entries.values()), default=0)


def consistent(header: Header) -> bool:
    """Every tensor has the bytes of its shape, and together they tile the data section."""
    end = 0
    for name, entry in header.tensors.items():
        assert entry.name == name
        assert entry.start == end
        assert entry.nbytes == tensor_nbytes(entry.dtype, entry.shape)
        end = entry.end
    return header.data_start + end == header.file_nbytes


@given(items, metadata, aligns)
def test_any_layout_reads_back_and_tiles_its_file(
    layout: list[Item], marks: dict[str, str], align: int
) -> None:
    raw, file_nbytes = file_of(layout, marks, align)
    header = parse_header(raw, file_nbytes=file_nbytes, where="x")
    assert len(raw) % align == 0
    assert consistent(header)
    assert header.metadata == marks
    assert header.tensors == layout_tensors(layout)
    assert {(n, e.dtype, e.shape) for n, e in header.tensors.items()} == set(layout)
    widths = [DTYPES[entry.dtype].nbits for entry in header.tensors.values()]
    assert widths == sorted(widths, reverse=True)


@given(items, metadata)
def test_safetensors_accepts_any_layout(layout: list[Item], marks: dict[str, str]) -> None:
    raw, file_nbytes = file_of(layout, marks)
    data = bytes(i % 251 for i in range(file_nbytes - len(raw)))
    theirs = dict(safetensors.deserialize(raw + data))  # type: ignore[no-untyped-call]
    entries = layout_tensors(layout)
    assert set(theirs) == set(entries)
    for name, entry in entries.items():
        assert bytes(theirs[name]["data"]) == data[entry.start : entry.end]
        assert tuple(theirs[name]["shape"]) == entry.shape
        assert theirs[name]["dtype"] == entry.dtype


# Bytes that mean something to JSON or to the format do more damage than others.
damage = st.one_of(
    st.binary(max_size=3),
    st.text('{}[],:"\\ 0123456789-.eE', max_size=3).map(str.encode),
    st.sampled_from([b"null", b"true", b"NaN", b"1e9", b"__metadata__", b"\\u0061", b"\xff"]),
)


@given(items, metadata, st.lists(st.tuples(st.floats(0, 1), damage, st.integers(0, 4)), max_size=4))
def test_a_damaged_header_is_consistent_or_refused(
    layout: list[Item], marks: dict[str, str], damages: list[tuple[float, bytes, int]]
) -> None:
    raw, file_nbytes = file_of(layout, marks)
    document = raw[8:]
    for where, piece, removed in damages:
        at = int(where * len(document))
        document = document[:at] + piece + document[at + removed :]
    damaged = len(document).to_bytes(8, "little") + document
    check_as_safetensors(damaged, file_nbytes - len(raw))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats(0, 4) | st.just("U8"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "U9"]) | json_values,
        "shape": shapes.map(list) | json_values,
        "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 8)).map(list) | json_values,
        "x": json_values,
    },
)


@given(
    st.dictionaries(st.sampled_from([METADATA_KEY, *"abc"]), fields | json_values, max_size=3),
    st.integers(0, 16),
)
def test_any_json_is_consistent_or_refused(document: dict[str, object], data_nbytes: int) -> None:
    raw = json.dumps(document).encode()
    check_as_safetensors(len(raw).to_bytes(8, "little") + raw, data_nbytes)


@given(
    st.lists(st.sampled_from(["a", "\\u0061", "b", 'q\\"', "\\\\"]), min_size=1, max_size=4),
    st.sampled_from(["", " ", "\n\t"]),
)
def test_a_name_that_stands_twice_is_always_refused(chosen: list[str], space: str) -> None:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    document = "{" + ",".join(f'"{name}"{space}:{space}{entry}' for name in chosen) + "}"
    raw = len(document).to_bytes(8, "little") + document.encode()
    decoded = {json.loads(f'"{name}"') for name in chosen}
    try:
        header = parse_header(raw, file_nbytes=len(raw), where="x")
    except FormatError as e:
        assert len(decoded) < len(chosen)
        assert "stands twice" in str(e)
    else:
        assert len(decoded) == len(chosen) == len(header.tensors)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_or_consistent(raw: bytes, file_nbytes: int) -> None:
    try:
        assert consistent(parse_header(raw, file_nbytes=file_nbytes, where="x"))
    except FormatError as e:
        assert str(e).startswith("x: ")


def check_as_safetensors(raw: bytes, data_nbytes: int) -> None:
    """What we accept is consistent and safetensors accepts it too, with the same tensors."""
    try:
        header = parse_header(raw, file_nbytes=len(raw) + data_nbytes, where="x")
    except FormatError as e:
        assert str(e).startswith("x: ")
        assert str(e).isprintable()
        assert len(str(e)) < 600
        return
    assert consistent(header)
    theirs = dict(safetensors.deserialize(raw + bytes(data_nbytes)))  # type: ignore[no-untyped-call]
    assert set(theirs) == set(header.tensors)
    for name, entry in header.tensors.items():
        assert tuple(theirs[name]["shape"]) == entry.shape
        assert len(theirs[name]["data"]) == entry.nbytes
