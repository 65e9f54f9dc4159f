"""Python state to JSON data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from milepost.errors import UnencodableError
from milepost.format import tree_numpy
from milepost.format.places import printable, shown
from milepost.format.tree_advice import advice
from milepost.format.tree_records import (
    FOREIGN_PREFIX,
    MAX_DEPTH,
    MAX_EXACT_INT,
    TAG_KEY,
    TENSOR_TAGS,
    EnumValue,
    Json,
    Reference,
    TensorSink,
    child,
    is_named_tuple,
    qualified_name,
)
from milepost.format.tree_rules import Rule, encode_bytes, rule_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMED_AT_MOST = 5


def encode(value: Any, sink: TensorSink | None = None, *, key: str = "") -> Json:
    """`value` as data for a strict JSON writer; `key` is the dotted place it has in the state.

    Tensors and long arrays go to `sink`; without one, arrays are written inline and tensors are
    refused. UnencodableError names every place that cannot be stored, not just the first.

    >>> encode({"step": 3, "betas": (0.9, 0.95)})
    {'step': 3, 'betas': {'$type': 'tuple', 'items': [0.9, 0.95]}}
    """
    encoder = _Encoder(sink)
    data = encoder.value(value, key)
    if encoder.refused:
        raise _report(encoder.refused)
    return data


def _report(refused: Sequence[tuple[str, str]]) -> UnencodableError:
    named = "; ".join(
        f"{printable(key) or 'the state itself'}: {problem}"
        for key, problem in refused[:_NAMED_AT_MOST]
    )
    if len(refused) == 1:
        message = f"{named} (nothing was saved)"
    else:
        rest = len(refused) - _NAMED_AT_MOST
        more = f"; and {rest} more" if rest > 0 else ""
        message = f"{len(refused)} values cannot be stored: {named}{more} (nothing was saved)"
    return UnencodableError(message, key=refused[0][0])


class _Refused(Exception):
    """Unwinds to the nearest value, which notes the problem and goes on with the next."""


class _Encoder:
    def __init__(self, sink: TensorSink | None) -> None:
        self._sink = sink
        self._open: dict[int, str] = {}  # id of a container being encoded -> its key
        self._hashed = 0  # inside a set or a key of a dict
        self.refused: list[tuple[str, str]] = []

    def value(self, value: Any, key: str) -> Json:
        """`value` encoded, or None after noting why it cannot be."""
        kind = type(value)
        if value is None or kind is bool or _is_exact(value, kind):
            return value  # type: ignore[no-any-return]
        try:
            with self._inside(value, key):
                return self._composite(value, kind, key)
        except UnencodableError as e:  # from the sink
            self.refused.append((e.key, str(e).removeprefix(f"{e.key}: ")))
        except _Refused as e:
            self.refused.append((key, str(e)))
        return None

    @contextmanager
    def _inside(self, value: Any, key: str) -> Iterator[None]:
        if (ancestor := self._open.get(id(value))) is not None:
            raise _Refused(f"refers back to {ancestor or 'the state itself'}; break the cycle")
        if len(self._open) >= MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels; flatten it")
        self._open[id(value)] = key
        try:
            yield
        finally:
            del self._open[id(value)]

    def _composite(self, value: Any, kind: type, key: str) -> Json:
        if kind is list:
            return self._items(value, key)
        if kind is dict and TAG_KEY not in value and all(map(_is_plain_name, value)):
            return {name: self.value(item, child(key, name)) for name, item in value.items()}
        if (rule := rule_of(kind)) is not None:
            return self._by_rule(rule, value, key)
        if self._sink is not None and (reference := self._sink.add(key, value)) is not None:
            return self._reference(reference)
        if isinstance(value, Enum):
            name = value.name if value.name in kind.__members__ else None  # type: ignore[attr-defined]
            return self._enum(qualified_name(kind), name, value.value, key)
        if kind is EnumValue:
            return self._enum(value.class_name, value.name, value.value, key)
        if is_named_tuple(kind):
            return self._named_tuple(value, kind, key)
        if tree_numpy.is_numpy(value):
            return self._numpy(value, key)
        raise _Refused(advice(value))

    def _items(self, items: Iterable[Any], key: str) -> list[Json]:
        return [self.value(item, child(key, str(i))) for i, item in enumerate(items)]

    def _by_rule(self, rule: Rule, value: Any, key: str) -> Json:
        try:
            parts = rule.reduce(value)
        except TypeError as e:
            raise _Refused(f"{rule.tag} cannot be stored: {e}") from e
        data: dict[str, Json] = {TAG_KEY: rule.tag}
        for name, part in zip(rule.fields, parts, strict=True):
            if name == "items":
                data[name] = self._set_items(part, key) if rule.is_set else self._items(part, key)
            elif name == "pairs":
                data[name] = self._pairs(part, key)
            elif part is not None:
                data[name] = self.value(part, key)
        return data

    def _set_items(self, items: Iterable[Any], key: str) -> list[Json]:
        """Sorted by their text, so that equal sets give equal bytes in every process."""
        encoded = [self._hashable(item, child(key, f"<item {i}>")) for i, item in enumerate(items)]
        return sorted(encoded, key=lambda data: json.dumps(data, sort_keys=True))

    def _pairs(self, pairs: Mapping[Any, Any], key: str) -> list[Json]:
        data: list[Json] = []
        for i, (name, item) in enumerate(pairs.items()):
            place = child(key, _key_text(name, i))
            data.append([self._hashable(name, place), self.value(item, place)])
        return data

    def _hashable(self, value: Any, key: str) -> Json:
        self._hashed += 1
        try:
            return self.value(value, key)
        finally:
            self._hashed -= 1

    def _reference(self, reference: Reference) -> Json:
        assert reference.tag.startswith(FOREIGN_PREFIX), "a sink's tags begin with torch."
        if self._hashed and reference.tag in TENSOR_TAGS:
            raise _Refused("a tensor is a key or in a set; key by a name instead")
        return {TAG_KEY: reference.tag, **reference.fields}

    def _enum(self, class_name: str, name: str | None, value: Any, key: str) -> Json:
        data: dict[str, Json] = {TAG_KEY: "enum", "class": class_name}
        if name is not None:
            data["name"] = self.value(name, key)
        if value is not None:
            data["value"] = self.value(value, key)
        return data

    def _named_tuple(self, value: Any, kind: Any, key: str) -> Json:
        names = kind._fields
        return {
            TAG_KEY: "namedtuple",
            "class": qualified_name(kind),
            "fields": list(names),
            "items": [self.value(v, child(key, n)) for n, v in zip(names, value, strict=True)],
        }

    def _numpy(self, value: Any, key: str) -> Json:
        try:
            if isinstance(value, tree_numpy.scalar_class()):
                dtype, scalar = tree_numpy.scalar_fields(value)
                return {TAG_KEY: "numpy.scalar", "dtype": dtype, "value": self.value(scalar, key)}
            if isinstance(value, tree_numpy.array_class()):
                return self._array(value, key)
            return {TAG_KEY: "numpy.dtype", "dtype": tree_numpy.dtype_text(value)}
        except TypeError as e:
            raise _Refused(f"{qualified_name(type(value))} cannot be stored: {e}") from e

    def _array(self, value: NDArray[Any], key: str) -> Json:
        raw = tree_numpy.raw_bytes(value)
        shape: list[Json] = list(value.shape)
        data: dict[str, Json] = {
            TAG_KEY: "numpy.ndarray",
            "dtype": tree_numpy.dtype_text(value.dtype),
            "shape": shape,
        }
        if self._sink is None or raw.nbytes <= tree_numpy.INLINE_NBYTES:
            data["data"] = encode_bytes(raw.data)
        else:
            data["tensor"] = self._sink.add_array(key, raw)
        return data


def _is_exact(value: Any, kind: type) -> bool:
    """Whether JSON holds the number or text as it is."""
    if kind is int:
        return -MAX_EXACT_INT <= value <= MAX_EXACT_INT  # type: ignore[no-any-return]
    if kind is float:
        return math.isfinite(value)
    return kind is str and _is_unicode(value)


def _is_plain_name(name: Any) -> bool:
    return type(name) is str and _is_unicode(name)


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which UTF-8 cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key_text(name: Any, index: int) -> str:
    if _is_plain_name(name):
        return name  # type: ignore[no-any-return]
    if name is None or type(name) in (int, bool, float):
        return shown(name)
    return f"<{type(name).__name__} {index}>"
