"""How each Python type of the typed tree falls apart into fields and is built again from them.

The tag of a rule is the name of its class. Fields hold values that the tree encodes in turn.
Two field names are special: `items` is a list, `pairs` a list of (key, value); the places
inside them continue the key path. No module is imported in order to recognise a value: a
module that nobody imported has no instances.
"""

from __future__ import annotations

import binascii
import collections
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

FACTORIES: Mapping[str, Callable[[], object]] = {
    f.__name__: f for f in (bool, dict, float, int, list, set, str, tuple)
}
_DECIMAL_NBITS = 10_000  # above it text is hexadecimal: decimal conversion is quadratic, and capped
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,3999}|0x[0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`reduce` gives the values of `fields`; `rebuild` takes them in that order.

    `reduce` raises TypeError with what to do instead, `rebuild` any ValueError, TypeError,
    LookupError or ArithmeticError for fields that cannot be right.
    """

    tag: str
    home: str  # module that defines the class
    fields: tuple[str, ...]
    reduce: Callable[[Any], tuple[Any, ...]]
    rebuild: Callable[..., Any]

    @property
    def is_set(self) -> bool:
        return self.tag in ("set", "frozenset")

    def cls(self) -> type | None:
        """The class, or None while nothing imported its module."""
        found = getattr(sys.modules.get(self.home), self.tag, None)
        return found if isinstance(found, type) else None


def expect(value: Any, kind: type, field: str) -> Any:
    """`value`, or TypeError when it is not exactly of type `kind`."""
    if type(value) is not kind:
        raise TypeError(f"{field} must be {kind.__name__}, found {type(value).__name__}")
    return value


def encode_bytes(data: bytes | bytearray | memoryview) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def decode_bytes(text: Any) -> bytes:
    return binascii.a2b_base64(expect(text, str, "data"), strict_mode=True)


def _integer(value: str) -> int:
    if not _INTEGER.fullmatch(expect(value, str, "value")):
        raise ValueError("not an integer")
    return int(value, 0)


def _integer_text(value: int) -> str:
    return str(value) if value.bit_length() <= _DECIMAL_NBITS else hex(value)


def _str(data: str) -> str:
    return decode_bytes(data).decode("utf-8", "surrogatepass")


def _special_float(value: str) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError("a float with a tag is nan, inf or -inf")
    return float(value)


def _defaultdict(factory: str | None, pairs: dict[Any, Any]) -> collections.defaultdict[Any, Any]:
    if factory is None:
        return collections.defaultdict(None, pairs)
    if expect(factory, str, "factory") not in FACTORIES:
        raise ValueError(f"the factory is one of {', '.join(FACTORIES)}, found {factory!r:.50}")
    return collections.defaultdict(FACTORIES[factory], pairs)


def _reduce_defaultdict(value: collections.defaultdict[Any, Any]) -> tuple[Any, ...]:
    factory = value.default_factory
    if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise TypeError(f"its factory is none of {', '.join(FACTORIES)}; save dict(value)")
    return (None if factory is None else getattr(factory, "__name__", None), value)


def _reduce_ordered(value: collections.OrderedDict[Any, Any]) -> tuple[Any, ...]:
    # Module.state_dict() hangs its versions on the dict as `_metadata`.
    attributes = dict(vars(value))
    metadata = attributes.pop("_metadata", None)
    if attributes:
        raise TypeError(f"it has attributes ({', '.join(attributes)}); save dict(value)")
    return (value, metadata)


def _ordered(pairs: dict[Any, Any], metadata: Any) -> collections.OrderedDict[Any, Any]:
    value = collections.OrderedDict(pairs)
    if metadata is not None:
        vars(value)["_metadata"] = metadata
    return value


def _reduce_deque(value: collections.deque[Any]) -> tuple[Any, ...]:
    return (list(value), value.maxlen)


def _deque(items: list[Any], maxlen: int | None) -> collections.deque[Any]:
    value = collections.deque(items, maxlen)
    if len(value) != len(items):
        raise ValueError(f"{len(items)} items, but maxlen is {maxlen}")
    return value


def _set(items: list[Any]) -> set[Any]:
    value = set(items)
    if len(value) != len(items):
        raise ValueError("an item stands twice in a set")
    return value


def _namespace(attributes: dict[str, Any]) -> SimpleNamespace:
    value = SimpleNamespace()
    vars(value).update(expect(attributes, dict, "attributes"))
    return value


def _complex(real: float, imag: float) -> complex:
    return complex(expect(real, float, "real"), expect(imag, float, "imag"))


def _range(start: int, stop: int, step: int) -> range:
    return range(*(expect(bound, int, "a bound of a range") for bound in (start, stop, step)))


def _from_text(home: str, name: str, maker: str = "") -> Callable[[str], Any]:
    """Rebuilds `home.name` from its text, by its constructor or its class method `maker`."""

    def rebuild(value: str) -> Any:
        cls = getattr(importlib.import_module(home), name)
        return (getattr(cls, maker) if maker else cls)(expect(value, str, "value"))

    return rebuild


def _reduce_datetime(value: Any) -> tuple[Any, ...]:
    from datetime import timezone

    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        zone = type(value.tzinfo).__name__
        raise TypeError(f"its zone is a {zone}; save value.astimezone(datetime.timezone.utc)")
    naive = value.replace(tzinfo=None, fold=0)
    return (naive.isoformat(), value.fold, value.tzinfo)


def _datetime(value: str, fold: int, zone: Any) -> Any:
    from datetime import datetime

    naive = datetime.fromisoformat(expect(value, str, "value"))
    return naive.replace(tzinfo=zone, fold=expect(fold, int, "fold"))


def _timedelta(days: int, seconds: int, microseconds: int) -> Any:
    from datetime import timedelta

    parts = (expect(part, int, "a part of a timedelta") for part in (days, seconds, microseconds))
    return timedelta(*parts)


def _reduce_timezone(value: Any) -> tuple[Any, ...]:
    # What copy and pickle use: (offset,) or (offset, name).
    offset, name = (*value.__getinitargs__(), None)[:2]
    return (offset, name)


def _timezone(offset: Any, name: str | None) -> Any:
    from datetime import timezone

    return timezone(offset) if name is None else timezone(offset, name)


def _fraction(numerator: int, denominator: int) -> Any:
    from fractions import Fraction

    return Fraction(expect(numerator, int, "numerator"), expect(denominator, int, "denominator"))


def _attributes(names: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(getattr(value, name) for name in names.split())


def _items(value: Any) -> tuple[Any, ...]:
    return (list(value),)


def _whole(value: Any) -> tuple[Any, ...]:
    return (value,)


def _text(value: Any) -> tuple[Any, ...]:
    return (str(value),)


def _path_text(value: Any) -> tuple[Any, ...]:
    if type(value)(str(value)) != value:
        raise TypeError("its text names another path; save str(value)")
    return (str(value),)


def _isoformat(value: Any) -> tuple[Any, ...]:
    return (value.isoformat(),)


def _base64(value: Any) -> tuple[Any, ...]:
    return (encode_bytes(value),)


def _vars(value: Any) -> tuple[Any, ...]:
    return (vars(value),)


_ROWS: tuple[tuple[str, str, str, Callable[[Any], tuple[Any, ...]], Callable[..., Any]], ...] = (
    ("int", "builtins", "value", lambda v: (_integer_text(v),), _integer),
    ("float", "builtins", "value", _text, _special_float),
    ("str", "builtins", "data", lambda v: _base64(v.encode("utf-8", "surrogatepass")), _str),
    ("dict", "builtins", "pairs", _whole, dict),
    ("tuple", "builtins", "items", _items, tuple),
    ("set", "builtins", "items", _items, _set),
    ("frozenset", "builtins", "items", _items, lambda items: frozenset(_set(items))),
    ("bytes", "builtins", "data", _base64, decode_bytes),
    ("bytearray", "builtins", "data", _base64, lambda data: bytearray(decode_bytes(data))),
    ("complex", "builtins", "real imag", _attributes("real imag"), _complex),
    ("range", "builtins", "start stop step", _attributes("start stop step"), _range),
    ("slice", "builtins", "start stop step", _attributes("start stop step"), slice),
    ("OrderedDict", "collections", "pairs metadata", _reduce_ordered, _ordered),
    ("defaultdict", "collections", "factory pairs", _reduce_defaultdict, _defaultdict),
    ("Counter", "collections", "pairs", _whole, collections.Counter),
    ("deque", "collections", "items maxlen", _reduce_deque, _deque),
    ("SimpleNamespace", "types", "attributes", _vars, _namespace),
    ("Namespace", "argparse", "attributes", _vars, _namespace),
    ("date", "datetime", "value", _isoformat, _from_text("datetime", "date", "fromisoformat")),
    ("datetime", "datetime", "value fold zone", _reduce_datetime, _datetime),
    ("timezone", "datetime", "offset name", _reduce_timezone, _timezone),
    (
        "timedelta",
        "datetime",
        "days seconds microseconds",
        _attributes("days seconds microseconds"),
        _timedelta,
    ),
    ("Decimal", "decimal", "value", _text, _from_text("decimal", "Decimal")),
    (
        "Fraction",
        "fractions",
        "numerator denominator",
        _attributes("numerator denominator"),
        _fraction,
    ),
    ("UUID", "uuid", "value", _text, _from_text("uuid", "UUID")),
    ("PosixPath", "pathlib", "value", _path_text, _from_text("pathlib", "Path")),
    ("PurePosixPath", "pathlib", "value", _path_text, _from_text("pathlib", "PurePosixPath")),
    ("WindowsPath", "pathlib", "value", _path_text, _from_text("pathlib", "PureWindowsPath")),
    ("PureWindowsPath", "pathlib", "value", _path_text, _from_text("pathlib", "PureWindowsPath")),
)

RULES: Mapping[str, Rule] = {
    tag: Rule(tag=tag, home=home, fields=tuple(fields.split()), reduce=reduce, rebuild=rebuild)
    for tag, home, fields, reduce, rebuild in _ROWS
}

_known: dict[type, Rule] = {}


def rule_of(cls: type) -> Rule | None:
    """The rule whose class is exactly `cls`."""
    if (rule := _known.get(cls)) is None:
        rule = next((rule for rule in RULES.values() if rule.cls() is cls), None)
        if rule is not None:
            _known[cls] = rule
    return rule
