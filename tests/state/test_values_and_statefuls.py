from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from milepost.state.other import (
    Kind,
    capture_stateful,
    kind_of,
    restore_stateful,
    restore_value,
)


@pytest.mark.case("V31")
def test_every_leaf_has_the_saved_value_whatever_its_type() -> None:
    weight = torch.zeros(3)
    live: dict[str, Any] = {
        "w": weight,
        "step": 0,
        "name": "x",
        "lst": [0],
        "none": None,
        "f": 0.0,
        "gone": 1,
        "nested": {"a": [1, 2, 3], "t": torch.zeros(2, dtype=torch.int64)},
    }
    inner, numbers = live["nested"], live["lst"]
    saved = {
        "w": torch.ones(3),
        "step": 37,
        "name": "y",
        "lst": [3, 4],
        "none": 5,
        "f": 1.5,
        "nested": {"a": [9], "t": torch.ones(4)},
        "new": (1, 2),
    }
    assert restore_value(live, saved) is live
    assert live["w"] is weight and torch.equal(weight, torch.ones(3))
    assert live["lst"] is numbers and numbers == [3, 4]
    assert live["nested"] is inner and inner["a"] == [9]
    assert torch.equal(inner["t"], torch.ones(4))
    assert {k: live[k] for k in ("step", "name", "none", "f", "new")} == {
        "step": 37,
        "name": "y",
        "none": 5,
        "f": 1.5,
        "new": (1, 2),
    }
    assert "gone" not in live and list(live) == list(saved)


@pytest.mark.case("V31")
def test_a_number_is_replaced_and_returned() -> None:
    assert restore_value(0, 37) == 37
    assert restore_value([1], {"a": 1}) == {"a": 1}
    assert restore_value(torch.zeros(2), 3) == 3


def test_a_parameter_that_stands_in_a_value_is_filled_in_place() -> None:
    master = nn.Parameter(torch.zeros(2))
    assert restore_value([master], [torch.ones(2)])[0] is master
    assert torch.equal(master, torch.ones(2))


@pytest.mark.case("V35")
def test_master_weights_kept_in_a_value_come_back_to_the_bit() -> None:
    live = {"masters": {"w": torch.tensor([1.0])}}
    saved = {"masters": {"w": torch.tensor([1.0 + 1e-4])}}
    masters = live["masters"]["w"]
    restore_value(live, saved)
    assert live["masters"]["w"] is masters and torch.equal(masters, torch.tensor([1.0001]))


def scheduled() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    def shape(step: int) -> float:
        if step < 10:
            return step / 10
        return 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, shape)


@pytest.mark.case("V30")
@pytest.mark.parametrize("stop", [3, 10, 57])
def test_a_restored_schedule_goes_on_at_the_same_rates(stop: int) -> None:
    def run(
        pair: tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler], steps: int
    ) -> list[float]:
        rates = []
        for _ in range(steps):
            pair[0].step()
            pair[1].step()
            rates.append(pair[0].param_groups[0]["lr"])
        return rates

    whole, stopped, resumed = scheduled(), scheduled(), scheduled()
    expected = run(whole, 100)
    run(stopped, stop)
    restore_stateful(resumed[1], capture_stateful(stopped[1]))
    assert run(resumed, 100 - stop) == expected[stop:]


def test_a_gradient_scaler_comes_back() -> None:
    source, target = (torch.amp.GradScaler("cpu") for _ in range(2))
    source.load_state_dict({**source.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    restore_stateful(target, capture_stateful(source))
    assert target.state_dict() == source.state_dict()


def test_kinds_are_told_by_what_an_object_is() -> None:
    model = nn.Linear(2, 2)
    optimizer, scheduler = scheduled()
    assert kind_of(model) is Kind.MODEL
    assert kind_of([model, nn.Linear(1, 1)]) is Kind.MODEL
    assert kind_of(torch.compile(model, backend="eager")) is Kind.MODEL
    assert kind_of(optimizer) is Kind.OPTIMIZER
    assert kind_of([optimizer]) is Kind.OPTIMIZER
    assert kind_of(scheduler) is Kind.STATEFUL
    assert kind_of(torch.amp.GradScaler("cpu")) is Kind.STATEFUL
    value: Any
    for value in (3, "x", None, [], {}, [1, model], torch.zeros(1), nn.Linear):
        assert kind_of(value) is Kind.VALUE
