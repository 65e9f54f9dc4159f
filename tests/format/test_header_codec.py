from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from milepost.errors import InvalidInputError, UnencodableError
from milepost.format.dtypes import DTYPES
from milepost.format.header import (
    METADATA_KEY,
    TensorEntry,
    encode_header,
    layout_tensors,
    parse_header,
    read_header,
    tensor_nbytes,
)


def one(
    name: str = "a", dtype: str = "U8", shape: tuple[int, ...] = (3,)
) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype, shape)]


def test_a_header_reads_back_as_it_was_laid_out(tmp_path: Path) -> None:
    tensors = layout_tensors([("w", "BF16", (3, 4)), ("step", "I64", ()), ("none", "F32", (0, 4))])
    raw = encode_header(tensors, {"format": "pt", "made by": "me"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw + bytes(32))
    header = read_header(path)
    assert header.metadata == {"format": "pt", "made by": "me"}
    assert header.tensors == tensors
    assert header.data_start == len(raw)
    assert header.file_nbytes == len(raw) + 32
    assert header.tensors["w"].nbytes == 24


def test_wider_elements_come_first_so_that_all_are_aligned_and_equals_keep_their_order() -> None:
    items = [("b", "U8", (3,)), ("h", "F16", (5,)), ("c", "BOOL", (1,)), ("d", "F64", (1,))]
    tensors = layout_tensors(
        [*items, ("f4", "F4", (2,)), ("c64", "C64", (2,)), ("f6", "F6_E2M3", (4,))]
    )
    assert list(tensors) == ["d", "c64", "h", "b", "c", "f6", "f4"]
    for entry in tensors.values():
        width = max(DTYPES[entry.dtype].nbits // 8, 1)
        assert entry.start % width == 0


@pytest.mark.parametrize("align", [8, 64, 4096])
@pytest.mark.parametrize("name", ["a", "ab", "abcdefg", "abcdefgh", "x" * 5000])
def test_data_starts_at_a_multiple_of_the_alignment(align: int, name: str) -> None:
    raw = encode_header(layout_tensors(one(name)), {}, align=align)
    assert len(raw) % align == 0
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8
    assert parse_header(raw, file_nbytes=len(raw) + 3, where="x").data_start == len(raw)


@pytest.mark.parametrize("tail", [b"", b" ", b"   ", b"\n\t\r "])
def test_old_headers_that_are_unaligned_or_padded_are_read(tail: bytes) -> None:
    document = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' + tail
    raw = len(document).to_bytes(8, "little") + document
    header = parse_header(raw, file_nbytes=len(raw) + 1, where="x")
    assert header.data_start == len(raw)
    assert header.metadata == {}


def test_a_file_without_tensors_is_read() -> None:
    raw = encode_header({}, {})
    assert raw == b"\x08\0\0\0\0\0\0\0{}      "
    assert parse_header(raw, file_nbytes=16, where="x").tensors == {}


def test_metadata_is_absent_when_there_is_none_and_first_when_there_is_some() -> None:
    tensors = layout_tensors(one())
    assert METADATA_KEY.encode() not in encode_header(tensors, {})
    assert list(json.loads(encode_header(tensors, {"k": "v"})[8:])) == [METADATA_KEY, "a"]


def test_entries_are_in_file_order_whatever_the_order_of_the_json() -> None:
    document = (
        b'{"b":{"data_offsets":[4,6],"dtype":"U8","shape":[2]},'
        b'"a":{"shape":[4],"dtype":"U8","data_offsets":[0,4]}}'
    )
    raw = len(document).to_bytes(8, "little") + document
    assert list(parse_header(raw, file_nbytes=len(raw) + 6, where="x").tensors) == ["a", "b"]


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "ä.層", "a:b,{}[]", "\0\n", "\\u0061", "😀"])
def test_any_name_that_unicode_has_is_kept(name: str) -> None:
    raw = encode_header(layout_tensors([(name, "U8", (1,)), ("other", "U8", (1,))]), {name: name})
    header = parse_header(raw, file_nbytes=len(raw) + 2, where="x")
    assert list(header.tensors) == [name, "other"]
    assert header.metadata == {name: name}


@pytest.mark.case("V07")
def test_unknown_metadata_survives_a_rewrite() -> None:
    raw = encode_header(layout_tensors(one()), {"format": "pt", "training_run": "7", "ü": "é"})
    header = parse_header(raw, file_nbytes=len(raw) + 3, where="x")
    assert encode_header(header.tensors, header.metadata) == raw


@pytest.mark.case("V05")
@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F4", (2,), 1), ("F4", (3, 6), 9), ("F4", (0,), 0), ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (2, 6), 9), ("F8_E8M0", (5,), 5), ("BOOL", (), 1), ("C64", (2, 2), 32),
        ("I64", (), 8), ("F32", (0, 4), 0), ("U16", (7,), 14), ("F32", (1,) * 64, 4),
        ("U8", (0, 2**62), 0),
    ],
)  # fmt: skip
def test_a_tensor_takes_the_bytes_of_its_elements(
    dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    assert tensor_nbytes(dtype, shape) == nbytes


@pytest.mark.case("V05")
@pytest.mark.parametrize(
    ("dtype", "shape", "problem"),
    [
        ("F128", (1,), "dtype: 'F128' is none of safetensors' types (BOOL, F4,"),
        ("F4", (3,), "3 elements of F4 take 12 bits, which is not a whole number of bytes; the"
         " number of elements must be a multiple of 2"),
        ("F4", (), "1 elements of F4 take 4 bits"),
        ("F6_E2M3", (2,), "2 elements of F6_E2M3 take 12 bits, which is not a whole number of"
         " bytes; the number of elements must be a multiple of 4"),
        ("U8", (2, -1), "shape: (2, -1) has a negative dim"),
        ("U8", (2**32, 2**32, 0), "has more elements than 64 bits count"),
        ("F64", (2**61,), "is more than 64 bits count"),
        ("U8", (1,) * 65, "shape: 65 dims, at most 64"),
    ],
)  # fmt: skip
def test_a_tensor_that_the_container_cannot_hold_is_refused_with_its_name(
    dtype: str, shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(InvalidInputError) as bare:
        tensor_nbytes(dtype, shape)
    assert problem in str(bare.value)
    with pytest.raises(UnencodableError) as named:
        layout_tensors([("fine", "U8", (1,)), ("layers.0.w", dtype, shape)])
    assert named.value.key == "layers.0.w"
    assert str(named.value) == f"layers.0.w: {bare.value}"


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(UnencodableError, match=r"^w: two tensors have this name$"):
        layout_tensors([("w", "U8", (1,)), ("w", "F32", (1,))])


def test_a_tensor_under_the_name_of_the_metadata_is_refused() -> None:
    with pytest.raises(UnencodableError, match="__metadata__: safetensors keeps this name"):
        layout_tensors(one(METADATA_KEY))


def test_metadata_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="__metadata__: 'step': 3: both must be strings"):
        encode_header({}, {"step": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("metadata", [{}, {"k": "\udc80"}])
def test_a_text_that_utf8_cannot_store_is_refused(metadata: dict[str, str]) -> None:
    name = "w" if metadata else "w\ud800"
    with pytest.raises(InvalidInputError, match="holds a lone surrogate"):
        encode_header(layout_tensors(one(name)), metadata)


def test_a_header_above_the_limit_of_safetensors_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("milepost.format.header.MAX_HEADER_NBYTES", 100)
    with pytest.raises(InvalidInputError, match=r"3 tensors need a header of \d+ bytes, the limit"):
        encode_header(layout_tensors([(f"w{i}", "U8", (1,)) for i in range(3)]), {})


def test_a_layout_with_a_hole_is_never_written() -> None:
    hole = TensorEntry(name="a", dtype="U8", shape=(1,), start=1, end=2)
    with pytest.raises(AssertionError, match="no holes"):
        encode_header({"a": hole}, {})


def test_twenty_thousand_tensors_are_laid_out_written_and_read_at_once() -> None:
    names = [f"model.layers.{i // 400}.mlp.experts.{i % 400}.up_proj.weight" for i in range(20_000)]
    began = time.thread_time()
    tensors = layout_tensors((name, "BF16", (128, 64)) for name in names)
    raw = encode_header(tensors, {"format": "pt"})
    header = parse_header(raw, file_nbytes=len(raw) + 20_000 * 128 * 64 * 2, where="x")
    took_s = time.thread_time() - began
    assert header.tensors == tensors
    assert took_s < 1.0  # of this thread on a core; it takes 0.06 s
