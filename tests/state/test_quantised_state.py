"""Tensor subclasses in optimizer state: stored as their parts, rebuilt as what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import milepost as mp
from milepost.errors import FormatError, InvalidInputError, MismatchError, UnencodableError
from milepost.state.optimizer_record import Form, OptimizerRecord
from milepost.state.wrappers import class_by_name
from tests.state.optimizers import capture, restore
from tests.state.quantised import Codes, Packed, QuantisedAdam, parts_of


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 5))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(data).pow(2).mean().backward()
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {slot: parts_of(value) for slot, value in slots.items()}
        for slots in optimizer.state.values()
    ]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {s: list(parts) for s, parts in one.items()} == {
            s: list(parts) for s, parts in other.items()
        }
        for slot, parts in one.items():
            for part, tensor in parts.items():
                assert tensor.dtype == other[slot][part].dtype
                assert torch.equal(tensor, other[slot][part]), (slot, part)


@pytest.mark.case("V37")
def test_a_quantised_optimizer_goes_on_bit_for_bit_through_files(tmp_path: Path) -> None:
    net, other = model(), model(7)
    optimizer, resumed = QuantisedAdam(net.parameters()), QuantisedAdam(other.parameters())
    train(net, optimizer, range(3))
    mp.save(tmp_path / "checkpoint-3", {"model": net, "optimizer": optimizer}, step=3)
    report = mp.load(tmp_path / "checkpoint-3", {"model": other, "optimizer": resumed})
    assert report.level is mp.Level.EXACT
    slots = resumed.state[other[0].weight]
    assert type(slots["exp_avg"]) is Codes and type(slots["exp_avg_sq"]) is Packed
    assert type(resumed.state[other[1].bias]["exp_avg"]) is Tensor
    assert_equal(state_of(resumed), state_of(optimizer))
    for each in ((net, optimizer), (other, resumed)):
        train(*each, range(3, 6))
    assert_equal(state_of(resumed), state_of(optimizer))
    assert torch.equal(net[0].weight, other[0].weight)


@pytest.mark.case("V37")
def test_parts_are_stored_as_slots_of_their_own_and_the_class_by_its_registered_name() -> None:
    net = model()
    optimizer = QuantisedAdam(net.parameters())
    train(net, optimizer, range(1))
    state = capture(net, optimizer)
    shapes = {n: tuple(t.shape) for n, t in state.tensors.items() if n.startswith("0.weight")}
    assert shapes == {
        "0.weight.exp_avg%2Ecodes": (24, 32),
        "0.weight.exp_avg%2Escale": (24, 2),
        "0.weight.exp_avg%2Etable": (255,),
        "0.weight.exp_avg_sq%2Ecodes": (24, 16),
        "0.weight.exp_avg_sq%2Escale": (24, 2),
        "0.weight.exp_avg_sq%2Etable": (16,),
    }
    forms = state.record.to_tree()["forms"]
    assert [form["class"] for form in forms] == ["tests.Codes", "tests.Packed"]
    assert forms[0]["attributes"] == {"dtype": torch.float32} and forms[0]["runs"] == {"scale": 16}
    assert forms[1]["attributes"] == {"signed": True}
    assert forms[1]["runs"] == {"codes": 2, "scale": 16}
    assert forms[0]["tensors"] == ["0.weight.exp_avg"]
    assert OptimizerRecord.from_tree(state.record.to_tree(), where="x") == state.record


def test_live_parts_are_filled_in_place_and_the_live_object_stays() -> None:
    net, other = model(), model(7)
    optimizer, resumed = QuantisedAdam(net.parameters()), QuantisedAdam(other.parameters())
    train(net, optimizer, range(2))
    train(other, resumed, range(5, 6))
    live = resumed.state[other[0].weight]["exp_avg"]
    address = live.codes.data_ptr()
    restore(capture(net, optimizer), other, resumed)
    assert resumed.state[other[0].weight]["exp_avg"] is live
    assert live.codes.data_ptr() == address
    assert torch.equal(live.codes, optimizer.state[net[0].weight]["exp_avg"].codes)


class Unknown(Codes):
    pass


@pytest.mark.case("V37")
def test_a_subclass_that_is_not_registered_is_refused_before_a_file_exists(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    weight = net[0].weight
    optimizer.state[weight] = {"exp_avg": Unknown.zeros(weight.detach())}
    with pytest.raises(UnencodableError, match=r"0\.weight\.exp_avg: a tensor of class .*Unknown"):
        mp.save(tmp_path / "checkpoint-1", {"model": net, "optimizer": optimizer}, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("V37")
def test_codes_scales_a_number_a_table_and_a_subclass_stand_beside_each_other(
    tmp_path: Path,
) -> None:
    net, other = model(), model(7)
    weight = net[0].weight
    optimizer, resumed = (torch.optim.SGD(m.parameters()) for m in (net, other))
    wrapped = Codes.zeros(weight.detach())
    wrapped.quantise(torch.randn(weight.shape))
    entry = {
        "state1": torch.randint(0, 255, weight.shape, dtype=torch.uint8),
        "absmax1": torch.rand(3),
        "qmap1": torch.linspace(-1, 1, 256),
        "step": 12,
        "wrapped": wrapped,
    }
    optimizer.state[weight] = dict(entry)
    mp.save(tmp_path / "checkpoint-1", {"model": net, "optimizer": optimizer}, step=1)
    mp.load(tmp_path / "checkpoint-1", {"model": other, "optimizer": resumed})
    found = resumed.state[other[0].weight]
    assert set(found) == set(entry) and found["step"] == 12
    for slot in ("state1", "absmax1", "qmap1", "wrapped"):
        value = entry[slot]
        assert isinstance(value, Tensor)
        for part, tensor in parts_of(value).items():
            assert torch.equal(parts_of(found[slot])[part], tensor), (slot, part)


def test_a_class_that_this_program_does_not_know_is_named() -> None:
    net, other = model(), model(7)
    optimizer, resumed = QuantisedAdam(net.parameters()), QuantisedAdam(other.parameters())
    train(net, optimizer, range(1))
    state = capture(net, optimizer)
    for name, form in state.record.wrapped.items():
        state.record.wrapped[name] = Form(
            class_name="elsewhere.State",
            attributes=form.attributes,
            dtypes=form.dtypes,
            runs=form.runs,
        )
    with pytest.raises(MismatchError, match=r"stored as elsewhere\.State, which is not known here"):
        restore(state, other, resumed)


@pytest.mark.spec("v1#optim-5")
def test_a_known_class_of_a_module_that_is_not_imported_is_never_imported() -> None:
    with pytest.raises(MismatchError, match=r"import torchao\.optim\.subclass_8bit before loading"):
        class_by_name("torchao.OptimState8bit", key="optimizer: w.exp_avg")


def test_a_part_that_is_missing_or_of_another_shape_is_named() -> None:
    net, other = model(), model(7)
    optimizer, resumed = QuantisedAdam(net.parameters()), QuantisedAdam(other.parameters())
    train(net, optimizer, range(1))
    state = capture(net, optimizer)
    scale = state.tensors.pop("0.weight.exp_avg%2Escale")
    with pytest.raises(FormatError, match=r"0\.weight\.exp_avg%2Escale is not"):
        restore(state, other, resumed)
    state.tensors["0.weight.exp_avg%2Escale"] = scale[:5]
    with pytest.raises(MismatchError, match=r"stored with shape \(5, 2\).*it is \(24, 2\)"):
        restore(state, other, resumed)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (
            {"runs": {"scale": 0}},
            r"forms\[0\]\.runs\.scale: expected a number of elements",
        ),
        ({"shape": [0]}, r"forms\[0\]\.shape: expected a number of elements"),
        ({"cut": [[2, 0]]}, r"forms\[0\]\.cut\[0\]: expected three numbers"),
        ({"class": 1}, r"forms\[0\]\.class: expected a str"),
        ({"tensors": [1]}, r"forms\[0\]\.tensors\[0\]: expected a str"),
    ],
)
def test_a_malformed_form_is_refused_naming_the_place(change: dict[str, Any], place: str) -> None:
    net = model()
    optimizer = QuantisedAdam(net.parameters())
    train(net, optimizer, range(1))
    tree = capture(net, optimizer).record.to_tree()
    tree["forms"][0] |= change
    with pytest.raises(FormatError, match=place):
        OptimizerRecord.from_tree(tree, where="state")


def test_what_cannot_be_registered_says_why() -> None:
    parts = {"codes": mp.PartRole.ELEMENTS}
    with pytest.raises(InvalidInputError, match="expected a class with __tensor_flatten__"):
        mp.register_tensor_class(Tensor, name="x", parts=parts)
    with pytest.raises(InvalidInputError, match=r"'tests\.Codes' is .*Codes"):
        mp.register_tensor_class(Unknown, name="tests.Codes", parts=parts)
    with pytest.raises(InvalidInputError, match=r"the part 'a\.b' is no identifier"):
        mp.register_tensor_class(Unknown, name="y", parts={"a.b": mp.PartRole.TABLE})


@pytest.mark.case("V37")
@pytest.mark.parametrize("width", [32, 25], ids=["rows of blocks", "blocks across rows"])
def test_a_directory_gives_the_subclass_to_stock_optimizers(width: int, tmp_path: Path) -> None:
    net = nn.Linear(width, 16)
    optimizer = QuantisedAdam(net.parameters())
    net(torch.ones(2, width)).pow(2).sum().backward()
    optimizer.step()
    mp.save(tmp_path / "checkpoint-1", {"model": net, "optimizer": optimizer}, step=1)
    state = mp.load_checkpoint(tmp_path / "checkpoint-1")["optimizer"]
    for slot, value in optimizer.state[net.weight].items():
        found = state["state"][0][slot]
        assert type(found) is type(value) and found.shape == value.shape
        for part, tensor in parts_of(value).items():
            assert torch.equal(parts_of(found)[part], tensor), (slot, part)


def test_runs_of_unequal_length_are_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    value = Codes.zeros(net[0].weight.detach())
    value.scale = torch.zeros(7)
    optimizer.state[net[0].weight] = {"exp_avg": value}
    with pytest.raises(UnencodableError, match=r"scale of tests\.Codes has shape \(7,\)"):
        capture(net, optimizer)
