"""Random state: captured without advancing, restored so that the next draws are the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from milepost.errors import FormatError, InvalidInputError
from milepost.format import strictjson, tree
from milepost.state.rng import RngState, capture_rng, pack_rng, restore_rng, unpack_rng
from milepost.state.tree_torch import MappingSource, StateTensors


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def draws(count: int = 5) -> list[float]:
    """The next numbers of every global generator; an odd count of normals leaves one pending."""
    numbers: list[float] = []
    for _ in range(count):
        numbers += [random.random(), random.gauss(0, 1), np.random.random(), np.random.randn()]
        numbers += torch.rand(3).tolist() + torch.randn(1).tolist()
    return numbers


@pytest.mark.case("V29")
def test_the_next_draws_after_a_restore_are_those_after_the_capture() -> None:
    draws(3)
    state = capture_rng()
    expected = draws()
    draws(7)
    assert restore_rng(state) == []
    assert draws() == expected


def test_capturing_does_not_advance_any_generator() -> None:
    state = capture_rng()
    capture_rng()
    expected = draws()
    restore_rng(state)
    assert draws() == expected


def test_a_captured_state_does_not_follow_later_draws() -> None:
    state = capture_rng()
    before = copy.deepcopy(state)
    draws()
    assert pack_rng(state) == pack_rng(before)


@pytest.mark.case("V09")
def test_the_state_passes_through_the_typed_tree() -> None:
    draws(1)
    state = capture_rng()
    expected = draws()
    sink = StateTensors()
    raw = strictjson.dumps(tree.encode(state, sink, key="rng"))
    back = tree.decode(strictjson.loads(raw, "x"), MappingSource(sink.tensors), where="x")
    assert restore_rng(back) == []
    assert draws() == expected


def test_the_state_passes_through_a_blob_padded_with_zeros() -> None:
    draws(1)
    state = capture_rng()
    expected = draws()
    blob = pack_rng(state) + bytes(100)
    assert restore_rng(unpack_rng(blob, "rng.bin")) == []
    assert draws() == expected


def test_blobs_of_equal_states_are_equal_and_all_blobs_have_one_length() -> None:
    state = capture_rng()
    assert pack_rng(state) == pack_rng(capture_rng())
    lengths = set()
    for seed in range(20):
        random.seed(seed)
        np.random.seed(seed)
        draws(seed % 3)
        if seed % 2:
            random.gauss(0, 1)
            np.random.randn()
        lengths.add(len(pack_rng(capture_rng())))
    assert len(lengths) == 1


def test_devices_are_packed_too() -> None:
    state = capture_rng()
    state["devices"] = {"cuda:1": torch.arange(16, dtype=torch.uint8), "cuda:0": torch.zeros(0)}
    state["devices"]["cuda:0"] = torch.ones(16, dtype=torch.uint8)
    back = unpack_rng(pack_rng(state), "rng.bin")
    assert list(back["devices"]) == ["cuda:0", "cuda:1"]
    assert torch.equal(back["devices"]["cuda:1"], state["devices"]["cuda:1"])


def test_another_numpy_generator_is_packed_and_reported_as_not_restorable() -> None:
    state = capture_rng()
    state["numpy"] = dict(np.random.PCG64(3).state)
    back = unpack_rng(pack_rng(state), "rng.bin")
    assert back["numpy"] == state["numpy"]
    numpy_before = np.random.get_state(legacy=False)["state"]["key"].tolist()
    assert restore_rng(back) == [
        "numpy: the checkpoint holds 'PCG64', this process uses MT19937; "
        "call numpy.random.set_bit_generator first"
    ]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy_before


def test_a_device_that_is_not_here_is_reported_and_the_rest_restored() -> None:
    state = capture_rng()
    expected = draws()
    state["devices"]["cuda:99"] = torch.zeros(16, dtype=torch.uint8)
    assert restore_rng(state) == ["cuda:99: this process does not see it"]
    assert draws() == expected


def test_a_state_without_numpy_is_reported() -> None:
    state = capture_rng()
    state["numpy"] = None
    assert restore_rng(state) == ["numpy: the checkpoint has no state of it"]


def damaged(part: str, value: Any) -> RngState:
    state: Any = capture_rng()
    state[part] = value
    return state  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("python", (3, (1, 2, 3), None), "random state of python: "),
        ("python", None, "random state of python: "),
        ("numpy", {"bit_generator": "MT19937"}, "random state of numpy: "),
        ("numpy", {}, "random state of numpy: "),
        ("numpy", ("MT19937", [1], 2), "random state of numpy: "),
        ("torch", torch.zeros(7, dtype=torch.uint8), "random state of torch: "),
        (
            "torch",
            torch.zeros(5056),
            "random state of torch: expected a uint8 tensor, found Tensor",
        ),
        ("torch", None, "random state of torch: expected a uint8 tensor, found NoneType"),
        ("devices", None, "random state of the accelerators: expected a dict, found NoneType"),
    ],
)
def test_a_malformed_part_leaves_every_generator_as_it_was(
    part: str, value: Any, problem: str
) -> None:
    state = damaged(part, value)
    draws(2)
    before = pack_rng(capture_rng())
    with pytest.raises(FormatError) as caught:
        restore_rng(state)
    assert str(caught.value).startswith(problem)
    assert pack_rng(capture_rng()) == before


def test_blobs_that_pack_never_writes_are_refused_by_name() -> None:
    blob = pack_rng(capture_rng())
    no_state = b'{"python":{"version":3,"mt":"short"}}'
    for bad in [
        b"",
        b"MPRNG001",
        blob[:-300],
        b"X" + blob[1:],
        blob + b"x",
        blob[:8] + (2**60).to_bytes(8, "little") + blob[16:],
        blob[:8] + len(no_state).to_bytes(8, "little") + no_state,
        blob[:8] + (2).to_bytes(8, "little") + b"[]",
    ]:
        with pytest.raises(FormatError, match=r"^rng\.bin row 3: "):
            unpack_rng(bad, "rng.bin row 3")


def test_packing_something_else_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"this is no state from capture_rng\(\)"):
        pack_rng(damaged("python", (3, (1, 2), None)))
