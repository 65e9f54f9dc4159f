"""The typed tree with tensors: state of real training objects comes back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from milepost.errors import FormatError, MismatchError, UnencodableError
from milepost.format import strictjson
from milepost.format.tree import Reference, decode, encode
from milepost.state.tree_torch import MappingSource, StateTensors


def through_files(value: Any) -> Any:
    """Encoded, written as strict JSON and tensors, and read again."""
    sink = StateTensors()
    raw = strictjson.dumps(encode(value, sink))
    tensors = {name: tensor.clone() for name, tensor in sink.tensors.items()}
    return decode(strictjson.loads(raw, "state.json"), MappingSource(tensors), where="state.json")


def names_of(value: Any) -> list[str]:
    sink = StateTensors()
    encode(value, sink)
    return list(sink.tensors)


def optimizer() -> torch.optim.Optimizer:
    module = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": [module.weight]},
        {"params": [module.bias], "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "WarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 7]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)]
    ),
}


def advance(scheduler: Any, count: int) -> None:
    for _ in range(count):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_state_as_if_never_stopped(name: str) -> None:
    first = SCHEDULERS[name](optimizer())
    advance(first, 3)
    second = SCHEDULERS[name](optimizer())
    state = first.state_dict()
    back = through_files(state)
    assert back == state
    second.load_state_dict(back)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    advance(first, 5)
    advance(second, 5)
    rates = [[group["lr"] for group in s.optimizer.param_groups] for s in (first, second)]
    assert rates[0] == rates[1]


def test_the_state_of_a_gradient_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert through_files(scaler.state_dict()) == scaler.state_dict()


def test_a_stateful_loader_continues_from_its_state() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)

    first = loader()
    iterator = iter(first)
    next(iterator)
    back = through_files(first.state_dict())
    expected = [batch.tolist() for batch in iterator]
    second = loader()
    second.load_state_dict(back)
    assert [batch.tolist() for batch in second] == expected


def test_an_optimizer_state_comes_back_bit_by_bit() -> None:
    module = nn.Linear(3, 2)
    adam = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    adam.step()
    state = adam.state_dict()
    back = through_files(state)
    assert back["param_groups"] == state["param_groups"]
    assert list(back["state"]) == [0, 1]
    for index, slots in state["state"].items():
        for slot, tensor in slots.items():
            assert torch.equal(back["state"][index][slot], tensor)


@pytest.mark.case("V31")
def test_every_leaf_has_its_saved_value_whatever_its_type() -> None:
    state = {"w": torch.ones(3), "step": 37, "name": "y", "lst": [3, 4], "none": 5, "f": 1.5}
    back = through_files(state)
    assert torch.equal(back.pop("w"), state.pop("w"))  # type: ignore[arg-type]
    assert back == state


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_the_dtype_itself_come_back(dtype: torch.dtype) -> None:
    raw = torch.arange(32, dtype=torch.uint8)
    tensor = (raw % 2 == 0) if dtype is torch.bool else raw.view(dtype)
    back = through_files({"t": tensor, "scalar": tensor[0], "dtype": dtype})
    assert back["dtype"] is dtype
    assert back["t"].dtype is dtype and back["scalar"].shape == ()
    assert torch.equal(back["t"].view(torch.uint8), tensor.view(torch.uint8))


def test_small_words_of_torch_come_back_as_themselves() -> None:
    words = [
        torch.Size([2, 0, 3]),
        torch.device("cuda", 3),
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
        torch.__version__,
        {torch.float32: "by dtype", torch.device("cpu"): "by device"},
    ]
    back = through_files(words)
    assert back == words
    assert [type(word) for word in back] == [type(word) for word in words]


def test_tensors_are_named_by_their_key_path_and_names_are_unique() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    state = {"scheduler": {"base_lrs": [a]}, "a.b": b, "a": {"b": c}, "__metadata__": d}
    names = ["scheduler.base_lrs.0", "a.b", "a.b~2", "__metadata__~2"]
    assert names_of(state) == names
    assert names_of(torch.ones(1)) == ["value"]
    assert names_of({"\ud800": torch.ones(1)}) == ["<str 0>"]


def test_one_tensor_in_two_places_is_stored_once_and_tied_again() -> None:
    weight = torch.ones(2, 3)
    state = {"a": weight, "b": [weight], "view": weight.view(3, 2), "detached": weight.detach()}
    assert names_of(state) == ["a", "view"]
    back = through_files(state)
    assert back["a"] is back["b"][0]
    back["a"][0, 0] = 5
    assert back["detached"][0, 0] == 5


def test_empty_tensors_are_not_taken_for_one() -> None:
    back = through_files([torch.empty(0), torch.empty(0, dtype=torch.int32), torch.empty(2, 0)])
    assert [(t.dtype, t.shape) for t in back] == [
        (torch.float32, (0,)),
        (torch.int32, (0,)),
        (torch.float32, (2, 0)),
    ]


def test_tensors_are_kept_by_reference() -> None:
    tensor = torch.zeros(3)
    sink = StateTensors()
    encode({"t": tensor}, sink)
    assert sink.tensors["t"].data_ptr() == tensor.data_ptr()


def test_parameters_and_requires_grad_come_back() -> None:
    state = {
        "free": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "loss": nn.Parameter(torch.ones(2)).sum(),
    }
    state["again"] = state["free"]
    back = through_files(state)
    kinds = {name: (type(value), value.requires_grad) for name, value in back.items()}
    assert kinds == {
        "free": (nn.Parameter, True),
        "frozen": (nn.Parameter, False),
        "leaf": (torch.Tensor, True),
        "loss": (torch.Tensor, False),
        "again": (nn.Parameter, True),
    }
    assert back["again"] is back["free"]
    assert back["loss"].grad_fn is None


def test_views_are_stored_with_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    z = torch.tensor([1 + 2j])
    state = [base[:, 1], base.T, base[0].expand(5, 4), z.conj(), z.conj().imag]
    for got, want in zip(through_files(state), state, strict=True):
        assert torch.equal(got, want)


def test_arrays_come_back_with_their_dtype_and_apart_from_the_file() -> None:
    frozen = np.arange(100, dtype=">i4")
    frozen.flags.writeable = False
    state = {"frozen": frozen, "strided": np.arange(100.0)[::2], "words": np.array(["a" * 40] * 3)}
    assert names_of(state) == ["frozen", "strided", "words"]
    back = through_files(state)
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
        assert back[name].dtype == array.dtype
        assert back[name].flags.writeable


class Wrapped(torch.Tensor):
    pass


@pytest.mark.case("V09")
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.ones(2).to_sparse(), "a tensor of layout sparse_coo cannot be stored"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "a tensor of layout sparse_csr cannot"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized"),
        (lambda: torch.ones(2, device="meta"), "a meta tensor has no data"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.ones(2).as_subclass(Wrapped), "a tensor of class test_tree_torch.Wrapped"),
        (lambda: nn.UninitializedParameter(), "UninitializedParameter cannot be stored here"),
        (lambda: torch.Generator(), "save value.get_state()"),
        (lambda: nn.Linear(1, 1), "save value.state_dict()"),
        (lambda: optimizer(), "save value.state_dict()"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_with_its_key(make: Any, problem: str) -> None:
    with pytest.raises(UnencodableError) as caught:
        encode({"extra": [make()]}, StateTensors())
    assert caught.value.key == "extra.0"
    assert str(caught.value).startswith("extra.0: ")
    assert problem in str(caught.value)


def test_tensors_without_a_sink_are_refused() -> None:
    with pytest.raises(UnencodableError, match=r"^w: torch.Tensor .* need a sink"):
        encode({"w": torch.ones(1)})


def test_a_subclass_can_take_distributed_tensors() -> None:
    class Sharded(StateTensors):
        def add_tensor(self, key: str, value: torch.Tensor) -> Reference:
            if isinstance(value, Wrapped):
                return Reference("torch.tensor", {"name": f"sharded/{key}"})
            return super().add_tensor(key, value)

    data = encode({"w": torch.ones(2).as_subclass(Wrapped)}, Sharded())
    assert data == {"w": {"$type": "torch.tensor", "name": "sharded/w"}}
    assert issubclass(DTensor, torch.Tensor)


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        ({"$type": "torch.tensor", "name": "b"}, FormatError, "tensor 'b' is not stored"),
        ({"$type": "torch.tensor"}, FormatError, "the field name is missing"),
        ({"$type": "torch.tensor", "name": ["a"]}, FormatError, "expected text, found list"),
        ({"$type": "torch.tensor", "name": "a", "x": 1}, FormatError, "unknown field 'x'"),
        ({"$type": "torch.parameter", "name": "a", "requires_grad": 1}, FormatError, "be bool"),
        (
            {"$type": "torch.parameter", "name": "i", "requires_grad": True},
            FormatError,
            "'i' is torch.int32",
        ),
        ({"$type": "torch.load", "name": "a"}, FormatError, "unknown"),
        ({"$type": "torch.dtype", "name": "float3"}, MismatchError, "has no dtype 'float3'"),
        ({"$type": "torch.dtype", "name": "load"}, MismatchError, "has no dtype 'load'"),
        ({"$type": "torch.dtype", "name": "onnx"}, MismatchError, "has no dtype 'onnx'"),
        ({"$type": "torch.device", "name": "abacus:1"}, MismatchError, "no device 'abacus:1'"),
        ({"$type": "torch.Size", "lengths": ["x"]}, FormatError, "torch.Size"),
        (
            {"$type": "numpy.ndarray", "dtype": "<f8", "shape": [1], "tensor": "a"},
            FormatError,
            "the bytes of an array are uint8, 'a' is torch.float32",
        ),
    ],
)
def test_a_reference_that_cannot_be_met_is_refused(
    data: Any, error: type[Exception], problem: str
) -> None:
    source = MappingSource({"a": torch.ones(2), "i": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(error) as caught:
        decode({"place": data}, source, where="state.json")
    assert problem in str(caught.value)
