"""The oracle is a run that never stopped: after a restore, every bit of the continuation agrees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch import Tensor, nn

from milepost.format import strictjson
from milepost.format.tree import decode, encode
from milepost.state.model import capture_model, parameter_names
from milepost.state.model_plan import restore_model
from milepost.state.optimizer import capture_optimizer
from milepost.state.optimizer_plan import plan_restore_optimizer
from milepost.state.optimizer_record import OptimizerRecord
from milepost.state.tensors import same_bits, stored_dtype, stored_shape
from milepost.state.tree_torch import MappingSource, StateTensors

Make: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def hf_adafactor(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return cast(torch.optim.Optimizer, Adafactor(params, relative_step=True, warmup_init=True))


def lr_tensor() -> Tensor:
    return torch.tensor(1e-2)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, lr=lr_tensor(), foreach=False),
    "AdamW fused lr tensor": lambda p: torch.optim.AdamW(p, lr=lr_tensor(), fused=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=1e-2, maximize=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers Adafactor": hf_adafactor,
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2]),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))  # 0-d
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))

        def closure(data: Tensor = data) -> Tensor:
            optimizer.zero_grad()
            loss: Any = (model(data) * cast(Any, model).scale).pow(2).mean()
            loss.backward()
            return cast(Tensor, loss)

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            closure()
            optimizer.step()


def through_files(tree: Any) -> Any:
    sink = StateTensors()
    raw = strictjson.dumps(encode(tree, sink))
    tensors = {name: tensor.clone() for name, tensor in sink.tensors.items()}
    return decode(strictjson.loads(raw, "state.json"), MappingSource(tensors), where="state.json")


def restore(
    source: tuple[nn.Module, torch.optim.Optimizer], target: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """What a save and a load do, without the disk."""
    model = capture_model(source[0])
    state = capture_optimizer(source[1], parameter_names({"m": source[0]}, primary="m"), key="opt")
    tensors = {name: value.clone() for name, value in state.tensors.items()}
    record = OptimizerRecord.from_tree(through_files(state.record.to_tree()), where="state")
    assert equal(record.to_tree(), state.record.to_tree())
    restore_model(target[0], model.leaves)
    plan = plan_restore_optimizer(
        target[1],
        parameter_names({"m": target[0]}, primary="m"),
        record,
        {name: (stored_dtype(t), stored_shape(t)) for name, t in tensors.items()},
        key="opt",
    )
    plan.fill(tensors)
    report = plan.apply()
    assert report.missing == report.unexpected == report.new_groups == report.implementation == ()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b) and a.device == b.device
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.case("V34")
@pytest.mark.case("V38")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_run_equals_one_that_never_stopped_in_every_bit(name: str) -> None:
    whole, stopped, resumed = net(), net(), net()
    make = OPTIMIZERS[name]
    optimizers = [make(model.parameters()) for model in (whole, stopped, resumed)]
    train(whole, optimizers[0], range(3))
    train(stopped, optimizers[1], range(3))
    restore((stopped, optimizers[1]), (resumed, optimizers[2]))
    assert equal(optimizers[1].state_dict(), optimizers[2].state_dict())
    train(whole, optimizers[0], range(3, 6))
    train(resumed, optimizers[2], range(3, 6))
    assert equal(whole.state_dict(), resumed.state_dict())
    assert equal(optimizers[0].state_dict(), optimizers[2].state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restore_also_overwrites_an_optimizer_that_has_moved_on(name: str) -> None:
    whole, other = net(), net()
    make = OPTIMIZERS[name]
    optimizers = [make(model.parameters()) for model in (whole, other)]
    train(whole, optimizers[0], range(2))
    train(other, optimizers[1], range(5, 9))
    restore((whole, optimizers[0]), (other, optimizers[1]))
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    train(whole, optimizers[0], range(2, 4))
    train(other, optimizers[1], range(2, 4))
    assert equal(whole.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_capturing_changes_nothing_and_initialises_nothing(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    capture_optimizer(optimizer, parameter_names({"m": model}, primary="m"), key="opt")
    assert equal(optimizer.state_dict(), before)
    fresh = net()
    restore((model, optimizer), (fresh, OPTIMIZERS[name](fresh.parameters())))


@pytest.mark.case("V34")
def test_moments_keep_their_own_dtype_through_a_restore_and_the_next_update_agrees() -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        model.high = nn.Parameter(torch.ones(4))
        return model, torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()

    source, target = pair(), pair()
    step(*source)
    low, high = source[0].parameters()
    for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        source[1].state[low][slot] = torch.full((4,), 1 + 2**-12)
        source[1].state[high][slot] = torch.full((4,), 1.5, dtype=torch.bfloat16)
    restore(source, target)
    state = target[1].state
    for mine, theirs in zip(target[0].parameters(), source[0].parameters(), strict=True):
        assert equal(dict(state[mine]), dict(source[1].state[theirs]))
        assert state[mine]["step"].device.type == "cpu"
    assert state[next(target[0].parameters())]["exp_avg"].dtype is torch.float32


@pytest.mark.usefixtures("process_group")
def test_fully_sharded_moments_come_back_as_dtensors() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def pair() -> tuple[Any, torch.optim.Optimizer]:
        model = net()
        del model._parameters["scale"]  # fully_shard takes no 0-d parameter
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    source, target = pair(), pair()
    step(*source, seed=0)
    restore(source, target)
    step(*source, seed=1)
    step(*target, seed=1)
    for mine, theirs in zip(target[0].parameters(), source[0].parameters(), strict=True):
        moment = target[1].state[mine]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.placements == mine.placements
        assert torch.equal(moment.full_tensor(), source[1].state[theirs]["exp_avg"].full_tensor())
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
