"""JSON data to Python state; strict, and nothing in the data is ever called or imported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from milepost.errors import CheckpointError, FormatError, MismatchError
from milepost.format import tree_numpy
from milepost.format.places import printable, shown
from milepost.format.tree_records import (
    FOREIGN_PREFIX,
    MAX_DEPTH,
    TAG_KEY,
    EnumValue,
    Reference,
    TensorSource,
    child,
    is_named_tuple,
    named_tuple_class,
    qualified_name,
)
from milepost.format.tree_rules import RULES, Rule, decode_bytes, expect


def decode(
    data: Any, source: TensorSource | None, *, where: str, types: Iterable[type] = ()
) -> Any:
    """The value that `encode` was given; FormatError names the place of what it cannot be.

    Without a source, a `Reference` stands for each tensor (and each long array), so that a
    document can be shown without torch. Enum members and namedtuples get their class back when
    it is among `types`; else they become `EnumValue` records and namedtuples of a new class
    with the same fields. MismatchError when a class in `types` does not have what was saved.

    >>> decode({"$type": "tuple", "items": [0.9, 0.95]}, None, where="state.json")
    (0.9, 0.95)
    """
    return _Decoder(source, where, {qualified_name(cls): cls for cls in types}).value(data, "")


class _Decoder:
    def __init__(
        self, source: TensorSource | None, where: str, classes: Mapping[str, type]
    ) -> None:
        self._source = source
        self._where = where
        self._classes = classes
        self._depth = 0
        self._special = {
            "enum": self._enum,
            "namedtuple": self._named_tuple,
            "numpy.ndarray": self._array,
            "numpy.scalar": self._scalar,
            "numpy.dtype": self._dtype,
        }

    def value(self, data: Any, key: str) -> Any:
        if data is None or isinstance(data, bool | int | str):
            return data
        if isinstance(data, float):
            if not math.isfinite(data):
                raise self._wrong(key, f"{data} without a tag is not strict JSON")
            return data
        with self._inside(key):
            if isinstance(data, list):
                return self._items(data, key)
            if not isinstance(data, dict):
                raise self._wrong(key, f"{type(data).__name__} is not JSON data")
            if TAG_KEY not in data:
                return {name: self.value(item, child(key, name)) for name, item in data.items()}
            return self._tagged(data, key)

    @contextmanager
    def _inside(self, key: str) -> Iterator[None]:
        if self._depth >= MAX_DEPTH:
            raise self._wrong(key, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _tagged(self, data: dict[str, Any], key: str) -> Any:
        fields = dict(data)
        tag = fields.pop(TAG_KEY)
        try:
            if isinstance(tag, str) and tag.startswith(FOREIGN_PREFIX):
                reference = Reference(tag, fields)
                return reference if self._source is None else self._source.get(reference)
            if isinstance(tag, str) and tag in self._special:
                return self._special[tag](fields, key)
            if isinstance(tag, str) and tag in RULES:
                return self._by_rule(RULES[tag], fields, key)
        except CheckpointError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError) as e:
            raise self._wrong(key, f"{tag}: {printable(str(e))}") from e
        raise self._wrong(
            key, f"unknown {TAG_KEY} {shown(tag)}; was it written by a newer version?"
        )

    def _by_rule(self, rule: Rule, fields: dict[str, Any], key: str) -> Any:
        parts: list[Any] = []
        for name, part in zip(rule.fields, _take(fields, *rule.fields), strict=True):
            if name == "items":
                parts.append(self._items(expect(part, list, name), key))
            elif name == "pairs":
                parts.append(self._pairs(expect(part, list, name), key))
            else:
                parts.append(self.value(part, key))
        return rule.rebuild(*parts)

    def _items(self, items: list[Any], key: str) -> list[Any]:
        return [self.value(item, child(key, str(i))) for i, item in enumerate(items)]

    def _pairs(self, pairs: list[Any], key: str) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for i, pair in enumerate(pairs):
            if len(expect(pair, list, "a pair")) != 2:
                raise ValueError(f"pair {i} has {len(pair)} members")
            name = self.value(pair[0], child(key, f"<key {i}>"))
            if name in result:
                raise ValueError(f"the key {shown(name)} stands twice")
            result[name] = self.value(pair[1], child(key, name if type(name) is str else str(i)))
        return result

    def _enum(self, fields: dict[str, Any], key: str) -> Any:
        class_name, *parts = _take(fields, "class", "name", "value")
        name, value = (self.value(part, key) for part in parts)
        if name is not None:
            expect(name, str, "name")
        cls = self._classes.get(expect(class_name, str, "class"))
        if cls is None or not issubclass(cls, Enum):
            return EnumValue(class_name, name, value)
        try:
            member = cls(value) if name is None else cls[name]
        except (KeyError, ValueError, TypeError):
            member = None
        if member is None or member.value != value:
            found = "no such member" if member is None else shown(member.value)
            raise self._mismatch(
                key, f"{class_name}.{name} was saved as {shown(value)}, this program has {found}"
            )
        return member

    def _named_tuple(self, fields: dict[str, Any], key: str) -> Any:
        class_name, names, items = _take(fields, "class", "fields", "items")
        names = tuple(expect(n, str, "a field's name") for n in expect(names, list, "fields"))
        if len(expect(items, list, "items")) != len(names):
            raise ValueError(f"{len(names)} fields, {len(items)} items")
        values = [self.value(v, child(key, n)) for n, v in zip(names, items, strict=True)]
        cls: Any = self._classes.get(expect(class_name, str, "class"))
        if cls is None or not is_named_tuple(cls):
            return named_tuple_class(class_name, names)._make(values)
        if cls._fields != names:
            raise self._mismatch(
                key,
                f"{class_name} was saved with the fields {names}, this program's has {cls._fields}",
            )
        return cls._make(values)

    def _array(self, fields: dict[str, Any], key: str) -> Any:
        dtype, shape, data, tensor = _take(fields, "dtype", "shape", "data", "tensor")
        if (data is None) == (tensor is None):
            raise ValueError("an array has either data or a tensor")
        if tensor is None:
            return tree_numpy.array_from_bytes(decode_bytes(data), dtype, shape)
        if self._source is None:
            return Reference("numpy.ndarray", fields)
        raw = self._source.get_array(expect(tensor, str, "tensor"))
        return tree_numpy.array_from_bytes(raw, dtype, shape)

    def _scalar(self, fields: dict[str, Any], key: str) -> Any:
        dtype, value = _take(fields, "dtype", "value")
        return tree_numpy.scalar_from_fields(dtype, self.value(value, key))

    def _dtype(self, fields: dict[str, Any], key: str) -> Any:
        return tree_numpy.dtype_from_text(*_take(fields, "dtype"))

    def _wrong(self, key: str, problem: str) -> FormatError:
        return FormatError(f"{self._where}: {printable(key) or 'the whole document'}: {problem}")

    def _mismatch(self, key: str, problem: str) -> MismatchError:
        return MismatchError(
            f"{self._where}: {printable(key) or 'the whole document'}: {problem}; "
            "leave the class out of `types` to get a plain record"
        )


def _take(fields: dict[str, Any], *names: str) -> list[Any]:
    """The fields by name, None for one that is left out; ValueError for any other field."""
    unknown = fields.keys() - set(names)
    if unknown:
        raise ValueError(f"unknown field {shown(min(unknown))}")
    return [fields.get(name) for name in names]
