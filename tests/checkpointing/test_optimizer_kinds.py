"""Optimizers saved and loaded with their models: several at once, by name, in their own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from tests.states import TinyLM, same, snapshot


def saved(tmp_path: Path, state: dict[str, Any], **arguments: Any) -> Path:
    path = tmp_path / "checkpoint-1"
    mp.save(path, state, step=1, **arguments)
    return path


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *shape: int) -> None:
    optimizer.zero_grad()
    model(torch.ones(shape)).sum().backward()
    optimizer.step()


def two_optimizers(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = TinyLM(tied=False)
    embedding = torch.optim.SGD(model.embedding.parameters(), lr=0.1, momentum=0.9)
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if "embedding" not in n])
    return {"model": model, "embedding": embedding, "rest": rest}


@pytest.mark.parametrize("shape", ["entries", "list", "dict"])
def test_several_optimizers_are_restored_each_by_itself(shape: str, tmp_path: Path) -> None:
    def arranged(seed: int) -> tuple[dict[str, Any], list[torch.optim.Optimizer]]:
        state = two_optimizers(seed)
        first, second = state.pop("embedding"), state.pop("rest")
        if shape == "list":
            state["optimizers"] = [first, second]
        elif shape == "dict":
            state["optimizers"] = {"embedding": first, "rest": second}
        else:
            state |= {"embedding": first, "rest": second}
        return state, [first, second]

    state, optimizers = arranged(0)
    ids = torch.arange(6).view(2, 3)
    nn.functional.cross_entropy(state["model"](ids).flatten(0, 1), ids.flatten()).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
    path = saved(tmp_path, state)
    live, others = arranged(7)
    report = mp.load(path, live)
    assert report.level is mp.Level.EXACT
    assert len(report.optimizers) == 2
    for optimizer, other in zip(optimizers, others, strict=True):
        assert same(optimizer.state_dict(), other.state_dict())


@pytest.mark.case("V33")
def test_moments_follow_names_whatever_the_order_of_groups(tmp_path: Path) -> None:
    def build(*, reversed_groups: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        decay = [p for p in model.parameters() if p.dim() == 2]
        plain = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": 0.5, "name": "decay"},
            {"params": plain, "weight_decay": 0.0, "name": "plain"},
        ]
        if reversed_groups:
            groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    state, live = build(reversed_groups=False), build(reversed_groups=True)
    step(state["model"], state["optimizer"], 1, 4)
    mp.load(saved(tmp_path, state), live)
    for parameter, other in zip(
        state["model"].parameters(), live["model"].parameters(), strict=True
    ):
        assert same(state["optimizer"].state[parameter], live["optimizer"].state[other])
    assert [g["weight_decay"] for g in live["optimizer"].param_groups] == [0.0, 0.5]
    for each in (state, live):
        step(each["model"], each["optimizer"], 1, 4)
    assert same(state["model"].state_dict(), live["model"].state_dict())


@pytest.mark.case("V34")
def test_moments_keep_their_own_type_through_save_and_load(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), amsgrad=True)}

    state, live = build(), build()
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full(parameter.shape, 1 + 2**-12),
            "exp_avg_sq": torch.full(parameter.shape, 2 + 2**-12, dtype=torch.float64),
            "max_exp_avg_sq": torch.full(parameter.shape, 3.0, dtype=torch.float16),
        }
    mp.load(saved(tmp_path, state), live)
    assert same(live["optimizer"].state_dict(), state["optimizer"].state_dict())
    for slots in live["optimizer"].state.values():
        assert slots["exp_avg"].dtype is torch.float32
        assert slots["exp_avg"].flatten()[0].item() == 1 + 2**-12


@pytest.mark.case("V36")
def test_experts_without_a_gradient_a_frozen_one_and_an_empty_one_resume(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        experts.register_parameter("dummy", nn.Parameter(torch.empty(0)))
        return {"model": experts, "optimizer": torch.optim.Adam(experts.parameters(), lr=0.1)}

    def route(state: dict[str, Any], *which: int) -> None:
        state["optimizer"].zero_grad()
        torch.stack([state["model"][i](torch.ones(2)).sum() for i in which]).sum().backward()  # type: ignore[no-untyped-call]
        state["optimizer"].step()

    state, live = build(), build()
    route(state, 0, 1, 2)
    route(state, 0, 1, 2)
    for each in (state, live):
        each["model"][2].weight.requires_grad_(False)
    route(state, 0, 1)
    report = mp.load(saved(tmp_path, state), live)
    assert report.level is mp.Level.EXACT
    assert same(live["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert live["model"][3].weight not in live["optimizer"].state
    route(state, 0, 3)
    route(live, 0, 3)
    assert same(snapshot(live), snapshot(state))
    assert live["optimizer"].state[live["model"][3].weight]["step"] == 1
