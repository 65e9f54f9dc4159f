"""Whatever a training run consists of, saved and loaded: several models and optimizers, wrappers,
averages, master weights, schedules, scalers, plain values."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    InvalidInputError,
    KeyMismatchError,
    NotFoundError,
)
from tests.directories import opened
from tests.states import bits, same, snapshot, train, training


def saved(tmp_path: Path, state: dict[str, Any], **arguments: Any) -> Path:
    path = tmp_path / "checkpoint-1"
    mp.save(path, state, step=1, **arguments)
    return path


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *shape: int) -> None:
    optimizer.zero_grad()
    model(torch.ones(shape)).sum().backward()
    optimizer.step()


# Models.


def test_of_several_models_one_lies_at_the_root_and_the_others_below(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"actor": nn.Linear(2, 3), "critic": nn.Linear(2, 1), "reward": nn.Linear(2, 1)}
    path = saved(tmp_path, state, primary="critic")
    assert (path / "model.safetensors").exists()
    assert (path / "actor" / "model.safetensors").exists()
    assert (path / "reward" / "model.safetensors.index.json").exists()
    checkpoint = opened(path)
    assert checkpoint.model_keys()[0] == "critic"
    assert list(checkpoint.tensors()) == list(checkpoint.weights("critic").tensors)
    live = {"actor": nn.Linear(2, 3), "critic": nn.Linear(2, 1), "reward": nn.Linear(2, 1)}
    mp.load(path, live, primary="critic")
    assert same(snapshot(live), snapshot(state))
    alone = nn.Linear(2, 1)
    mp.load(path, {"reward": alone})
    assert same(alone.state_dict(), state["reward"].state_dict())


def test_a_lone_model_of_any_key_lies_at_the_root_and_fills_a_lone_one_of_another(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    path = saved(tmp_path, {"network": model})
    live = nn.Linear(2, 2)
    mp.load(path, {"model": live})
    assert same(live.state_dict(), model.state_dict())
    with pytest.raises(NotFoundError, match=r"no model 'ema'; it holds network"):
        mp.load(path, {"model": live, "ema": nn.Linear(2, 2)})


def test_models_that_share_an_optimizer_get_their_own_moments_back(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(1)
        model, head = nn.Linear(2, 2), nn.Linear(2, 1)
        parameters = [*head.parameters(), *model.parameters()]
        return {"model": model, "head": head, "optimizer": torch.optim.Adam(parameters, lr=0.1)}

    def advance(state: dict[str, Any]) -> None:
        state["optimizer"].zero_grad()
        state["head"](state["model"](torch.ones(1, 2))).sum().backward()
        state["optimizer"].step()

    state, live = build(), build()
    advance(state)
    assert mp.load(saved(tmp_path, state), live).level is mp.Level.EXACT
    assert same(snapshot(live), snapshot(state))
    advance(state)
    advance(live)
    assert same(snapshot(live), snapshot(state))


@pytest.mark.case("V61")
@pytest.mark.parametrize("writes", ["plain", "compiled"])
@pytest.mark.parametrize("reads", ["plain", "compiled"])
def test_a_compiled_model_and_a_plain_one_have_the_same_names_on_disk(
    writes: str, reads: str, tmp_path: Path
) -> None:
    def build(kind: str, seed: int) -> dict[str, Any]:
        state = training(seed=seed, steps=1)
        if kind == "compiled":
            state["model"] = torch.compile(state["model"], backend="eager")
        return state

    state = build(writes, 0)
    path = saved(tmp_path, state)
    assert not [name for name in opened(path).tensors() if "_orig_mod" in name]
    live = build(reads, 5)
    report = mp.load(path, live)
    assert report.level is mp.Level.EXACT
    values = [bits(p) for p in live["model"].parameters()]
    assert values == [bits(p) for p in state["model"].parameters()]
    assert same(live["optimizer"].state_dict(), state["optimizer"].state_dict())


@pytest.mark.case("V61")
def test_a_real_submodule_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod": nn.Linear(1, 1)})
    names = set(opened(saved(tmp_path, {"model": model})).tensors())
    assert names == set(model.state_dict())


@pytest.mark.case("C2.14")
def test_the_extra_state_of_a_module_and_its_hidden_buffers_come_back_rightly(
    tmp_path: Path,
) -> None:
    class Counting(nn.Linear):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.calls: dict[str, Any] = {"n": 0}
            self.register_buffer("cache", torch.ones(2), persistent=False)

        def get_extra_state(self) -> Any:
            return self.calls

        def set_extra_state(self, state: Any) -> None:
            self.calls = state

    model, live = Counting(), Counting()
    model.calls = {"n": 7, "seen": (1, 2)}
    model.cache = torch.full((2,), 9.0)
    path = saved(tmp_path, {"model": model})
    assert set(opened(path).tensors()) == {"weight", "bias"}
    mp.load(path, {"model": live})
    assert live.calls == {"n": 7, "seen": (1, 2)}
    assert bits(live.cache) == bits(torch.ones(2))
    (path / "training" / "state.json").unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"state\.json"):
        mp.load(path, {"model": live})


def test_a_moving_average_is_an_entry_like_any_other(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        average = torch.optim.swa_utils.AveragedModel(
            model,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
        )
        return {"model": model, "ema": average, "optimizer": torch.optim.SGD(model.parameters())}

    state, live = build(0), build(1)
    for _ in range(3):
        step(state["model"], state["optimizer"], 1, 4)
        state["ema"].update_parameters(state["model"])
    path = saved(tmp_path, state)
    assert mp.load(path, live).level is mp.Level.EXACT
    assert same(snapshot(live), snapshot(state))
    assert int(live["ema"].n_averaged) == 3
    for each in (state, live):
        step(each["model"], each["optimizer"], 1, 4)
        each["ema"].update_parameters(each["model"])
    assert same(snapshot(live), snapshot(state))


class Average:
    """A moving average as people write it: an object with tensors and a number."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.steps = state["shadow"], state["steps"]


def test_an_average_of_the_users_own_is_saved_by_its_state_dict(tmp_path: Path) -> None:
    state = training(steps=1)
    state["ema"] = Average(state["model"])
    state["ema"].update(state["model"])
    live = training(seed=3)
    live["ema"] = Average(live["model"])
    mp.load(saved(tmp_path, state), live)
    assert same(snapshot(live), snapshot(state))


@pytest.mark.case("V35")
def test_master_weights_survive_two_resumes_bit_by_bit(tmp_path: Path) -> None:
    """bf16 weights of 1.0 whose masters move by 1e-5 a step."""

    def build() -> dict[str, Any]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        return {"model": model, "masters": {"weight": torch.full((1, 1), 1.0 + 1e-4)}}

    def advance(state: dict[str, Any], steps: int) -> list[float]:
        outputs = []
        for _ in range(steps):
            state["masters"]["weight"] -= 1e-5
            with torch.no_grad():
                state["model"].weight.copy_(state["masters"]["weight"])
            outputs.append(state["model"](torch.ones(1, 1, dtype=torch.bfloat16)).item())
        return outputs

    never = build()
    expected = advance(never, 60)
    state, outputs = build(), []
    for number in range(3):
        outputs += advance(state, 20)
        path = tmp_path / f"checkpoint-{number}"
        mp.save(path, state, step=number)
        live = build()
        assert mp.load(path, live).level is mp.Level.EXACT
        assert bits(live["masters"]["weight"]) == bits(state["masters"]["weight"])
        assert live["masters"]["weight"].dtype is torch.float32
        state = live
    assert outputs == expected
    assert same(snapshot(state), snapshot(never))


# Schedules, scalers, values.


@pytest.mark.case("V30")
@pytest.mark.parametrize("stop", [3, 10, 57])
def test_a_schedule_goes_on_where_it_was(stop: int, tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [10])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def rates(state: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            state["optimizer"].step()
            state["scheduler"].step()
            found.append(state["scheduler"].get_last_lr()[0])
        return found

    expected = rates(build(), 100)
    state = build()
    got = rates(state, stop)
    live = build()
    mp.load(saved(tmp_path, state), live)
    assert got + rates(live, 100 - stop) == expected


@pytest.mark.case("V30")
def test_a_checkpoint_without_the_schedule_is_refused_and_never_a_silent_warm_up(
    tmp_path: Path,
) -> None:
    state = training(steps=2)
    scheduler = state.pop("scheduler")
    path = saved(tmp_path, state)
    live = training(seed=1)
    before = snapshot(live)
    with pytest.raises(KeyMismatchError, match=r"holds no scheduler; .* missing=Missing\.KEEP"):
        mp.load(path, live)
    assert same(snapshot(live), before)
    report = mp.load(path, live, missing=mp.Missing.KEEP)
    assert report.kept == ["scheduler"]
    assert report.level is mp.Level.WARM_RESTART
    assert live["scheduler"].last_epoch == 0 != scheduler.last_epoch


def test_a_gradient_scaler_is_restored(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    scaler, live = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1)).sum())
    scaler.update(512.0)
    path = saved(tmp_path, {"model": model, "scaler": scaler})
    mp.load(path, {"model": model, "scaler": live})
    assert live.state_dict() == scaler.state_dict()
    assert live.get_scale() == 512.0


class Colour(enum.Enum):
    RED = 1


@pytest.mark.case("V31")
def test_every_leaf_of_a_plain_value_is_updated_whatever_its_type(tmp_path: Path) -> None:
    saved_value = {"w": torch.ones(3), "step": 37, "name": "y", "lst": [3, 4], "none": 5, "f": 1.5}
    live = {"w": torch.zeros(3), "step": 0, "name": "x", "lst": [0], "none": None, "f": 0.0}
    tensor, container = live["w"], live
    path = saved(tmp_path, {"value": saved_value})
    mp.load(path, {"value": live})
    assert live is container and live["w"] is tensor
    assert same(live, saved_value)
    empty: dict[str, Any] = {}
    mp.load(path, {"value": empty})
    assert same(empty, saved_value)
    assert same(opened(path).training_state()["value"], saved_value)


@pytest.mark.case("V09")
@pytest.mark.case("C3.15")
def test_python_values_keep_their_types(tmp_path: Path) -> None:
    value: dict[Any, Any] = {
        "tuple": (1, (2, [3])),
        7: "an integer key",
        (1, "a"): "a tuple key",
        "bytes": b"\x00\xff",
        "inf": float("inf"),
        "nan": float("nan"),
        "path": PurePosixPath("/a/b"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "numpy": np.arange(4, dtype=np.uint16),
        "scalar": np.float64(0.1),
        "ordered": OrderedDict(b=1, a=2),
        "set": {1, 2},
        "big": 2**100,
        "text": "naïve \N{SNOWMAN}",
        "bool": True,
        "none": None,
    }
    path = saved(tmp_path, {"value": copy.deepcopy(value)})
    got: dict[Any, Any] = {}
    mp.load(path, {"value": got})
    assert same(got, value)
    assert list(got["ordered"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "live", "message"),
    [
        (3, 0, r"is a int and was saved as a int, .* save and load it in a dict"),
        ({"a": 1}, [], r"is a list and was saved as a dict"),
        ([1], {}, r"is a dict and was saved as a list"),
        (torch.zeros(5), torch.zeros(6), r"torch\.float32 \(5,\), the live tensor is .* \(6,\)"),
        (torch.zeros(5), torch.zeros(5).half(), r"the live tensor is torch\.float16"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_filled_in_place_is_refused_before_anything_is_touched(
    value: Any, live: Any, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {**training(), "extra": value})
    state = {**training(seed=1), "extra": live}
    before = snapshot(state)
    with pytest.raises(InvalidInputError, match=rf"state\['extra'\]:? {message}|{message}"):
        mp.load(path, state)
    assert same(snapshot(state), before)


def test_a_tensor_is_a_value_too(tmp_path: Path) -> None:
    path = saved(tmp_path, {"biases": torch.arange(5)})
    live = torch.zeros(5, dtype=torch.int64)
    mp.load(path, {"biases": live})
    assert live.tolist() == [0, 1, 2, 3, 4]


def test_training_goes_on_from_any_of_these(tmp_path: Path) -> None:
    state = training(steps=3)
    live = training(seed=9)
    mp.load(saved(tmp_path, state), live)
    torch.manual_seed(1)
    expected = train(state, 3)
    torch.manual_seed(1)
    assert train(live, 3) == expected
