"""Headers that lie are refused, with a message that says what and where."""

from __future__ import annotations

import os
import re
import resource
import threading
from pathlib import Path

import pytest

from milepost.errors import FormatError, NotFoundError, StorageError
from milepost.format.header import Header, parse_header, read_header

GOOD = '"g":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def parse(document: str | bytes, data_nbytes: int = 2) -> Header:
    raw = document.encode() if isinstance(document, str) else document
    raw = len(raw).to_bytes(8, "little") + raw
    return parse_header(raw, file_nbytes=len(raw) + data_nbytes, where="m.safetensors")


def entry(shape: str = "[2]", offsets: str = "[0,2]", dtype: str = '"U8"', more: str = "") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


def w(*arguments: str, **fields: str) -> str:
    return '{"w":' + entry(*arguments, **fields) + "}"


CASES: list[tuple[str, str | bytes, str]] = [
    ("not-an-object", "[1,2]", r"m\.safetensors: header begins with b'\[1,2\]', expected an"),
    ("leading-space", f" {{{GOOD}}}", "header begins with b' "),
    ("empty", "", "header begins with b''"),
    ("cut-json", '{"w":{"dtype":"U8"', "header is not valid: Input data was truncated"),
    ("trailing-bytes", f"{{{GOOD}}}x", "header is not valid: .*trailing characters"),
    ("trailing-zeros", f"{{{GOOD}}}\0\0", "header is not valid: .*trailing characters"),
    ("not-utf8-name", b'{"w\xff":%s}' % entry().encode(), "header is not valid: Invalid UTF-8"),
    ("not-utf8-dtype", b'{"w":%s}' % entry(dtype='"U\xff"').encode("latin1"),
     "tensor 'w': Invalid UTF-8"),
    ("surrogate", f'{{"\\ud800":{entry()}}}', "header is not valid: .*surrogate"),
    ("deep", '{"w":' + "[" * 200_000, "header is not valid: maximum recursion depth"),
    ("deep-closed", '{"w":' + "[" * 50_000 + "]" * 50_000 + "}", "maximum recursion depth"),
    ("deep-in-metadata", '{"__metadata__":' + '{"a":' * 99_999, "maximum recursion depth"),
    ("deep-in-a-field", '{"w":{"dtype":' + "[" * 500 + "]" * 500 + "}}",
     "tensor 'w': dtype: Expected `str`, got `array`"),
    ("metadata-number", f'{{"__metadata__":{{"step":3}},{GOOD}}}',
     "m.safetensors: __metadata__: 'step': expected a string, found 3$"),
    ("metadata-null", f'{{"__metadata__":null,{GOOD}}}',
     "__metadata__: expected an object of strings, found null"),
    ("metadata-nested", f'{{"__metadata__":{{"a":{{}}}},{GOOD}}}',
     "__metadata__: 'a': expected a string, found {}"),
    ("metadata-text", f'{{"__metadata__":"pt",{GOOD}}}',
     '__metadata__: expected an object of strings, found "pt"'),
    ("metadata-not-utf8", b'{"__metadata__":{"a":"\xff"}}',
     "__metadata__: expected an object of strings, found .*Invalid UTF-8"),
    ("entry-null", '{"w":null}', "tensor 'w': Expected `object`, got `null`; found null"),
    ("entry-array", '{"w":["U8",[2],[0,2]]}', "tensor 'w': Expected `object`, got `array`"),
    ("no-dtype", '{"w":{"shape":[2],"data_offsets":[0,2]}}', "'w': .*missing.*field `dtype`"),
    ("no-shape", '{"w":{"dtype":"U8","data_offsets":[0,2]}}', "'w': .*missing.*field `shape`"),
    ("no-offsets", '{"w":{"dtype":"U8","shape":[2]}}', "'w': .*missing.*`data_offsets`"),
    ("unknown-field", w(more=',"strides":[1]'),
     "tensor 'w': Object contains unknown field `strides`"),
    ("unknown-dtype", w(dtype='"F128"'),
     "tensor 'w': dtype: 'F128' is none of safetensors' types"),
    ("dtype-number", w(dtype="8"), "'w': dtype: Expected `str`, got `int`"),
    ("dim-negative", w("[-2]"), r"'w': shape\[0\]: Expected `int` >= 0; found"),
    ("dim-float", w("[2.0]"), r"'w': shape\[0\]: Expected `int`, got `float`"),
    ("dim-bool", w("[true]"), r"'w': shape\[0\]: Expected `int`, got `bool`"),
    ("dim-text", w('["2"]'), r"'w': shape\[0\]: Expected `int`, got `str`"),
    ("dim-huge", w("[9223372036854775808]"), r"'w': shape\[0\]: Expected `int` <="),
    ("dim-endless", w("[" + "9" * 9000 + "]"), r"'w': shape\[0\]: Integer value"),
    ("dims-too-many", w("[" + ",".join("1" * 65) + "]"),
     "'w': shape: Expected `array` of length <= 64"),
    ("shape-number", w("2"), "'w': shape: Expected `array`, got `int`"),
    ("product-overflows", w("[4294967296,4294967296]", "[0,0]"),
     r"'w': shape: \(4294967296, 4294967296\) has more elements than 64 bits count"),
    ("product-wraps-to-two", w("[9223372036854775807,2,1]", "[0,2]"),
     "'w': shape: .* of U8 is more than 64 bits count"),
    ("bytes-overflow", w("[2305843009213693952]", "[0,0]", '"F64"'),
     "'w': shape: .* of F64 is more than 64 bits count"),
    ("offset-negative", w(offsets="[-2,0]"), r"'w': data_offsets\[0\]: .*>= 0"),
    ("offset-float", w(offsets="[0,2.0]"), r"data_offsets\[1\]: .*got `float`"),
    ("offset-exponent", w(offsets="[0,2e0]"), r"data_offsets\[1\]: .*`float`"),
    ("offset-bool", w(offsets="[false,2]"), r"data_offsets\[0\]: .*got `bool`"),
    ("offset-huge", w(offsets="[0,18446744073709551618]"),
     r"data_offsets\[1\]: Expected `int` <="),
    ("offset-nan", w(offsets="[0,NaN]"), "header is not valid: .*invalid char"),
    ("offset-three", w(offsets="[0,1,2]"), "data_offsets: .* of length 2"),
    ("offset-one", w(offsets="[0]"), "data_offsets: .* of length 2"),
    ("offsets-swapped", w(offsets="[2,0]"),
     r"'w': data_offsets: \[2, 0\] hold -2 bytes, shape \(2\) of U8 takes 2"),
    ("too-few-bytes", w("[3]"),
     r"tensor 'w': data_offsets: \[0, 2\] hold 2 bytes, shape \(3\) of U8 takes 3$"),
    ("too-many-bytes", w("[1]"), r"hold 2 bytes, shape \(1\) of U8 takes 1$"),
    ("scalar-of-two-bytes", w("[]"), r"hold 2 bytes, shape \(\) of U8 takes 1$"),
    ("packed-in-half-a-byte", w("[3]", dtype='"F4"'),
     "'w': shape: 3 elements of F4 take 12 bits, which is not a whole number of bytes"),
    ("past-the-end", w("[3]", "[0,3]"),
     "the tensors take 3 bytes of data, the file holds 2; it was cut short"),
    ("far-past-the-end", w("[576460752303423488]", "[0,576460752303423488]"),
     "the tensors take 576460752303423488 bytes of data, the file holds 2"),
    ("file-too-long", w("[1]", "[0,1]"),
     "the tensors take 1 bytes of data, the file holds 2; the rest belongs to no tensor"),
    ("hole-at-the-start", w("[1]", "[1,2]"),
     "'w': data_offsets: starts at byte 1, the header ends at 0: a hole"),
    ("hole", f'{{"a":{entry("[1]", "[0,1]")},"w":{entry("[1]", "[2,3]")}}}',
     "tensor 'w': data_offsets: starts at byte 2, 'a' ends at 1: a hole"),
    ("overlap", f'{{"a":{entry("[2]", "[0,2]")},"w":{entry("[2]", "[1,3]")}}}',
     "tensor 'w': data_offsets: starts at byte 1, 'a' ends at 2: an overlap"),
    ("same-bytes-twice", f'{{"a":{entry()},"w":{entry()}}}',
     "starts at byte 0, 'a' ends at 2: an overlap"),
    ("empty-tensor-inside-another", f'{{"a":{entry()},"w":{entry("[0]", "[1,1]")}}}',
     "tensor 'w': data_offsets: starts at byte 1, 'a' ends at 2: an overlap"),
    ("empty-tensor-beyond-the-end", f'{{"a":{entry()},"w":{entry("[0]", "[9,9]")}}}',
     "tensor 'w': data_offsets: starts at byte 9, 'a' ends at 2: a hole"),
    ("name-twice", f'{{"w":{entry("[9]")},"w":{entry()}}}',
     "m.safetensors: line 1 column 54: the key 'w' stands twice in one object"),
    ("name-twice-escaped", f'{{"w":{entry()},"\\u0077":{entry()}}}', "the key 'w' stands twice"),
    ("name-twice-and-a-number", f'{{"w":1,"w":{entry()}}}', "the key 'w' stands twice"),
    ("field-twice", w(more=',"shape":[2]'),
     "column 53: w: the key 'shape' stands twice in one object"),
    ("metadata-twice", f'{{"__metadata__":{{"a":"b"}},"__metadata__":{{"a":"b"}},{GOOD}}}',
     "the key '__metadata__' stands twice"),
    ("metadata-key-twice", f'{{"__metadata__":{{"a":"b","a":"c"}},{GOOD}}}',
     "__metadata__: the key 'a' stands twice"),
    ("escapes-hide-a-duplicate", f'{{"\\"a:\\\\":{entry()},"\\"a:\\\\":{entry()}}}',
     "stands twice"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_header_that_cannot_be_right_is_refused(document: str | bytes, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        parse(document)
    text = str(refused.value)
    assert text.startswith("m.safetensors: ")
    assert re.search(message, text), text
    assert len(text) < 600


@pytest.mark.parametrize("letter", ["w", "\\u001b", "\u202e"])
def test_a_hostile_name_neither_floods_nor_colours_the_message(letter: str) -> None:
    name = letter * 1_000_000
    twice = entry(more=',"shape":[2]')
    for document in (
        f'{{"{name}":{entry("[9]")}}}',
        f'{{"w":{{"{name}":1}}}}',
        f'{{"w":{entry(dtype=chr(34) + name + chr(34))}}}',
        f'{{"__metadata__":{{"{name}":1}}}}',
        f'{{"{name}":{entry()},"{name}":{entry()}}}',
        f'{{"{name}":{twice}}}',
    ):
        with pytest.raises(FormatError) as refused:
            parse(document)
        assert len(str(refused.value)) < 600
        assert str(refused.value).isprintable()


def test_the_good_header_of_these_tests_is_good() -> None:
    assert list(parse(f"{{{GOOD}}}").tensors) == ["g"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, a safetensors file has at least 8"),
        (b"\x02\0\0\0\0\0\0", "7 bytes, a safetensors file has at least 8"),
        (b"\x02\0\0\0\0\0\0\0", "header claims 2 bytes, the file has 0 after its length"),
        (b"\x03\0\0\0\0\0\0\0{}", "header claims 3 bytes, the file has 2 after its length"),
        (b"\xff" * 8 + b"{}", "header claims 18446744073709551615 bytes, limit is 100000000"),
        (b"PK\x03\x04" + b"\0" * 100, "header claims 67324752 bytes, the file has 96"),
        (b"\0" * 64, "header begins with b'', expected an opening brace"),
        (b"<html><head>", "header claims 7510946913960880188 bytes, limit is"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError) as refused:
        read_header(path)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert refused.value.path == str(path)


def test_a_claim_is_not_believed_before_the_file_has_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match="header claims 99999999 bytes, the file has 2"):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_only_the_header_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    document = b'{"w":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}'
    path.write_bytes(len(document).to_bytes(8, "little") + document)
    os.truncate(path, 8 + len(document) + 2**40)
    assert read_header(path).tensors["w"].nbytes == 2**40


def test_a_header_that_is_shorter_than_its_claim_is_refused_by_the_parser() -> None:
    with pytest.raises(FormatError, match="x: header ends after 10 bytes, 58 expected"):
        parse_header((50).to_bytes(8, "little") + b"{}", file_nbytes=100, where="x")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "file" / "none"):
        with pytest.raises(NotFoundError, match="no such file"):
            read_header(path)


def test_a_directory_is_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a regular file"):
        read_header(tmp_path)


def test_a_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    os.mkfifo(path)
    errors: list[Exception] = []

    def read() -> None:
        try:
            read_header(path)
        except FormatError as e:
            errors.append(e)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert [str(e) for e in errors] == [f"{path}: not a regular file"]


def test_a_loop_of_links_is_an_error_of_the_storage(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.symlink_to(path.name)
    with pytest.raises(StorageError) as refused:
        read_header(path)
    assert refused.value.errno == 40
