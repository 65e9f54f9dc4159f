"""Moments follow names, hyper-parameters follow groups, and whatever does not fit is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from milepost.errors import (
    FormatError,
    InvalidInputError,
    KeyMismatchError,
    MismatchError,
    ShapeMismatchError,
)
from milepost.state.model import parameter_names
from milepost.state.optimizer import capture_optimizer
from milepost.state.optimizer_plan import plan_restore_optimizer
from milepost.state.policies import ClassPolicy, Missing, Unexpected
from tests.state.optimizers import capture, net, restore, step


def two_groups(model: Any, **options: Any) -> list[dict[str, Any]]:
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    return [
        {"params": weights, "weight_decay": 0.1, **options},
        {"params": biases, "weight_decay": 0.0, **options},
    ]


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: optimizer.state[p]["exp_avg"].clone()
        for name, p in model.named_parameters()
        if optimizer.state.get(p)
    }


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.case("V33")
@pytest.mark.parametrize("named", ["", "name", "group_name"])
def test_moments_follow_names_when_order_and_groups_are_others(named: str) -> None:
    source = net()
    groups = two_groups(source)
    if named:
        groups[0][named], groups[1][named] = "decay", "no_decay"
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    step(optimizer)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.25

    target = net(("c", "a", "frozen", "b"))
    target.frozen.requires_grad_(requires_grad=False)
    live = list(reversed(two_groups(target)))
    fresh = nn.Parameter(torch.zeros(4, 4))
    target.register_parameter("fresh", fresh)
    live.insert(1, {"params": [fresh], "weight_decay": 0.7})
    if named:
        live[0][named], live[1][named], live[2][named] = "no_decay", "new", "decay"
    other = torch.optim.AdamW(live, lr=1e-1)
    report = restore(capture(source, optimizer), target, other, missing=Missing.KEEP)

    assert_equal(moments(target, other), moments(source, optimizer))
    decays = [(group["weight_decay"], group["lr"]) for group in other.param_groups]
    assert decays == [(0.0, 0.25), (0.7, 0.1), (0.1, 0.5)]
    assert report.missing == ("fresh",) and report.filled == 6
    assert report.new_groups == (("group 'new'",) if named else ("group 1",))


@pytest.mark.case("V33")
def test_names_that_do_not_match_are_listed_and_nothing_is_touched() -> None:
    source, target = net(), net(("a", "b", "d"))
    optimizer = torch.optim.AdamW(source.parameters())
    other = torch.optim.AdamW(target.parameters(), lr=0.7)
    step(optimizer)
    step(other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(KeyMismatchError) as caught:
        restore(capture(source, optimizer), target, other)
    assert caught.value.missing == ("d.weight", "d.bias")
    assert caught.value.unexpected == ("c.weight", "c.bias")
    assert "2 missing, 2 unexpected" in str(caught.value)
    after = other.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])
    report = restore(
        capture(source, optimizer),
        target,
        other,
        missing=Missing.KEEP,
        unexpected=Unexpected.IGNORE,
    )
    assert report.unexpected == ("c.weight", "c.bias")


@pytest.mark.case("V33")
def test_a_live_group_that_joins_groups_of_different_hyper_parameters_is_refused() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(two_groups(source))
    step(optimizer)
    with pytest.raises(MismatchError) as caught:
        restore(capture(source, optimizer), target, torch.optim.AdamW(target.parameters()))
    assert str(caught.value) == (
        "optimizer: 1 live groups join parameters of saved groups with different "
        "hyper-parameters: group 0 (saved group 0 {'weight_decay': 0.1} against saved group 1 "
        "{'weight_decay': 0.0}); group the parameters as they were saved, or give the groups a "
        "'name'"
    )


def test_groups_of_equal_hyper_parameters_may_be_joined() -> None:
    source, target = net(), net()
    groups: list[dict[str, Any]] = [{"params": [p], "lr": 0.3} for p in source.parameters()]
    optimizer = torch.optim.AdamW(groups)
    step(optimizer)
    other = torch.optim.AdamW(target.parameters())
    restore(capture(source, optimizer), target, other)
    assert other.param_groups[0]["lr"] == 0.3


def test_every_hyper_parameter_comes_back_but_the_way_of_computing_stays_live() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1, betas=(0.5, 0.6), foreach=True)
    optimizer.param_groups[0].update(initial_lr=0.9, tag="x", schedule={"warm": [1, 2]})
    other = torch.optim.AdamW(target.parameters(), lr=0.2, fused=True)
    params = other.param_groups[0]["params"]
    report = restore(capture(source, optimizer), target, other)
    group = other.param_groups[0]
    assert group["params"] is params
    assert (group["lr"], group["betas"], group["initial_lr"]) == (0.1, (0.5, 0.6), 0.9)
    assert (group["tag"], group["schedule"]) == ("x", {"warm": [1, 2]})
    assert (group["foreach"], group["fused"]) == (None, True)
    assert report.implementation == (
        "group 0: foreach was True, is None",
        "group 0: fused was None, is True",
    )


def test_a_live_tensor_rate_is_filled_in_place() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.125)
    rate = torch.tensor(0.5)
    other = torch.optim.AdamW(target.parameters(), lr=rate, foreach=False)
    live = other.param_groups[0]["lr"]
    restore(capture(source, optimizer), target, other)
    assert other.param_groups[0]["lr"] is live and live.item() == 0.125


def test_a_number_reaches_a_live_double_without_being_rounded_to_single() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    rate = torch.tensor(0.5, dtype=torch.float64)
    other = torch.optim.AdamW(target.parameters(), lr=rate, foreach=False)
    restore(capture(source, optimizer), target, other)
    assert rate.item() == 0.1


def test_live_moments_that_fit_are_filled_in_place() -> None:
    source, target = net(), net()
    optimizer, other = (torch.optim.AdamW(m.parameters()) for m in (source, target))
    step(optimizer)
    step(other)
    entry = other.state[target.a.weight]
    objects = (entry, entry["exp_avg"], entry["step"])
    restore(capture(source, optimizer), target, other)
    now = other.state[target.a.weight]
    assert now is objects[0] and now["exp_avg"] is objects[1] and now["step"] is objects[2]


@pytest.mark.case("V36")
def test_absent_state_stays_absent_and_starts_fresh() -> None:
    def experts() -> Any:
        model = net(("e0", "e1", "e2", "e3"))
        model.register_parameter("dummy", nn.Parameter(torch.empty(0)))
        return model

    source, target = experts(), experts()
    optimizer = torch.optim.AdamW(source.parameters())
    for _ in range(2):
        step(optimizer, without=list(source.e3.parameters()))
    source.e1.requires_grad_(requires_grad=False)
    step(optimizer, without=list(source.e3.parameters()))
    other = torch.optim.AdamW(target.parameters())
    step(other)  # state that the saved optimizer did not have is removed
    report = restore(capture(source, optimizer), target, other)
    assert report.absent == ("e3.weight", "e3.bias")
    assert report.missing == report.unexpected == ()
    assert target.e3.weight not in other.state
    assert other.state[target.dummy]["exp_avg"].shape == (0,)
    assert [int(other.state[e.weight]["step"]) for e in (target.e0, target.e1)] == [3, 2]
    assert_equal(moments(target, other), moments(source, optimizer))
    again = experts()
    last = torch.optim.AdamW(again.parameters())
    restore(capture(target, other), again, last)
    assert_equal(moments(again, last), moments(source, optimizer))
    step(last)
    assert int(last.state[again.e3.weight]["step"]) == 1


@pytest.mark.case("V36")
def test_state_of_a_weight_that_left_the_optimizer_is_unexpected() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters())
    step(optimizer)
    other = torch.optim.AdamW([p for n, p in target.named_parameters() if n != "b.weight"])
    with pytest.raises(KeyMismatchError) as caught:
        restore(capture(source, optimizer), target, other)
    assert caught.value.unexpected == ("b.weight",)
    report = restore(capture(source, optimizer), target, other, unexpected=Unexpected.IGNORE)
    assert report.unexpected == ("b.weight",) and report.filled == 5


def test_state_of_a_weight_in_no_group_is_captured_as_ungrouped() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    del optimizer.param_groups[0]["params"][0]
    state = capture(model, optimizer)
    assert state.record.ungrouped == ("a.weight",)
    assert "a.weight.exp_avg" in state.tensors
    assert "a.weight" not in state.record.groups[0].params


def test_slots_that_were_not_stored_are_removed() -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters())
    other = torch.optim.AdamW(target.parameters(), amsgrad=True)
    step(optimizer)
    step(other)
    restore(capture(source, optimizer), target, other)
    assert set(other.state[target.a.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert other.param_groups[0]["amsgrad"] is False


def test_a_parameter_of_no_captured_model_is_refused_naming_its_place() -> None:
    model, other = net(), net()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.add_param_group({"params": [other.a.bias], "name": "critic"})
    with pytest.raises(InvalidInputError) as caught:
        capture(model, optimizer)
    assert str(caught.value) == (
        "optimizer: 1 parameters cannot be named: group 'critic' position 0 of shape (4,) "
        "belongs to no model of the state; put every model that the optimizer trains into the "
        "state, and make the optimizer from the live parameters"
    )


def test_parameters_are_matched_over_all_models_of_the_state() -> None:
    actor, critic = net(("a",)), net(("a",))
    critic.register_parameter("shared", actor.a.weight)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.a.parameters()])
    names = parameter_names({"critic": critic, "model": actor}, primary="model")
    state = capture_optimizer(optimizer, names, key="optimizer")
    assert state.record.groups[0].params == (
        "a.weight",
        "a.bias",
        "critic/a.weight",
        "critic/a.bias",
    )


def test_tied_parameters_have_the_kept_name() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    assert set(capture(model, optimizer).tensors) == {
        "embed.weight.exp_avg",
        "embed.weight.exp_avg_sq",
    }


def test_another_class_of_optimizer_is_refused_unless_allowed() -> None:
    source, target = net(), net()
    optimizer = torch.optim.Adam(source.parameters())
    step(optimizer)
    other = torch.optim.AdamW(target.parameters())
    with pytest.raises(MismatchError) as caught:
        restore(capture(source, optimizer), target, other)
    assert str(caught.value).startswith(
        "optimizer: the live optimizer is torch.optim.adamw.AdamW, the checkpoint holds state of "
        "torch.optim.adam.Adam; "
    )
    restore(capture(source, optimizer), target, other, classes=ClassPolicy.ALLOW)
    assert_equal(moments(target, other), moments(source, optimizer))


def test_a_moment_of_another_shape_than_its_parameter_is_refused() -> None:
    source, target = net(("a",)), net(("a",))
    target.a = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(source.parameters())
    step(optimizer)
    with pytest.raises(ShapeMismatchError, match=r"a\.weight\.exp_avg: .* \(6, 4\), .* \(4, 4\)"):
        restore(capture(source, optimizer), target, torch.optim.AdamW(target.parameters()))


def test_a_tensor_of_an_unrecorded_parameter_is_damage() -> None:
    model = net(("a",))
    optimizer = torch.optim.SGD(model.parameters())
    state = capture(model, optimizer)
    with pytest.raises(FormatError, match=r"x\.exp_avg is stored, but no parameter x"):
        plan_restore_optimizer(
            optimizer,
            parameter_names({"m": model}, primary="m"),
            state.record,
            {"x.exp_avg": ("F32", (4, 4))},
            key="optimizer",
        )
