"""Optimizer state of every kind on ranks: exact on the same mesh, equal moments on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import milepost as mp
from tests.parallel.models import (
    DDP2,
    FSDP2,
    FSDP4,
    FSDP_TP,
    ONE,
    TP2,
    VOCABULARY,
    Shape,
    build,
    data_rank,
    whole,
)
from tests.state.quantised import QuantisedAdam, parts_of
from tests.worlds import run_world

STEPS = 2


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim != 2]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": vectors(model), "weight_decay": 0.0, "name": "plain", "tag": [1, "x"]},
        {"params": matrices(model), "weight_decay": 0.1, "name": "decay", "initial_lr": 0.5},
    ]


def muon(model: nn.Module) -> dict[str, Any]:
    return {
        "matrices": torch.optim.Muon(matrices(model), lr=1e-2),
        "vectors": torch.optim.AdamW(vectors(model), lr=1e-2),
    }


ON_SHARDS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "lr-tensor": lambda m: torch.optim.AdamW(
        m.parameters(), lr=torch.tensor(1e-2), fused=False, foreach=False
    ),
    "groups": lambda m: torch.optim.AdamW(groups(m), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "muon": muon,
    "one-each": lambda m: [torch.optim.SGD([p], 1e-2, momentum=0.9) for p in matrices(m)],
    "quantised": lambda m: QuantisedAdam(m.parameters()),
}


def hf_adafactor(model: nn.Module) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=1e-3, relative_step=False)


ON_REPLICAS: dict[str, Callable[[nn.Module], Any]] = {
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "hf-adafactor": hf_adafactor,
}


def inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, dict):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, list) else [optimizer]


def train(model: nn.Module, optimizer: Any, shape: Shape, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * data_rank(shape) + step)
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
        torch.manual_seed(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for each in inner(optimizer):
            each.step()
            each.zero_grad(set_to_none=True)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in model.named_parameters():
        yield name.removeprefix("module."), param


def own_values(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that this rank holds of weights and state, and the groups."""
    found: dict[str, Any] = {}
    for name, param in named(model):
        found[name] = parts_of(param)
        for each in inner(optimizer):
            for slot, value in each.state.get(param, {}).items():
                is_tensor = isinstance(value, Tensor)
                found[f"{name}.{slot}"] = parts_of(value) if is_tensor else value
    for number, each in enumerate(inner(optimizer)):
        for group in each.param_groups:
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            label = f"{number} {hyper.get('name', '')}"
            found[label] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in hyper.items()}
    return found


def global_values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights and moments whole, by torch's own gather; quantised state is left out."""
    found = {}
    for name, param in named(model):
        found[name] = whole(param)
        for each in inner(optimizer):
            for slot, value in each.state.get(param, {}).items():
                if isinstance(value, Tensor) and list(parts_of(value)) == [""]:
                    found[f"{name}.{slot}"] = whole(value)
    return found


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            return [f"{at}: {sorted(found.keys() ^ expected.keys())}"]
        return [d for k, v in expected.items() for d in differences(found[k], v, f"{at} {k}")]
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape
        return [] if same and torch.equal(found, expected) else [at]
    return [] if type(found) is type(expected) and found == expected else [at]


def stop_and_go_on(rank: int, size: int, shape: Shape, run: Path, names: list[str]) -> list[str]:
    """What differs between runs that never stopped and runs that were saved and resumed."""
    problems = []
    for name in names:
        make = (ON_SHARDS | ON_REPLICAS)[name]
        model = build(shape)
        optimizer = make(model)
        path = run / name / f"checkpoint-{STEPS}"
        train(model, optimizer, shape, range(STEPS))
        saved = own_values(model, optimizer)
        mp.save(path, {"model": model, "optimizer": optimizer}, step=STEPS)
        problems += differences(own_values(model, optimizer), saved, f"{name}: saving changed")
        other = build(shape, seed=7)
        resumed = make(other)
        train(other, resumed, shape, range(5, 6))
        report = mp.load(path, {"model": other, "optimizer": resumed})
        problems += [f"{name}: {line}" for line in report.differences]
        problems += [f"{name}: {report.level}"] if report.level is not mp.Level.EXACT else []
        problems += differences(own_values(other, resumed), saved, f"{name}: loading changed")
        for each, own in ((model, optimizer), (other, resumed)):
            train(each, own, shape, range(STEPS, 2 * STEPS))
        end = own_values(model, optimizer)
        problems += differences(own_values(other, resumed), end, f"{name}: going on differs")
    return problems


@pytest.mark.case("V34")
@pytest.mark.case("V38")
@pytest.mark.parametrize("shape", [ONE, FSDP2, FSDP_TP], ids=str)
def test_every_optimizer_goes_on_bit_for_bit(shape: Shape, tmp_path: Path) -> None:
    found = run_world(shape.world_size, stop_and_go_on, shape, tmp_path, list(ON_SHARDS))
    assert found == [[]] * shape.world_size


@pytest.mark.parametrize("shape", [ONE, DDP2], ids=str)
def test_factored_state_goes_on_bit_for_bit_in_one_process_and_on_replicas(
    shape: Shape, tmp_path: Path
) -> None:
    found = run_world(shape.world_size, stop_and_go_on, shape, tmp_path, [*ON_REPLICAS, "fused"])
    assert found == [[]] * shape.world_size


MOVED = [name for name in ON_SHARDS if name != "quantised"]


def save_all(rank: int, size: int, shape: Shape, run: Path) -> list[dict[str, Tensor]]:
    found = []
    for name in MOVED:
        model = build(shape)
        optimizer = ON_SHARDS[name](model)
        train(model, optimizer, shape, range(STEPS))
        mp.save(run / name / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)
        found.append(global_values(model, optimizer))
    return found


def load_and_save_all(
    rank: int, size: int, shape: Shape, run: Path, step: int
) -> list[dict[str, Tensor]]:
    found = []
    for name in MOVED:
        model = build(shape, seed=3)
        state = {"model": model, "optimizer": ON_SHARDS[name](model)}
        report = mp.load(run / name / f"checkpoint-{step}", state)
        assert report.level is mp.Level.RESHARDED, report.lines()
        mp.save(run / name / f"checkpoint-{step + 1}", state, step=step + 1)
        found.append(global_values(model, state["optimizer"]))
    return found


def test_moments_are_equal_on_four_shards_on_two_slices_and_in_one_process(
    tmp_path: Path,
) -> None:
    first = run_world(4, save_all, FSDP4, tmp_path)[0]
    second = run_world(2, load_and_save_all, TP2, tmp_path, 1)[1]
    third = run_world(1, load_and_save_all, ONE, tmp_path, 2)[0]
    for name, one, two, three in zip(MOVED, first, second, third, strict=True):
        assert differences(two, one, name) == []
        assert differences(three, one, name) == []
