from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from milepost.errors import InvalidInputError
from milepost.state.model import capture_model, parameter_names
from milepost.state.model_plan import restore_model
from milepost.state.names import canonical_names, strip_compile_prefix, unwrap
from milepost.state.optimizer import capture_optimizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)  # a real submodule of that name
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.norm(self.module(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return cast(torch.Tensor, self.head(x))


def compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


def inner_compiled(model: nn.Module) -> nn.Module:
    layers = cast(Net, model).layers
    layers[0] = compiled(layers[0])
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    layers = cast(Net, model).layers
    for index in range(len(layers)):
        layers[index] = checkpoint_wrapper(layers[index])
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def fully_sharded_1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "DDP": DistributedDataParallel,
    "DDP of compiled": lambda m: DistributedDataParallel(compiled(m)),
    "compiled DDP": lambda m: compiled(DistributedDataParallel(m)),
    "one layer compiled": inner_compiled,
    "checkpoint-wrapped": checkpointed,
    "everything": lambda m: compiled(DistributedDataParallel(inner_compiled(checkpointed(m)))),
    "DataParallel": nn.DataParallel,
    "FSDP1 on one process": fully_sharded_1,
}


@pytest.mark.case("V61")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_wrapping_has_the_names_of_the_plain_model(wrapping: str) -> None:
    model = WRAPPINGS[wrapping](Net())
    assert list(canonical_names(model)) == list(Net().state_dict())


@pytest.mark.case("V61")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("source", WRAPPINGS)
def test_what_one_wrapping_saved_every_other_loads(source: str) -> None:
    saved = capture_model(WRAPPINGS[source](Net()))
    for name, wrap in WRAPPINGS.items():
        plain = Net()
        report = restore_model(wrap(plain), saved.leaves)
        assert report.filled == len(saved.leaves), name
        for leaf, value in capture_model(plain).leaves.items():
            assert torch.equal(value, saved.leaves[leaf]), (name, leaf)


@pytest.mark.case("V61")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_optimizer_state_has_the_same_names_under_every_wrapping(wrapping: str) -> None:
    plain = Net()
    model = WRAPPINGS[wrapping](plain)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = capture_optimizer(optimizer, parameter_names({"m": model}, primary="m"), key="opt")
    assert state.record.groups[0].params == tuple(name for name, _ in Net().named_parameters())
    assert "layers.0.module.weight.exp_avg" in state.tensors


def test_runtime_names_are_those_of_the_wrapped_state_dict() -> None:
    model = compiled(inner_compiled(Net()))
    assert list(canonical_names(model).values()) == list(model.state_dict())


def test_a_real_submodule_with_a_wrappers_name_keeps_it() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2, bias=False)
    model._orig_mod = nn.Linear(2, 2, bias=False)
    model._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)
    names = list(canonical_names(compiled(model)))
    assert names == ["module.weight", "_orig_mod.weight", "_checkpoint_wrapped_module.weight"]


def test_unwrap_gives_the_innermost_user_module() -> None:
    plain = Net()
    assert unwrap(checkpoint_wrapper(compiled(checkpoint_wrapper(plain)))) is plain
    assert unwrap(plain) is plain


def test_two_tensors_of_one_canonical_name_are_refused_naming_both() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    for function in (canonical_names, capture_model):
        with pytest.raises(InvalidInputError) as caught:
            function([first, compiled(second)])
        assert str(caught.value) == (
            "[0].weight and [1]._orig_mod.weight both become weight once wrappers are taken off; "
            "rename one of the modules"
        )


@pytest.mark.usefixtures("process_group")
def test_flattened_parameters_are_refused_with_what_to_use_instead() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(InvalidInputError, match=r"FSDP1 .* flattened .* fully_shard \(FSDP2\)"):
        capture_model(nn.Sequential(model))


def test_a_list_of_modules_with_separate_names_is_one_model() -> None:
    stages = [nn.Sequential(OrderedDict(a=nn.Linear(2, 2))), nn.Sequential(OrderedDict(b=Block()))]
    assert list(capture_model(stages).leaves)[:3] == ["a.weight", "a.bias", "b.module.weight"]


@pytest.mark.case("C7.32")
def test_compile_segments_are_stripped_anywhere_and_module_never() -> None:
    state = {"_orig_mod.a": 1, "layers.0._orig_mod.b": 2, "module._orig_mod.c": 3, "x_orig_mod": 4}
    assert strip_compile_prefix(state) == {
        "a": 1,
        "layers.0.b": 2,
        "module.c": 3,
        "x_orig_mod": 4,
    }


@pytest.mark.case("C7.32")
def test_names_that_collide_once_stripped_are_refused_naming_both() -> None:
    with pytest.raises(InvalidInputError, match=r"_orig_mod\.a and a both become a"):
        strip_compile_prefix({"_orig_mod.a": 1, "a": 2})


@pytest.mark.case("C7.32")
def test_stripping_keeps_the_type_and_the_module_versions() -> None:
    state = compiled(Block()).state_dict()
    stripped = strip_compile_prefix(state)
    plain = Block().state_dict()
    assert type(stripped) is OrderedDict
    assert list(stripped) == list(plain)
    assert dict(cast(Any, stripped)._metadata) == dict(cast(Any, plain)._metadata)
    assert cast(Any, stripped)._metadata["norm"] == {"version": 2}
