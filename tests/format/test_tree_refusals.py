"""What the typed tree refuses: at save with the key and advice, at load with the place."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import FormatError, UnencodableError
from milepost.format import strictjson
from milepost.format.tree import MAX_DEPTH, TAG_KEY, Reference, decode, encode
from milepost.format.tree_rules import RULES


@dataclasses.dataclass
class Settings:
    width: int = 3


class NotPlain:
    pass


def through_json(value: Any) -> Any:
    raw = strictjson.dumps(encode(value))
    return decode(strictjson.loads(raw, "state.json"), None, where="state.json")


@pytest.mark.case("V09")
@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Settings(), "save dataclasses.asdict(value)"),
        (NotPlain(), "save its attributes as a dict"),
        (collections.UserDict(a=1), "save dict(value)"),
        (type("Sub", (dict,), {})(a=1), "save dict(value)"),
        (type("Sub", (str,), {})("a"), "save str(value)"),
        (
            type("ListConfig", (list,), {"__module__": "omegaconf.listconfig"})(),
            "save omegaconf.OmegaConf.to_container(value)",
        ),
        (len, "it is code; save its name or its arguments"),
        (NotPlain, "it is code; save its name or its arguments"),
        (iter([1]), "an iterator has no state to save; save list(value)"),
        (random.Random(1), "save value.getstate()"),
        (np.random.default_rng(1), "save value.bit_generator.state"),
        (np.random.RandomState(1), "save value.get_state()"),
        (np.array([object()]), "numpy dtype object has no fixed plain size"),
        (np.zeros(2, dtype="i4,f4"), "has no fixed plain size"),
        (np.ma.array([1]), "save numpy.asarray(value)"),
        (collections.defaultdict(NotPlain), "save dict(value)"),
        (memoryview(b"a"), "save bytes(value)"),
        (
            datetime.datetime(2026, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {})()),
            "save value.astimezone(datetime.timezone.utc)",
        ),
    ],
)
def test_a_foreign_object_is_refused_with_its_key_and_what_to_save(value: Any, advice: str) -> None:
    with pytest.raises(UnencodableError) as caught:
        encode({"callbacks": [{"state": value}]}, key="extra")
    assert caught.value.key == "extra.callbacks.0.state"
    assert str(caught.value).startswith("extra.callbacks.0.state: ")
    assert advice in str(caught.value)


def test_all_places_that_cannot_be_stored_are_reported_at_once() -> None:
    with pytest.raises(UnencodableError) as caught:
        encode({"a": [len, 1, {2: NotPlain()}], "b": {"c": {(1, 2): len}}, "d": [len] * 9})
    message = str(caught.value)
    assert message.startswith("12 values cannot be stored: a.0: builtins.builtin_function_or_")
    assert "a.2.2: " in message
    assert "b.c.<tuple 0>: " in message
    assert "; and 7 more" in message


def test_a_state_that_contains_itself_is_refused_with_both_places() -> None:
    inner: dict[str, Any] = {"list": []}
    inner["list"].append(inner)
    with pytest.raises(UnencodableError, match=r"a.list.0: refers back to a; break the cycle"):
        encode({"a": inner})


def test_one_list_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert through_json([shared, (shared, shared)]) == [[1], ([1], [1])]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {1: value}
    return value


def test_the_deepest_state_fits_strict_json_and_a_deeper_one_is_refused() -> None:
    assert through_json(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(UnencodableError, match=f"nested deeper than {MAX_DEPTH} levels"):
        encode(nested(MAX_DEPTH + 1))
    deep: Any = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH} levels"):
        decode(deep, None, where="state.json")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({TAG_KEY: "os.system"}, "unknown $type 'os.system'"),
        ({TAG_KEY: ["tuple"]}, "unknown $type ['tuple']"),
        ({TAG_KEY: "tuple"}, "tuple: items must be list, found NoneType"),
        ({TAG_KEY: "tuple", "items": [], "more": 1}, "tuple: unknown field 'more'"),
        ({TAG_KEY: "set", "items": [1, 1]}, "set: an item stands twice in a set"),
        ({TAG_KEY: "set", "items": [[1]]}, "set: unhashable type: 'list'"),
        ({TAG_KEY: "dict", "pairs": [[1, 2], [1, 3]]}, "dict: the key 1 stands twice"),
        ({TAG_KEY: "dict", "pairs": [[1]]}, "dict: pair 0 has 1 members"),
        ({TAG_KEY: "int", "value": "1e5"}, "int: not an integer"),
        ({TAG_KEY: "int", "value": "9" * 5000}, "int: not an integer"),
        ({TAG_KEY: "float", "value": "1.5"}, "float: a float with a tag is nan, inf or -inf"),
        ({TAG_KEY: "bytes", "data": "A==="}, "bytes: "),
        ({TAG_KEY: "bytes", "data": None}, "bytes: data must be str, found NoneType"),
        ({TAG_KEY: "Decimal", "value": "x"}, "Decimal: "),
        ({TAG_KEY: "Fraction", "numerator": 1, "denominator": 0}, "Fraction: "),
        ({TAG_KEY: "UUID", "value": 5}, "UUID: value must be str, found int"),
        ({TAG_KEY: "deque", "items": [1, 2], "maxlen": 1}, "deque: 2 items, but maxlen is 1"),
        ({TAG_KEY: "defaultdict", "factory": "eval", "pairs": []}, "defaultdict: the factory is"),
        (
            {TAG_KEY: "namedtuple", "class": "a.B", "fields": ["x, y: eval('1')"], "items": [1]},
            "namedtuple: Type names and field names must be valid identifiers",
        ),
        (
            {TAG_KEY: "numpy.ndarray", "dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="},
            "numpy.ndarray: '|O' is no plain numpy dtype",
        ),
        (
            {TAG_KEY: "numpy.ndarray", "dtype": "<f8", "shape": [10**12], "data": "AAAAAAAAAAA="},
            "numpy.ndarray: shape [1000000000000] of <f8 needs 8000000000000 bytes, found 8",
        ),
        (
            {TAG_KEY: "numpy.ndarray", "dtype": "<f8", "shape": [-1], "data": ""},
            "numpy.ndarray: shape [-1] of <f8",
        ),
        ({TAG_KEY: "numpy.dtype", "dtype": "f4,O"}, "numpy.dtype: 'f4,O' is no plain numpy dtype"),
        ({TAG_KEY: "numpy.scalar", "dtype": "<i8", "value": "1"}, "numpy.scalar: value must be"),
        (float("nan"), "nan without a tag is not strict JSON"),
        (b"raw", "bytes is not JSON data"),
    ],
)
def test_a_document_that_encode_never_writes_is_refused_with_its_place(
    data: Any, problem: str
) -> None:
    with pytest.raises(FormatError) as caught:
        decode({"a": [data]}, None, where="training/state.json")
    assert str(caught.value).startswith(f"training/state.json: a.0: {problem}")


SPECIAL = ("enum", "namedtuple", "numpy.ndarray", "numpy.scalar", "numpy.dtype", "torch.x")


def tagged(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {TAG_KEY: st.sampled_from([*RULES, *SPECIAL])},
        optional={
            **{name: inner for rule in RULES.values() for name in rule.fields},
            "items": st.lists(inner, max_size=3),
            "pairs": st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
            "dtype": st.sampled_from(["<f4", "|b1", "<U2", "|S1", "<M8[s]", "<f16"]),
            "shape": st.lists(st.integers(-1, 3), max_size=2),
            "class": st.just("a.B"),
        },
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | tagged(inner),
        max_leaves=10,
    )
)
@settings(deadline=None)
def test_any_json_gives_a_value_or_a_format_error(data: Any) -> None:
    with contextlib.suppress(FormatError):
        decode(data, None, where="state.json")


@given(st.sampled_from([*RULES, *SPECIAL]), st.data())
@settings(deadline=None, max_examples=300)
def test_any_fields_of_a_tag_give_a_value_or_a_format_error(tag: str, data: st.DataObject) -> None:
    simple = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    fields = RULES[tag].fields if tag in RULES else ("dtype", "value", "class", "name")
    document: dict[str, Any] = {name: data.draw(simple) for name in fields}
    with contextlib.suppress(FormatError):
        decode({TAG_KEY: tag, **document}, None, where="state.json")


class Drawer:
    """A sink that keeps long arrays, as a writer of tensors would."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def add(self, key: str, value: Any) -> Reference | None:
        if isinstance(value, NotPlain):
            return Reference("torch.tensor", {"name": key})
        return None

    def add_array(self, key: str, raw: Any) -> str:
        self.kept[key] = raw
        return key

    def get(self, reference: Reference) -> Any:
        raise KeyError(reference.fields["name"])

    def get_array(self, name: str) -> Any:
        return self.kept[name]


def test_long_arrays_go_to_the_sink_and_come_back_in_any_shape() -> None:
    drawer = Drawer()
    tall = np.arange(60.0).reshape(3, 20).T
    arrays = {"tall": tall, "short": np.arange(8), "empty": np.zeros((0, 9))}
    data = encode(arrays, drawer, key="extra")
    assert list(drawer.kept) == ["extra.tall"]
    back = decode(data, drawer, where="x")
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
    assert isinstance(decode(data, None, where="x")["tall"], Reference)


def test_a_tensor_that_is_not_there_is_damage_and_without_a_source_a_reference() -> None:
    data = encode({"w": NotPlain()}, Drawer())
    assert decode(data, None, where="x") == {"w": Reference("torch.tensor", {"name": "w"})}
    with pytest.raises(FormatError, match=r"^x: w: torch.tensor: 'w'$"):
        decode(data, Drawer(), where="x")


def test_a_tensor_as_a_key_is_refused() -> None:
    with pytest.raises(UnencodableError, match="a tensor is a key or in a set"):
        encode({NotPlain(): 1}, Drawer())
