"""JSON without its loose ends: no NaN, no key twice, valid UTF-8, a bounded depth."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NoReturn

from milepost.errors import FormatError, UnencodableError
from milepost.format.places import place, printable, shown

MAX_DEPTH = 256
MAX_INTEGER_NBITS = 14_000  # Python itself refuses to parse more than 4,300 digits

_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"{_STRING}|[\[\]{{}}:,]|[^\s\[\]{{}}:,\"]+", re.DOTALL)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_SURROGATE = re.compile("[\ud800-\udfff]")

_Path = list[str | int]


def dumps(value: object, *, indent: int | None = None, sort_keys: bool = False) -> bytes:
    """`value` as UTF-8 JSON, without a newline at the end.

    Tuples become arrays. UnencodableError names the place of a number that is not finite, a
    key that is not a string, a lone surrogate, an integer of more than 14,000 bits, an object
    JSON does not know, or a nesting deeper than 256.
    """
    try:
        _check(value, [])
        return json.dumps(
            value,
            indent=indent,
            sort_keys=sort_keys,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ": ") if indent is not None else (",", ":"),
        ).encode()
    except RecursionError as e:
        raise UnencodableError("the document: nested too deep for the stack", key="") from e


def _check(value: object, path: _Path) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_NBITS:
            _refuse(path, f"{shown(value)}, readers take at most {MAX_INTEGER_NBITS}")
    elif isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            _refuse(path, f"{shown(value)} holds a lone surrogate, which UTF-8 cannot store")
    elif isinstance(value, float):
        if not math.isfinite(value):
            _refuse(path, f"{value} is not a finite number, and JSON knows no other")
    elif isinstance(value, dict | list | tuple):
        if len(path) >= MAX_DEPTH:
            _refuse(path, f"nested deeper than {MAX_DEPTH} levels; does it contain itself?")
        _check_items(value, path)
    else:
        _refuse(path, f"JSON cannot hold a {type(value).__name__}")


def _check_items(
    value: dict[object, object] | list[object] | tuple[object, ...], path: _Path
) -> None:
    if not isinstance(value, dict):
        for index, item in enumerate(value):
            _check(item, [*path, index])
        return
    for key, item in value.items():
        if not isinstance(key, str):
            _refuse(path, f"the key {shown(key)} is {type(key).__name__}, keys of JSON are str")
        _check(key, path)
        _check(item, [*path, key])


def _refuse(path: _Path, problem: str) -> NoReturn:
    key = place(path)
    raise UnencodableError(f"{printable(key) or 'the document'}: {problem}", key=key)


class _Refused(ValueError):
    """Raised by the hooks of the parser, which do not know where they are."""


def loads(raw: bytes | bytearray | memoryview, where: str) -> Any:
    """The value of a JSON document.

    FormatError names the line and column, or the dotted place, of whatever is not strict:
    a key twice, NaN or Infinity, a number too large, a lone surrogate, bytes that are not
    UTF-8, more than 256 levels.
    """
    raw = bytes(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise FormatError(
            f"{where}: {_line_column(raw[: e.start])}: byte 0x{raw[e.start]:02x} is not UTF-8"
        ) from e
    if _is_deep(raw):
        raise FormatError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as e:
        raise FormatError(f"{where}: line {e.lineno} column {e.colno}: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise FormatError(_diagnose(text, where, e)) from e
    if rb"\u" in raw:
        _check_surrogates(text, where)
    return value


def _line_column(before: bytes) -> str:
    last = before.rsplit(b"\n", 1)[-1].decode("utf-8", "replace")
    return f"line {before.count(10) + 1} column {len(last) + 1}"


def _is_deep(raw: bytes) -> bool:
    """Whether brackets outside of strings nest deeper than MAX_DEPTH."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    outside = b"".join(_ESCAPE.sub(b"", raw).split(b'"')[::2])
    steps = (1 if byte in b"[{" else -1 for byte in outside.translate(None, _NOT_BRACKETS))
    return any(depth > MAX_DEPTH for depth in accumulate(steps))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _Refused("a key stands twice in one object")
    return result


def _refuse_constant(token: str) -> NoReturn:
    raise _Refused(f"{token} is not JSON")


def _finite_float(token: str) -> float:
    number = float(token)
    if not math.isfinite(number):
        raise _Refused(f"the number {shown(token)} is too large")
    return number


def _diagnose(text: str, where: str, error: Exception) -> str:
    """The message for what a hook of the parser refused, with its place where it is found."""
    found = _first(text, _duplicate_or_bad_number)
    if found is None:
        reason = str(error) if isinstance(error, _Refused) else "a number or a nesting too large"
        return f"{where}: {reason}"
    return f"{where}: {found}"


def _check_surrogates(text: str, where: str) -> None:
    found = _first(text, _lone_surrogate)
    if found is not None:
        raise FormatError(f"{where}: {found}")


def _first(text: str, judge: Callable[[str, bool, set[str]], str | None]) -> str | None:
    for position, path, token, is_key, keys in _tokens(text):
        problem = judge(token, is_key, keys)
        if problem is not None:
            line = text.count("\n", 0, position) + 1
            column = position - text.rfind("\n", 0, position)
            named = printable(place(path))
            return f"line {line} column {column}: {named + ': ' if named else ''}{problem}"
    return None


def _duplicate_or_bad_number(token: str, is_key: bool, keys: set[str]) -> str | None:
    if is_key:
        key = json.loads(token)
        return f"the key {shown(key)} stands twice in one object" if key in keys else None
    if token.startswith('"') or token in ("true", "false", "null"):
        return None
    try:
        json.loads(token, parse_constant=_refuse_constant, parse_float=_finite_float)
    except _Refused as e:
        return str(e)
    except ValueError:
        return f"the number {shown(token)} is too large"
    return None


def _lone_surrogate(token: str, is_key: bool, keys: set[str]) -> str | None:
    if "\\u" in token and _SURROGATE.search(json.loads(token)):
        return f"{shown(token)} holds a lone surrogate"
    return None


def _tokens(text: str) -> Iterator[tuple[int, _Path, str, bool, set[str]]]:
    """(position, path, token, whether it is a key, keys seen before in its object).

    Expects well-formed JSON up to the place that is looked for; only used to word an error.
    """
    path: _Path = []
    seen: list[set[str] | None] = []
    awaits_key = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        keys = seen[-1] if seen else None
        if token in "{[":
            path.append("" if token == "{" else 0)
            seen.append(set() if token == "{" else None)
            awaits_key = token == "{"
        elif token in "}]":
            path.pop()
            seen.pop()
        elif token == ",":
            awaits_key = keys is not None
            if isinstance(path[-1], int):
                path[-1] += 1
        elif token == ":":
            awaits_key = False
        elif keys is not None and awaits_key:
            yield match.start(), path[:-1], token, True, keys
            path[-1] = key = json.loads(token)
            keys.add(key)
        else:
            yield match.start(), path, token, False, keys or set()
