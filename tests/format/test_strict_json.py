from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError, UnencodableError
from milepost.format.strictjson import MAX_DEPTH, dumps, loads

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=20,
)


@given(values, st.sampled_from([None, 2]), st.booleans())
def test_what_is_written_reads_back_equal(value: Any, indent: int | None, order: bool) -> None:
    raw = dumps(value, indent=indent, sort_keys=order)
    assert loads(raw, "x") == value == json.loads(raw)
    assert str(loads(raw, "x")) == str(value) or order  # floats to the last bit, ints as ints


def test_text_is_written_as_it_is_and_tuples_as_arrays() -> None:
    assert dumps({"ä": ("層", 1.5)}) == '{"ä":["層",1.5]}'.encode()
    assert dumps({"b": 1, "a": 2}, indent=2, sort_keys=True) == b'{\n  "a": 2,\n  "b": 1\n}'


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"a": [1, {"b.c": math.nan}]}, 'a[1]["b.c"]', "nan is not a finite number"),
        ({"a": -math.inf}, "a", "-inf is not a finite number"),
        (math.inf, "", "the document: inf is not a finite number"),
        ({"a": {3: 1}}, "a", "the key 3 is int, keys of JSON are str"),
        ({"a": {None: 1}}, "a", "the key None is NoneType"),
        ({True: 1}, "", "the document: the key True is bool"),
        ({"a": {1, 2}}, "a", "JSON cannot hold a set"),
        ({"a": [b"x"]}, "a[0]", "JSON cannot hold a bytes"),
        ({"a": 1j}, "a", "JSON cannot hold a complex"),
        ({"a": [-(10**5000)]}, "a[0]", "an integer of 16610 bits, readers take at most 14000"),
        ({(10**5000,): 1}, "", "the document: the key a tuple is tuple"),
        ({"a": "\udc80"}, "a", r"'\udc80' holds a lone surrogate"),
        ({"a": {"\ud800": 1}}, "a", r"'\ud800' holds a lone surrogate"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_with_its_place(
    value: object, key: str, message: str
) -> None:
    with pytest.raises(UnencodableError) as refused:
        dumps(value)
    assert refused.value.key == key
    assert message in str(refused.value)
    assert str(refused.value).startswith(key or "the document")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_a_value_that_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["a"] = value
    with pytest.raises(UnencodableError, match="nested deeper than 256 levels; does it contain"):
        dumps(value)


def test_the_depth_limit_is_the_same_in_both_directions() -> None:
    raw = dumps(nested(MAX_DEPTH))
    assert loads(raw, "x") == nested(MAX_DEPTH)
    with pytest.raises(UnencodableError):
        dumps(nested(MAX_DEPTH + 1))
    with pytest.raises(FormatError, match="x: nested deeper than 256 levels"):
        loads(b"[" + raw + b"]", "x")


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    value = {'"[' * 400: ["\\", "[{" * 400, "\\["]}
    assert loads(dumps(value), "x") == value


@pytest.mark.parametrize("raw", [b"[" * 10**6, b'{"a":' * 10**5, b"[" * 10**5 + b"]" * 10**5])
def test_a_bottomless_document_is_refused_without_recursion(raw: bytes) -> None:
    with pytest.raises(FormatError, match="nested deeper"):
        loads(raw, "x")


def test_a_caller_deep_in_its_own_calls_sees_no_recursion_error() -> None:
    raw = dumps(nested(MAX_DEPTH))
    seen: list[BaseException | None] = []

    def descend() -> None:
        with contextlib.suppress(RecursionError):
            descend()
        if len(seen) > 900:
            return
        try:
            seen.append(None if dumps(loads(raw, "x")) == raw else AssertionError())
        except (FormatError, UnencodableError) as e:
            seen.append(e)
        except RecursionError:  # no room for the call itself
            pass

    descend()
    assert {type(e) for e in seen} == {FormatError, UnencodableError, type(None)}
    assert all(e is None or "nesting" in str(e) or "nested" in str(e) for e in seen)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "x: line 1 column 1: Expecting value"),
        (b'{"a": 1,\n "b" 2}', "x: line 2 column 6: Expecting ':' delimiter"),
        (b'{"a": 1} 2', "x: line 1 column 10: Extra data"),
        (b"\xef\xbb\xbf{}", "x: line 1 column 1: Unexpected UTF-8 BOM"),
        (b'{"a":\n "\xc3\xa4\xff"}', "x: line 2 column 4: byte 0xff is not UTF-8"),
        (b'{"a": {"b": 1,\n "c": 2, "b": 3}}',
         "x: line 2 column 10: a: the key 'b' stands twice in one object"),
        (b'[{}, {"a": 1, "\\u0061": 1}]', "x: line 1 column 15: [1]: the key 'a' stands twice"),
        (b'{"a": [0, NaN]}', "x: line 1 column 11: a[1]: NaN is not JSON"),
        (b'{"NaN": 1, "b c": -Infinity}', 'x: line 1 column 19: ["b c"]: -Infinity is not JSON'),
        (b"Infinity", "x: line 1 column 1: Infinity is not JSON"),
        (b'["NaN", 1e400]', "x: line 1 column 9: [1]: the number '1e400' is too large"),
        (b"[1, [-1e999]]", "x: line 1 column 6: [1][0]: the number '-1e999' is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "x: line 1 column 7: a: the number '9999"),
        (b'{"a": "\\ud800"}', "x: line 1 column 7: a: '\"\\\\ud800\"' holds a lone surrogate"),
        (b'{"\\udc00": 1}', "x: line 1 column 2: '\"\\\\udc00\"' holds a lone surrogate"),
        (b'{"a": "\n"}', "x: line 1 column 8: Invalid control character at"),
        (b"[01]", "x: line 1 column 3: Expecting ',' delimiter"),
        (b"[1,]", "x: line 1 column 4: Expecting value"),
        (b"{'a': 1}", "x: line 1 column 2: Expecting property name"),
        (b'\xff\xfe{\0}\0', "x: line 1 column 1: byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
def test_a_document_that_is_not_strict_is_refused_with_its_place(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        loads(raw, "x")
    assert str(refused.value).startswith(message), str(refused.value)
    assert len(str(refused.value)) < 400


def test_pairs_of_surrogates_and_escaped_backslashes_are_plain_text() -> None:
    assert loads(b'["\\ud83d\\ude00", "\\\\ud800", "\\u00e4"]', "x") == ["😀", "\\ud800", "ä"]


damage = st.one_of(
    st.binary(max_size=2),
    st.text('{}[],:"\\ 0123456789-.eE', max_size=3).map(str.encode),
    st.sampled_from([b"NaN", b"-Infinity", b"1e999", b"\\ud800", b'"a":1,', b"[" * 300]),
)


@given(values, st.lists(st.tuples(st.floats(0, 1), damage, st.integers(0, 3)), max_size=3))
def test_a_damaged_document_is_json_or_refused(
    value: Any, damages: list[tuple[float, bytes, int]]
) -> None:
    raw = dumps(value)
    for where, piece, removed in damages:
        at = int(where * len(raw))
        raw = raw[:at] + piece + raw[at + removed :]
    try:
        found = loads(raw, "x")
    except FormatError as e:
        assert str(e).startswith("x: ")
        assert str(e).isprintable()
    else:
        assert loads(dumps(found), "x") == found == json.loads(raw)
