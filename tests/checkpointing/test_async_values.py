"""Numbers, lists and tensors that change behind a save are those of the call in the files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from tests.slow_disk import held_writes
from tests.states import same


def values() -> dict[str, Any]:
    return {
        "step": 1,
        "nested": {"list": [1, [2, {"deep": [3]}]], "text": "one"},
        "tensor": torch.arange(6.0),
        "pair": (1, 2.5),
    }


def change(live: dict[str, Any], number: int) -> None:
    """What a training does to them at once."""
    live["step"] = number
    live["nested"]["list"][-1][1]["deep"].append(number)
    live["nested"]["list"].insert(0, number)
    live["nested"]["text"] = str(number)
    live["tensor"].mul_(-number)
    live["pair"] = (number, 0.0)


@pytest.mark.case("V32")
@pytest.mark.parametrize("overlap", mp.Overlap)
def test_two_saves_in_flight_hold_what_was_there_at_their_calls(
    overlap: mp.Overlap, tmp_path: Path
) -> None:
    live = values()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer, "values": live}
    wanted, weights = {}, {}
    with held_writes() as gate:
        handles = []
        for step in (1, 2):
            wanted[step] = copy.deepcopy(live)
            weights[step] = model.weight.detach().clone()
            handles.append(
                mp.save_async(
                    tmp_path / f"checkpoint-{step}",
                    state,
                    step=step,
                    overlap=overlap,
                    in_flight=mp.InFlight.QUEUE,
                )
            )
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            change(live, 10 * step)
        assert not any(handle.done() for handle in handles)
        gate.set()
        for handle in handles:
            handle.wait()
    for step in (1, 2):
        checkpoint = mp.Checkpoint.open(tmp_path / f"checkpoint-{step}")
        assert same(checkpoint.training_state()["values"], wanted[step])
        assert torch.equal(checkpoint.read("weight"), weights[step])
    assert not same(wanted[1], wanted[2]) and not torch.equal(weights[1], weights[2])
