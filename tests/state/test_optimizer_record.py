"""What is recorded of an optimizer besides its moments survives as it is, type included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost.errors import (
    FormatError,
    UnencodableError,
)
from milepost.state.optimizer import inner_optimizers
from milepost.state.optimizer_record import (
    OptimizerRecord,
    Plain,
    ScalarTensor,
    split_tensor_name,
    tensor_name,
)
from tests.state.optimizers import capture, net, restore, step


@pytest.mark.case("V38")
def test_equal_steps_are_one_value_with_exceptions() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        step(optimizer, without=[model.b.bias])
    step(optimizer)
    record = capture(model, optimizer).record
    assert record.to_tree()["slots"] == {
        "step": {
            "default": {"scalar": {"dtype": "float32", "value": 7.0, "device": "cpu"}},
            "exceptions": {
                "b.bias": {"scalar": {"dtype": "float32", "value": 1.0, "device": "cpu"}}
            },
        }
    }


@pytest.mark.case("V34")
def test_values_that_compare_equal_but_are_not_the_same_are_kept_apart() -> None:
    model = net(("a", "b"))
    optimizer = torch.optim.SGD(model.parameters())
    values = [1, 1.0, True, torch.tensor(1)]
    for parameter, value in zip(model.parameters(), values, strict=True):
        optimizer.state[parameter] = {"step": value, "zero": -0.0 if value is True else 0.0}
    target = net(("a", "b"))
    other = torch.optim.SGD(target.parameters())
    restore(capture(model, optimizer), target, other)
    found = [other.state[p]["step"] for p in target.parameters()]
    assert [repr(value) for value in found] == ["1", "1.0", "True", "tensor(1)"]
    assert [repr(other.state[p]["zero"]) for p in target.parameters()] == [
        "0.0",
        "0.0",
        "-0.0",
        "0.0",
    ]


@pytest.mark.case("V37")
def test_codes_tables_nests_and_odd_shapes_survive() -> None:
    source, target = net(("a",)), net(("a",))
    optimizer, other = (torch.optim.SGD(m.parameters()) for m in (source, target))
    entry = {
        "state1": torch.arange(16, dtype=torch.uint8).view(4, 4),
        "absmax1": torch.tensor([0.5]),
        "qmap.1": torch.linspace(-1, 1, 256),
        "step": 12,
        "none": None,
        "nan": torch.tensor(float("nan")),
        "nested": {"rows": [torch.ones(2), (1, "x")], "k": 2.5},
        "empty": {},
    }
    optimizer.state[source.a.weight] = entry
    optimizer.state[source.a.bias] = {}
    state = capture(source, optimizer)
    assert set(state.tensors) == {
        f"a.weight.{slot}" for slot in ("state1", "absmax1", "qmap%2E1", "nan")
    }
    assert set(state.record.odd_shaped) == {
        "a.weight.absmax1",
        "a.weight.qmap%2E1",
        "a.weight.nan",
    }
    restore(state, target, other)
    found = other.state[target.a.weight]
    assert set(found) == set(entry)
    assert torch.equal(found["state1"], torch.arange(16, dtype=torch.uint8).view(4, 4))
    assert torch.equal(found["qmap.1"], torch.linspace(-1, 1, 256))
    assert found["step"] == 12 and found["none"] is None and found["empty"] == {}
    assert found["nan"].isnan() and found["nan"].ndim == 0
    assert torch.equal(found["nested"]["rows"][0], torch.ones(2))
    assert found["nested"]["rows"][1] == (1, "x")
    assert other.state[target.a.bias] == {}


def test_state_under_a_name_that_is_no_parameter_survives() -> None:
    source, target = net(), net()
    optimizer, other = (torch.optim.SGD(m.parameters()) for m in (source, target))
    shared: dict[Any, Any] = optimizer.state
    shared["clip"] = {"history": [1.0, 2.0]}
    live: dict[Any, Any] = other.state
    live["stale"] = 1
    restore(capture(source, optimizer), target, other)
    assert live["clip"] == {"history": [1.0, 2.0]} and "stale" not in live


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"groups": 3}, r"state\.groups: expected a list, found int 3"),
        ({"slots": {"step": {"default": {}}}}, r"state\.slots\['step'\]\.default\.scalar: expec"),
        ({"stateless": ["a", 1]}, r"state\.stateless\[1\]: expected a str, found int 1"),
        (
            {"slots": {"s": {"default": {"scalar": {"dtype": "f", "value": "x"}}}}},
            r"state\.slots\['s'\]\.default\.scalar\.value: expected a number, found 'x'",
        ),
    ],
)
def test_a_malformed_record_is_refused_naming_the_place(change: dict[str, Any], place: str) -> None:
    model = net(("a",))
    tree = capture(model, torch.optim.SGD(model.parameters())).record.to_tree()
    with pytest.raises(FormatError, match=place):
        OptimizerRecord.from_tree(tree | change, where="state")


def test_state_under_a_key_that_is_no_text_is_refused_by_name() -> None:
    model = net(("a",))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.a.weight] = {0: torch.ones(1)}
    with pytest.raises(UnencodableError, match=r"a\.weight has state under the key 0"):
        capture(model, optimizer)


@pytest.mark.parametrize("fqn", ["a", "a.b", "a%2Eb.c"])
@pytest.mark.parametrize("slot", ["exp_avg", "a.b", "%2E", "a%.b", ""])
def test_tensor_names_split_into_what_they_were_made_of(fqn: str, slot: str) -> None:
    assert split_tensor_name(tensor_name(fqn, slot)) == (fqn, slot)


def test_wrapped_and_several_optimizers_are_found() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = net()
    first = torch.optim.SGD(model.a.parameters())
    second = torch.optim.AdamW(model.b.parameters())
    wrapped = Accelerator(cpu=True).prepare(first)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert inner_optimizers(wrapped) == {"": first}
    assert inner_optimizers([wrapped, second]) == {"0": first, "1": second}
    assert inner_optimizers({"muon": first, "adam": [second]}) == {"muon": first, "adam.0": second}
    assert inner_optimizers([]) == inner_optimizers([first, 1]) == inner_optimizers(model) == {}
    assert capture(model, wrapped).record.class_name == "torch.optim.sgd.SGD"


def test_scalars_and_values_are_told_apart_in_the_tree() -> None:
    model = net(("a",))
    optimizer = torch.optim.SGD(model.parameters())
    looks_like = {"scalar": {"dtype": "float32", "value": 1.0, "device": "cpu"}}
    optimizer.state[model.a.weight] = {"x": looks_like, "y": torch.tensor(2, dtype=torch.int16)}
    record = OptimizerRecord.from_tree(capture(model, optimizer).record.to_tree(), where="state")
    assert record.slots["x"].exceptions == {"a.weight": Plain(value=looks_like)}
    assert record.slots["y"].default == ScalarTensor(dtype="int16", value=2, device="cpu")
