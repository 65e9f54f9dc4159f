"""The op codes of pickle, one function each; the table at the end is the whole instruction set.

Left out on purpose, so refused: extension codes (0x82 to 0x84), out-of-band buffers (0x97, 0x98)
and persistent ids as text (`P`), none of which torch writes.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable

from milepost.format import pickle_globals
from milepost.format.pickle_machine import Machine, kind_of
from milepost.format.pickle_tree import check_key

MAX_LONG_NBYTES = 1024
HIGHEST_PROTOCOL = 5


def _proto(m: Machine) -> None:
    m.protocol = m.take(1)[0]
    if m.protocol > HIGHEST_PROTOCOL:
        raise ValueError(f"protocol {m.protocol} is newer than {HIGHEST_PROTOCOL}")


def _frame(m: Machine) -> None:
    (nbytes,) = struct.unpack("<Q", m.take(8))
    if nbytes > len(m.raw) - m.position:
        raise ValueError(f"a frame claims {nbytes} bytes, {len(m.raw) - m.position} are left")


def _mark(m: Machine) -> None:
    m.marks.append(len(m.stack))


def _pop(m: Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.pop()


def _int_text(m: Machine) -> None:
    text = m.line()
    flags = {b"00": False, b"01": True}
    m.push(flags[text] if text in flags else int(text))


def _long_text(m: Machine) -> None:
    m.push(int(m.line().removesuffix(b"L")))


def _long(layout: str) -> Callable[[Machine], None]:
    def operation(m: Machine) -> None:
        data = m.counted(layout)
        if len(data) > MAX_LONG_NBYTES:
            raise ValueError(f"an integer of {len(data)} bytes; the limit is {MAX_LONG_NBYTES}")
        m.push(int.from_bytes(data, "little", signed=True))

    return operation


def _number(layout: str) -> Callable[[Machine], None]:
    nbytes = struct.calcsize(layout)
    return lambda m: m.push(struct.unpack(layout, m.take(nbytes))[0])


def _string_text(m: Machine) -> None:
    text = m.line().strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError("a string is not quoted")
    m.push(_native(codecs.escape_decode(text[1:-1])[0]))


def _native(data: bytes) -> str | bytes:
    """A string of Python 2: text where it can be, as torch reads it."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _string(layout: str) -> Callable[[Machine], None]:
    return lambda m: m.push(_native(m.counted(layout)))


def _unicode(layout: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.counted(layout).decode("utf-8", "surrogatepass"))


def _bytes(layout: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.counted(layout))


def _constant(value: object) -> Callable[[Machine], None]:
    return lambda m: m.push(value)


def _tuple(count: int) -> Callable[[Machine], None]:
    def operation(m: Machine) -> None:
        m.need(count)
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return operation


def _set_items(m: Machine, target: object, items: list[object]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        m.set_item(target, key, value)


def _dict_of_marked(m: Machine) -> None:
    items = m.pop_mark()
    target: dict[object, object] = {}
    _set_items(m, target, items)
    m.push(target)


def _setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_item(m.top(), key, value)


def _setitems(m: Machine) -> None:
    items = m.pop_mark()
    _set_items(m, m.top(), items)


def _append(m: Machine) -> None:
    item = m.pop()
    m.extend(m.top(), [item])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    m.extend(m.top(), items)


def _additems(m: Machine) -> None:
    items = m.pop_mark()
    target = m.top()
    if type(target) is not set:
        raise ValueError(f"members are added to {kind_of(target)}")
    for item in items:
        check_key(item, m.budget)
    target.update(items)


def _frozenset(m: Machine) -> None:
    items = m.pop_mark()
    for item in items:
        check_key(item, m.budget)
    m.push(frozenset(items))


def _global_text(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.push(m.find(module, name))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a global is named by something that is no text")
    m.push(m.find(module, name))


def _reduce(m: Machine) -> None:
    args, function = m.pop(), m.pop()
    m.push(m.call(function, args))


def _newobj(m: Machine) -> None:
    args, cls = m.pop(), m.pop()
    m.push(m.new(cls, args, {}))


def _newobj_ex(m: Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    m.push(m.new(cls, args, kwargs))


def _inst(m: Machine) -> None:
    cls = m.find(m.line().decode("utf-8"), m.line().decode("utf-8"))
    m.push(m.new(cls, tuple(m.pop_mark()), {}))


def _obj(m: Machine) -> None:
    items = m.pop_mark()
    if not items:
        raise ValueError("an instance has no class")
    m.push(m.new(items[0], tuple(items[1:]), {}))


def _build(m: Machine) -> None:
    state = m.pop()
    pickle_globals.build(m.top(), state)


def _persistent(m: Machine) -> None:
    identity = m.pop()
    if m.persistent_load is None:
        raise ValueError("it refers to data outside the pickle")
    m.push(m.persistent_load(identity))


def _put(m: Machine, index: int) -> None:
    m.memo[index] = m.top()


def _get(m: Machine, index: int) -> None:
    if index not in m.memo:
        raise ValueError(f"memo entry {index} is not there")
    m.push(m.memo[index])


OPERATIONS: dict[int, Callable[[Machine], None]] = {
    ord(code): operation
    for code, operation in {
        b"\x80": _proto,
        b"\x95": _frame,
        b"(": _mark,
        b"0": _pop,
        b"1": lambda m: m.pop_mark().clear(),
        b"2": lambda m: m.push(m.top()),
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"I": _int_text,
        b"L": _long_text,
        b"F": lambda m: m.push(float(m.line())),
        b"J": _number("<i"),
        b"K": _number("<B"),
        b"M": _number("<H"),
        b"G": _number(">d"),
        b"\x8a": _long("<B"),
        b"\x8b": _long("<i"),
        b"S": _string_text,
        b"T": _string("<i"),
        b"U": _string("<B"),
        b"B": _bytes("<I"),
        b"C": _bytes("<B"),
        b"\x8e": _bytes("<Q"),
        b"\x96": lambda m: m.push(bytearray(m.counted("<Q"))),
        b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
        b"X": _unicode("<I"),
        b"\x8c": _unicode("<B"),
        b"\x8d": _unicode("<Q"),
        b")": lambda m: m.push(()),
        b"]": lambda m: m.push([]),
        b"}": lambda m: m.push({}),
        b"\x8f": lambda m: m.push(set()),
        b"l": lambda m: m.push(m.pop_mark()),
        b"t": lambda m: m.push(tuple(m.pop_mark())),
        b"d": _dict_of_marked,
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"a": _append,
        b"e": _appends,
        b"s": _setitem,
        b"u": _setitems,
        b"\x90": _additems,
        b"\x91": _frozenset,
        b"c": _global_text,
        b"\x93": _stack_global,
        b"R": _reduce,
        b"\x81": _newobj,
        b"\x92": _newobj_ex,
        b"i": _inst,
        b"o": _obj,
        b"b": _build,
        b"Q": _persistent,
        b"p": lambda m: _put(m, int(m.line())),
        b"q": lambda m: _put(m, m.take(1)[0]),
        b"r": lambda m: _put(m, struct.unpack("<I", m.take(4))[0]),
        b"\x94": lambda m: _put(m, len(m.memo)),
        b"g": lambda m: _get(m, int(m.line())),
        b"h": lambda m: _get(m, m.take(1)[0]),
        b"j": lambda m: _get(m, struct.unpack("<I", m.take(4))[0]),
    }.items()
}
