"""The safe unpickler against pickle itself: equal for data, harmless for everything else."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import enum
import pathlib
import pickle
import subprocess
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError, UnsafePickleError
from milepost.format.lazy import Opaque
from milepost.format.pickles import loads

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
)
keys = scalars | st.tuples(scalars, scalars) | st.frozensets(st.integers(), max_size=3)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=20,
)


class Colour(enum.Enum):
    RED = 1


class Record:
    def __init__(self, size: int) -> None:
        self.size = size


class Rows(list[int]):
    pass


@given(trees, st.sampled_from(list(PROTOCOLS)))
def test_plain_data_comes_out_as_pickle_gives_it(value: Any, protocol: int) -> None:
    raw = pickle.dumps(value, protocol)
    found = loads(raw, where="x.pkl")
    assert found == pickle.loads(raw)
    assert repr(found) == repr(pickle.loads(raw))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"abc"),
        bytearray(),
        b"",
        frozenset([1, (2, 3)]),
        slice(1, None, 2),
        range(2, 9, 3),
        collections.Counter("aab"),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.defaultdict(list, {"a": [1]}),
        collections.deque([1, 2, 3], maxlen=5),
        collections.deque([1]),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2),
        datetime.time(3, 4, 5),
        datetime.timedelta(days=1, microseconds=3),
        datetime.timezone(datetime.timedelta(hours=2), "CEST"),
        decimal.Decimal("1.50"),
        uuid.UUID(int=12345),
        pathlib.PurePosixPath("a/b"),
        pathlib.PureWindowsPath("c:/a"),
        float("inf"),
        "\ud800 lone",
        "line\nbreak \\ and 'quotes'",
    ],
    ids=lambda value: type(value).__name__,
)
def test_common_types_of_the_standard_library_are_rebuilt(value: Any, protocol: int) -> None:
    found = loads(pickle.dumps(value, protocol), where="x.pkl")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_namespaces_become_simple_namespaces_and_paths_become_pure(protocol: int) -> None:
    value = [argparse.Namespace(lr=0.1), types.SimpleNamespace(a=1), Path("a/b")]
    found: Any = loads(pickle.dumps(value, protocol), where="x.pkl")
    assert found == [types.SimpleNamespace(lr=0.1), types.SimpleNamespace(a=1), found[2]]
    assert type(found[2]) is pathlib.PurePosixPath


@pytest.mark.case("V09")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("spelling", ["numpy._core", "numpy.core"])
def test_arrays_and_scalars_of_numpy_are_rebuilt(protocol: int, spelling: str) -> None:
    values: list[Any] = [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.zeros((0, 4), dtype=bool),
        np.array(["ab", "c"]),
        np.array(3, dtype=np.complex64),
        np.float64(1.5),
        np.int64(-3),
        np.random.RandomState(0).get_state(),
    ]
    raw = pickle.dumps(values, protocol)
    if protocol < 4:  # names are not length-prefixed there, so the old spelling can be put in
        raw = raw.replace(b"numpy._core", spelling.encode())
    found: Any = loads(raw, where="x.pkl")
    for a, b in zip(values[:8], found[:8], strict=True):
        assert np.array_equal(a, b)
        assert type(a) is type(b)
        assert a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")
    np.random.RandomState(1).set_state(found[8])


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(FormatError, match="no plain number"):
        loads(pickle.dumps(np.array([object, None], dtype=object), 2), where="x.pkl")


@pytest.mark.parametrize("state", [(3, "<", None, None, None, -1, -1, 1), (3, "<", 8)])
def test_a_numpy_dtype_cannot_be_given_flags_that_crash_it(state: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return np.dtype, ("f8", False, True), state

    raw = pickle.dumps(Evil(), 2)
    try:
        found: Any = loads(raw, where="x.pkl")
    except FormatError:
        return
    assert found == np.dtype("f8")
    assert not found.hasobject


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.pair = (function, args)

    def __reduce__(self) -> Any:
        return self.pair


def _hostile(marker: Path) -> dict[str, bytes]:
    text = f"open({str(marker)!r}, 'w').close()"
    import functools
    import os

    return {
        "os.system": pickle.dumps(Calls(os.system, f"touch {marker}"), 2),
        "eval": pickle.dumps(Calls(eval, text), 2),
        "exec at protocol 4": pickle.dumps(Calls(exec, text), 4),
        "subprocess": pickle.dumps(Calls(subprocess.run, ["touch", str(marker)]), 5),
        "partial": pickle.dumps(Calls(functools.partial, os.system, f"touch {marker}"), 2),
        "instance": b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'touch " + str(marker).encode() + b"'\no.",
        "global only": b"cos\nsystem\n.",
        "getattr": b"c__builtin__\ngetattr\n(c__builtin__\nobject\nS'__subclasses__'\ntR(tR.",
        "torch.load": b"\x80\x02ctorch.serialization\nload\nX\x01\x00\x00\x00a\x85R.",
        "nested pickle": b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01a\x85R.",
        "dotted name": b"\x80\x04\x8c\x0bcollections\x8c\x0d_sys.modules\x93.",
        "extension": b"\x80\x02\x82\x01.",
    }


@pytest.mark.case("C6.28")
def test_nothing_of_a_hostile_pickle_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, raw in _hostile(marker).items():
        with pytest.raises((UnsafePickleError, FormatError)):
            loads(raw, where=name)
        assert not marker.exists(), name


def test_a_refusal_names_every_global_the_file_and_how_to_allow_them() -> None:
    raw = pickle.dumps([Colour.RED, Record(1), Calls(eval, "1")], 2)
    with pytest.raises(UnsafePickleError) as caught:
        loads(raw, where="run/latest.pt")
    home = __name__
    assert caught.value.global_name == f"{home}.Colour"
    assert caught.value.path == "run/latest.pt"
    for name in (f"{home}.Colour", f"{home}.Record", "builtins.eval", "allow="):
        assert name in str(caught.value)


@pytest.mark.case("C7.31")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_allowed_classes_come_out_as_inert_records(protocol: int) -> None:
    allow = [f"{__name__}.{name}" for name in ("Colour", "Record", "Rows")]
    value = [Colour.RED, Record(7), Rows([1, 2])]
    found: Any = loads(pickle.dumps(value, protocol), where="x", allow=allow)
    colour, record, rows = found
    assert isinstance(colour, Opaque) and colour.args == (1,)
    assert isinstance(record, Opaque) and record.fields() == {"size": 7}
    assert record.class_name == f"{__name__}.Record"
    assert isinstance(rows, Opaque)


def test_an_allowed_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "landmine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass A: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    raw = b"\x80\x02clandmine\nA\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    found = loads(raw, where="x", allow=["landmine.A"])
    assert isinstance(found, Opaque) and found.fields() == {"a": 1}
    assert "landmine" not in sys.modules
    assert not marker.exists()


def _op(text: str, nbytes: int) -> bytes:
    return text.encode() + nbytes.to_bytes(4, "little")


def _doubled(times: int) -> bytes:
    """A tuple of twice the tuple before, again and again."""
    return b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(times))


def _copies(nbytes: int) -> bytes:
    """The same long text encoded many times."""
    return _op("X", nbytes) + b"a" * nbytes + b"\x85q\x01R" + b"0h\x00h\x01R" * nbytes


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ends early"),
        (b"\x80\x02", "ends early"),
        (b"\x80\x09N.", "protocol 9 is newer"),
        (b".", "stack is empty"),
        (b"NN.", "left on the stack"),
        (b"(N.", "left on the stack"),
        (b"h\x05.", "memo entry 5"),
        (b"t.", "mark is missing"),
        (b"(\x94.", "stack is empty"),
        (b"\x8e" + (2**62).to_bytes(8, "little") + b"a.", "ends early"),
        (b"\x8d" + (2**64 - 1).to_bytes(8, "little") + b"a.", "ends early"),
        (b"\x96" + (2**40).to_bytes(8, "little") + b"a.", "ends early"),
        (_op("B", 2**32 - 1), "ends early"),
        (_op("T", 2**32 - 1), "negative"),
        (b"\x95" + (2**40).to_bytes(8, "little") + b"N.", "a frame claims"),
        (b"\x8b\x00\x00\x01\x00" + b"\x01" * 2**16 + b".", "an integer of 65536 bytes"),
        (b"L" + b"9" * 10_000 + b"L\n.", "not a well-formed"),
        (b"I12", "does not end"),
        (b"X\x01\x00\x00\x00\xff.", "not a well-formed"),
        (b"]Na]a.", None),
        (b"NNa.", "appended to"),
        (b"}]Ns.", "unhashable"),
        (b"}(Nu.", "a key has no value"),
        (b"K\x01)R.", "is called"),
        (b"cbuiltins\nset\nK\x01R.", "for arguments"),
        (b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.", "expected"),
        (b"]q\x00h\x00a.", "contains itself"),
        (b"K\x01Q.", "outside the pickle"),
        (b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.", "lose its attribute"),
        (b"cbuiltins\nset\n(cbuiltins\nrange\nJ\xff\xff\xff\x7f\x85RtR.", "given as range"),
    ],
)
def test_malformed_pickles_raise_format_errors(raw: bytes, message: str | None) -> None:
    if message is None:
        loads(raw, where="x.pkl")
        return
    with pytest.raises(FormatError, match=message) as caught:
        loads(raw, where="x.pkl")
    assert "x.pkl" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b")" + b"\x85" * 10**5 + b".", "deeper than 200"),
        (b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "deeper than 200"),
        (b"})" + b"\x85" * 10**6 + b"Ns.", "key is nested too deeply"),
        (b")" + _doubled(200) + b".", "unfolds to more"),
        (b"})" + _doubled(14) + b"q\xff0" + b"h\xffNs" * 2000 + b".", "builds far more"),
        (b"c_codecs\nencode\nq\x00" + _copies(10**5) + b".", "builds far more"),
    ],
    ids=["deep tuple", "deep list", "deep key", "doubling", "doubling key", "copies"],
)
def test_small_pickles_cannot_build_huge_or_deep_trees(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        loads(raw, where="x.pkl")


@given(st.data())
def test_mutated_pickles_only_raise_our_errors(data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(_MIXED, data.draw(st.sampled_from(list(PROTOCOLS)))))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError, UnsafePickleError):
        loads(bytes(raw), where="x.pkl")


_MIXED = {
    "tuple": (1, 2.5, "text", b"bytes", None),
    "nested": [{"a": {1, 2}}, collections.OrderedDict(x=1), frozenset([3])],
    "array": np.arange(4),
    "when": datetime.datetime(2026, 1, 1),
    "path": pathlib.PurePosixPath("a"),
    "id": uuid.UUID(int=5),
    "big": 2**100,
}


@given(st.binary(max_size=60))
def test_random_bytes_only_raise_our_errors(raw: bytes) -> None:
    with contextlib.suppress(FormatError, UnsafePickleError):
        loads(raw, where="x.pkl")


def test_the_unpickler_needs_neither_torch_nor_pickle() -> None:
    code = (
        "import sys, milepost.format.pickles as p\n"
        "p.loads(b'N.', where='x')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
