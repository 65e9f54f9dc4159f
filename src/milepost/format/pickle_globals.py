"""The names that a pickle may use, each with a harmless constructor of ours (standard library).

Nothing here is looked up by a name from a file: the table maps text to functions of this module.
Constructors check the types of their arguments, because the arguments come from the file.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import TypeVar

from milepost.format import pickle_numpy
from milepost.format.lazy import Opaque

T = TypeVar("T")
MAX_DECIMAL_DIGITS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Global:
    """One allowed name. `call` serves REDUCE, `new` NEWOBJ; without either it is only a mark.

    `hashes` says that the constructor hashes the members of its first argument.
    """

    name: str
    call: Callable[..., object] | None = None
    new: Callable[..., object] | None = None
    hashes: bool = False


def opaque_global(name: str) -> Global:
    """A class that becomes an inert record."""

    def build_record(*args: object, **kwargs: object) -> Opaque:
        return Opaque(class_name=name, args=args, kwargs=dict(kwargs))

    return Global(name=name, call=build_record, new=build_record)


def build(target: object, state: object) -> None:
    """BUILD: give the state to an instance that one of our constructors made."""
    match target:
        case Opaque():
            target.state = state
        case SimpleNamespace():
            vars(target).update(_names(state))
        case OrderedDict() if type(target) is OrderedDict:
            attributes = _names(state)
            for name in attributes:
                if hasattr(OrderedDict, name):
                    raise ValueError(f"an OrderedDict would lose its attribute {name}")
            vars(target).update(attributes)
        case uuid.UUID():
            _build_uuid(target, _names(state))
        case _:
            pickle_numpy.build(target, state)


def _names(state: object) -> dict[str, object]:
    if isinstance(state, tuple) and len(state) == 2 and state[1] is None:
        state = state[0]
    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        raise ValueError("a state is no mapping of names")
    return state


def _build_uuid(target: uuid.UUID, state: dict[str, object]) -> None:
    number = state.get("int")
    if type(number) is not int or not 0 <= number < 2**128:
        raise ValueError("a UUID is no 128 bit number")
    object.__setattr__(target, "int", number)


def _want(value: object, kind: type[T], what: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{what}: {kind.__name__} expected, found {type(value).__name__}")
    return value


def _members(kind: Callable[[list[object]], object]) -> Callable[..., object]:
    def construct(items: object = ()) -> object:
        if not isinstance(items, list | tuple):
            raise ValueError(f"the members of a set are given as {type(items).__name__}")
        return kind(list(items))

    return construct


def _ordered_dict(pairs: object = ()) -> object:
    result: OrderedDict[object, object] = OrderedDict()
    if not isinstance(pairs, list | tuple):
        raise ValueError("the items of an OrderedDict are no list")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("an item of an OrderedDict is no pair")
        if not isinstance(pair[0], str | int | bytes):
            raise ValueError(f"a key of an OrderedDict is a {type(pair[0]).__name__}")
        result[pair[0]] = pair[1]
    return result


def _counter(counts: object = None) -> object:
    return Counter() if counts is None else Counter(_want(counts, dict, "a Counter"))


FACTORIES: dict[str, Callable[[], object]] = {
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.set": set,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.str": str,
    "builtins.bool": bool,
    "builtins.tuple": tuple,
    "collections.OrderedDict": OrderedDict,
}


def _default_dict(factory: object = None) -> object:
    if factory is None:
        return defaultdict(None)
    if not isinstance(factory, Global) or factory.name not in FACTORIES:
        raise ValueError("the factory of a defaultdict is no builtin type")
    return defaultdict(FACTORIES[factory.name])


def _deque(items: object = (), max_length: object = None) -> object:
    if not isinstance(items, list | tuple):
        raise ValueError("the items of a deque are no list")
    if max_length is None:
        return deque(items)
    return deque(items, _want(max_length, int, "the length of a deque"))


def _encode(text: object, encoding: object = "latin1") -> object:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are given in an encoding other than latin1")
    return _want(text, str, "bytes as text").encode("latin-1")


def _bytes(data: object = b"") -> object:
    return _want(data, bytes, "bytes")


def _bytearray(data: object = b"", encoding: object = None) -> object:
    return bytearray(_want(data, bytes, "a bytearray") if encoding is None else _latin(data))


def _latin(text: object) -> bytes:
    return _want(text, str, "a bytearray as text").encode("latin-1")


def _complex(real: object, imag: object = 0.0) -> object:
    return complex(_real(real), _real(imag))


def _real(value: object) -> float | int:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"a part of a complex number is a {type(value).__name__}")
    return value


def _bounds(kind: Callable[..., object]) -> Callable[..., object]:
    def construct(*args: object) -> object:
        if not all(value is None or type(value) is int for value in args):
            raise ValueError("the bounds of a slice or range are no integers")
        return kind(*args)

    return construct


def _path(kind: Callable[..., object]) -> Callable[..., object]:
    return lambda *parts: kind(*(_want(part, str, "a part of a path") for part in parts))


def _decimal(text: object) -> object:
    digits = _want(text, str, "a Decimal")
    if len(digits) > MAX_DECIMAL_DIGITS:
        raise ValueError(f"a Decimal of {len(digits)} digits; the limit is {MAX_DECIMAL_DIGITS}")
    return decimal.Decimal(digits)


def _time(kind: Callable[..., object]) -> Callable[..., object]:
    def construct(*args: object) -> object:
        for value in args:
            if type(value) not in (bytes, int, datetime.timedelta, datetime.timezone, str):
                raise ValueError(f"a part of a date or time is a {type(value).__name__}")
        return kind(*args)

    return construct


def _namespace() -> object:
    return SimpleNamespace()


def _uuid() -> object:
    return uuid.UUID(int=0)


def _new(cls: object, *args: object) -> object:
    """`copyreg.__newobj__`: NEWOBJ as a call."""
    if not isinstance(cls, Global) or cls.new is None:
        raise ValueError("an instance of something that is no allowed class")
    return cls.new(*args)


def _reconstruct(cls: object, base: object, state: object) -> object:
    """`copyreg._reconstructor`: how protocols 0 and 1 make an instance."""
    if not isinstance(base, Global):
        raise ValueError("an instance of a class without a base")
    return _new(cls) if state is None else _new(cls, state)


def _table() -> dict[str, Global]:
    posix, windows = _path(PurePosixPath), _path(PureWindowsPath)
    calls: dict[str, Callable[..., object]] = {
        "builtins.set": _members(set),
        "builtins.frozenset": _members(frozenset),
        "builtins.bytes": _bytes,
        "builtins.bytearray": _bytearray,
        "builtins.complex": _complex,
        "builtins.slice": _bounds(slice),
        "builtins.range": _bounds(range),
        "collections.OrderedDict": _ordered_dict,
        "collections.defaultdict": _default_dict,
        "collections.Counter": _counter,
        "collections.deque": _deque,
        "_codecs.encode": _encode,
        "copyreg.__newobj__": _new,
        "copyreg._reconstructor": _reconstruct,
        "datetime.datetime": _time(datetime.datetime),
        "datetime.date": _time(datetime.date),
        "datetime.time": _time(datetime.time),
        "datetime.timedelta": _time(datetime.timedelta),
        "datetime.timezone": _time(datetime.timezone),
        "decimal.Decimal": _decimal,
        "uuid.UUID": _uuid,
        "argparse.Namespace": _namespace,
        "types.SimpleNamespace": _namespace,
        **pickle_numpy.CALLS,
    }
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath"):
            calls[f"{module}.{name}"] = posix
        for name in ("WindowsPath", "PureWindowsPath"):
            calls[f"{module}.{name}"] = windows
    hashing = {"builtins.set", "builtins.frozenset"}
    marks = {"builtins.object", "numpy.ndarray", *FACTORIES} - set(calls)
    return {
        **{name: Global(name=name) for name in marks},
        **{n: Global(name=n, call=f, new=f, hashes=n in hashing) for n, f in calls.items()},
    }


GLOBALS: dict[str, Global] = _table()

_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PYTHON_2_NAMES = {("__builtin__", "xrange"): ("builtins", "range")}


def modern_name(module: str, name: str) -> tuple[str, str]:
    """The name of today for one that a protocol below 3 wrote under its Python 2 name."""
    if (module, name) in _PYTHON_2_NAMES:
        return _PYTHON_2_NAMES[module, name]
    return _PYTHON_2_MODULES.get(module, module), name
