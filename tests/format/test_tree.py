"""The typed tree without torch: what goes in comes out, as strict JSON, or is refused by name."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import json
import math
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from milepost.errors import MismatchError
from milepost.format import strictjson
from milepost.format.tree import (
    TAG_KEY,
    EnumValue,
    decode,
    encode,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Betas(NamedTuple):
    first: float
    second: Any


def through_json(value: Any, **keywords: Any) -> Any:
    raw = strictjson.dumps(encode(value))
    return decode(strictjson.loads(raw, "state.json"), None, where="state.json", **keywords)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down; nan equals nan, -0.0 does not equal 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return bool(
            (math.isnan(a) and math.isnan(b))
            or (a == b and math.copysign(1, a) == math.copysign(1, b))
        )
    if isinstance(a, complex | np.complexfloating):
        return same(float(a.real), float(b.real)) and same(float(a.imag), float(b.imag))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, SimpleNamespace):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        extras = [getattr(x, "default_factory", getattr(x, "_metadata", None)) for x in (a, b)]
        return extras[0] == extras[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | collections.deque):
        bounds = [getattr(x, "maxlen", None) for x in (a, b)]
        return bounds[0] == bounds[1] and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, datetime.datetime):
        return bool((a, a.fold, a.tzname()) == (b, b.fold, b.tzname()))
    if isinstance(a, decimal.Decimal):
        return bool(a.as_tuple() == b.as_tuple())
    return bool(a == b)


TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
TIMEZONES = st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
)
HASHABLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals()
    | st.uuids()
    | st.dates()
    | st.datetimes(timezones=st.none() | TIMEZONES)
    | st.timedeltas()
    | st.builds(pathlib.Path, st.text("ab/", max_size=5))
    | st.builds(pathlib.PurePosixPath, st.text("ab/", max_size=5))
    | st.builds(pathlib.PureWindowsPath, st.text("ab.", max_size=5))
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
    | st.builds(EnumValue, st.just("a.B"), st.none() | TEXT, st.integers())
)
KEYS = HASHABLE.filter(lambda key: not (isinstance(key, decimal.Decimal) and key.is_snan()))
DTYPES = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes(endianness="?")
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
LEAVES = (
    HASHABLE
    | st.binary(max_size=8).map(bytearray)
    | st.complex_numbers()
    | ARRAYS
    | hnp.arrays(DTYPES, ()).map(lambda array: array[()])
    | DTYPES
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(KEYS, inner, max_size=3)
    names = TEXT | st.just(TAG_KEY)
    return (
        items
        | items.map(tuple)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.dictionaries(names, inner, max_size=3)
        | pairs
        | pairs.map(collections.OrderedDict)
        | pairs.map(lambda p: collections.Counter(p))
        | st.builds(collections.defaultdict, st.sampled_from([None, int, list, dict]), pairs)
        | st.builds(collections.deque, items, st.none() | st.integers(3, 5))
        | st.builds(slice, inner, inner, inner)
        | st.dictionaries(names, inner, max_size=3).map(lambda p: SimpleNamespace(**p))
    )


@given(st.recursive(LEAVES, containers, max_leaves=12))
@settings(deadline=None)
def test_what_goes_in_comes_out_with_its_types(value: Any) -> None:
    assert same(through_json(value), value)


@given(st.recursive(LEAVES, containers, max_leaves=6))
@settings(deadline=None, max_examples=50)
def test_encoding_what_was_decoded_gives_the_same_document(value: Any) -> None:
    assert encode(through_json(value)) == encode(value)


@given(
    st.recursive(
        st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
    )
)
def test_what_json_knows_stands_in_it_as_it_is(value: Any) -> None:
    assert same(encode(value), value)


def test_the_document_reads_as_it_is_specified() -> None:
    value = {
        "step": 7,
        "best": math.inf,
        "betas": (0.9, 0.95),
        "steps_seen": 2**53 + 1,
        "groups": {0: "all"},
        "kinds": {"b", "a"},
        TAG_KEY: "mine",
        "path": pathlib.PurePosixPath("a/b"),
        "colour": Colour.RED,
        "loss": np.float64(0.25),
        "key": np.array([1, 2], dtype="<u2"),
    }
    assert encode({"outer": value}) == {
        "outer": {
            "$type": "dict",
            "pairs": [
                ["step", 7],
                ["best", {"$type": "float", "value": "inf"}],
                ["betas", {"$type": "tuple", "items": [0.9, 0.95]}],
                ["steps_seen", {"$type": "int", "value": "9007199254740993"}],
                ["groups", {"$type": "dict", "pairs": [[0, "all"]]}],
                ["kinds", {"$type": "set", "items": ["a", "b"]}],
                ["$type", "mine"],
                ["path", {"$type": "PurePosixPath", "value": "a/b"}],
                ["colour", {"$type": "enum", "class": f"{__name__}.Colour", "name": "RED",
                            "value": "red"}],
                ["loss", {"$type": "numpy.scalar", "dtype": "<f8", "value": 0.25}],
                ["key", {"$type": "numpy.ndarray", "dtype": "<u2", "shape": [2],
                         "data": "AQACAA=="}],
            ],
        }
    }  # fmt: skip


@pytest.mark.case("V09")
def test_random_states_of_python_and_numpy_come_back_exactly() -> None:
    random.gauss(0, 1)
    generators = [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64]
    states = {
        "python": random.getstate(),
        "legacy": np.random.RandomState(3).get_state(),
        "dicts": [np.random.Generator(cls(5)).bit_generator.state for cls in generators],
    }
    back = through_json(states)
    assert same(back, states)
    random.Random().setstate(back["python"])
    for cls, state in zip(generators, back["dicts"], strict=True):
        ours = cls()
        ours.state = state
        assert np.random.Generator(ours).random() == np.random.Generator(cls(5)).random()


def test_an_integer_too_long_for_decimal_text_comes_back() -> None:
    assert through_json([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]


def test_a_scalar_of_text_keeps_the_zeros_at_its_end() -> None:
    assert through_json([np.str_("a\0"), np.bytes_(b"a\0")]) == ["a\0", b"a\0"]


def test_a_decoded_array_is_writable_and_its_own() -> None:
    source = np.arange(3)
    array = through_json(source)
    array[0] = 9
    assert source[0] == 0


def test_the_metadata_of_a_module_state_dict_is_kept() -> None:
    state = collections.OrderedDict(weight=1)
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    assert through_json(state)._metadata == state._metadata  # type: ignore[attr-defined]


def test_an_argparse_namespace_becomes_a_simple_namespace() -> None:
    assert through_json(argparse.Namespace(a=1, b=(2,))) == SimpleNamespace(a=1, b=(2,))


def test_equal_sets_give_equal_documents() -> None:
    words = [f"word{i}" for i in range(50)]
    assert encode({*words}) == encode({*reversed(words)})


def test_an_enum_member_is_a_record_unless_its_class_is_passed() -> None:
    members = [Colour.BLUE, Level.LOW, Access.READ | Access.WRITE]
    name = f"{__name__}.Colour"
    assert through_json(members)[0] == EnumValue(name, "BLUE", "blue")
    assert encode(through_json(members)) == encode(members)
    assert same(through_json(members, types=[Colour, Level, Access]), members)


def test_a_namedtuple_keeps_its_fields_and_gets_its_class_back_when_passed() -> None:
    value = Betas(0.9, [1])
    plain = through_json(value)
    assert plain == value and plain.second == [1] and type(plain) is not Betas
    assert encode(plain) == encode(value)
    assert type(through_json(value, types=[Betas])) is Betas


def test_a_class_that_changed_since_the_save_is_a_mismatch() -> None:
    saved = {TAG_KEY: "enum", "class": f"{__name__}.Colour", "name": "RED", "value": "crimson"}
    with pytest.raises(MismatchError, match=r"Colour.RED was saved as 'crimson', .* has 'red'"):
        decode(saved, None, where="state.json", types=[Colour])
    fields = {TAG_KEY: "namedtuple", "class": f"{__name__}.Betas", "fields": ["x"], "items": [1]}
    with pytest.raises(MismatchError, match=r"fields \('x',\)"):
        decode(fields, None, where="state.json", types=[Betas])


def test_the_module_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from milepost.format.tree import decode, encode; "
        "decode(encode({1: (2.5, 3)}), None, where='x'); "
        "print([m for m in ('torch', 'numpy', 'decimal', 'uuid') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_strict_readers_of_json_accept_the_text() -> None:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    value = {"a": math.nan, "b": [-math.inf, -0.0, 1e-320], "c": complex(math.nan, -0.0)}
    text = json.dumps(encode(value), allow_nan=False)
    assert same(decode(json.loads(text, parse_constant=refuse), None, where="x"), value)
