"""Rules of docs/spec/v1.md about weights' names, optimizers, the typed tree and random state."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import DamagedError, FormatError, UnencodableError
from milepost.format.header import read_header
from milepost.format.tree import decode, encode
from milepost.state.optimizer_record import split_tensor_name, tensor_name
from milepost.state.rng import capture_rng, pack_rng, unpack_rng


def document_of(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "training/state.json").read_bytes())
    return document


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


# ---- names and ties


@pytest.mark.spec("v1#weights-3")
def test_weights_have_the_names_of_the_model_without_wrappers(
    run: Path, state: dict[str, Any]
) -> None:
    compiled = torch.compile(state["model"])
    path = mp.save(run / "checkpoint-1", {"model": compiled}, step=1).path
    names = set(read_header(path / "model.safetensors").tensors)
    assert names == set(state["model"].state_dict()) - {"head.weight"}


@pytest.mark.spec("v1#weights-4")
def test_tied_names_have_one_tensor(saved: Path) -> None:
    manifest = json.loads((saved / "milepost.json").read_bytes())
    assert manifest["models"]["model"]["tied"] == {"head.weight": "embed.weight"}
    weights = mp.Checkpoint.open(saved).read_weights()
    assert weights["head.weight"] is weights["embed.weight"]


# ---- optimizers


@pytest.mark.spec("v1#optim-1")
def test_moments_are_called_by_parameter_and_slot(saved: Path) -> None:
    tensors = read_header(saved / "training/optimizer.safetensors").tensors
    trained = ("embed.weight", "norm.weight", "norm.bias")
    assert set(tensors) == {f"{p}.{slot}" for p in trained for slot in ("exp_avg", "exp_avg_sq")}


@pytest.mark.spec("v1#optim-1")
def test_dots_and_percent_signs_of_a_slot_are_escaped() -> None:
    assert tensor_name("a.b", "x.y%") == "a.b.x%2Ey%25"
    for slot in ("x.y", "%2E", "%252E", "%", "..", "%25.%2E"):
        assert "." not in tensor_name("", slot)[1:]
        assert split_tensor_name(tensor_name("a.b", slot)) == ("a.b", slot)


@pytest.mark.spec("v1#optim-1")
def test_parameters_of_a_second_model_have_its_key_before_them(run: Path) -> None:
    models = {"model": nn.Linear(2, 2, bias=False), "critic": nn.Linear(2, 1, bias=False)}
    optimizer = torch.optim.SGD([*models["model"].parameters(), *models["critic"].parameters()])
    path = mp.save(run / "checkpoint-1", {**models, "optimizer": optimizer}, step=1).path
    (group,) = document_of(path)["state"]["optimizer"]["groups"]
    assert group["params"] == ["weight", "critic/weight"]


@pytest.mark.spec("v1#optim-2")
def test_moments_keep_the_dtype_that_they_have(run: Path) -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 2)
    path = mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1).path
    (tensor,) = read_header(path / "training/optimizer.safetensors").tensors.values()
    assert (tensor.name, tensor.dtype, tensor.shape) == ("weight.momentum_buffer", "F32", (2, 2))


@pytest.mark.spec("v1#optim-3")
def test_another_order_of_parameters_takes_the_same_moments(
    saved: Path, state: dict[str, Any]
) -> None:
    model = state["model"]
    before = {id(p): dict(slots) for p, slots in state["optimizer"].state.items()}
    turned = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01)
    mp.load(saved, {"model": model, "optimizer": turned})
    for parameter, slots in turned.state.items():
        assert slots["exp_avg"].equal(before[id(parameter)]["exp_avg"])


@pytest.mark.spec("v1#optim-4")
def test_a_slot_that_was_absent_is_absent_again(run: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    kept = mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1).path
    record = document_of(kept)["state"]["optimizer"]
    assert record["stateless"] == ["bias"]
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mp.load(kept, {"model": model, "optimizer": fresh})
    assert set(fresh.state) == {model.weight}


# ---- state.json


@pytest.mark.spec("v1#state-2")
def test_the_state_has_an_entry_for_each_key_and_none_for_a_plain_model(saved: Path) -> None:
    assert set(document_of(saved)["state"]) == {"optimizer", "scheduler", "progress"}


@pytest.mark.spec("v1#state-2")
def test_an_entry_that_is_missing_is_damage(saved: Path, state: dict[str, Any]) -> None:
    document = document_of(saved)
    raw = json.dumps(document, indent=1).replace('"scheduler"', '"schedulex"')
    (saved / "training/state.json").write_bytes(raw.encode() + b"\n")
    with pytest.raises(DamagedError, match="scheduler: missing, though the manifest lists it"):
        mp.load(saved, state)


@pytest.mark.spec("v1#state-2")
def test_what_is_no_weight_of_a_model_stands_under_extra(run: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None: ...

    path = mp.save(run / "checkpoint-1", {"model": nn.Sequential(Counting(1, 1))}, step=1).path
    assert document_of(path)["state"] == {"model": {"extra": {"0._extra_state": {"calls": 3}}}}


@pytest.mark.spec("v1#tree-1")
@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ({1: 2}, "dict"),
        ({"$type": "x"}, "dict"),
        (float("nan"), "float"),
        (-(2**53) - 1, "int"),
        ("\udfff", "str"),
    ],
)
def test_what_json_does_not_hold_gets_a_tag(value: object, tag: str) -> None:
    data = encode(value)
    assert isinstance(data, dict)
    assert data["$type"] == tag
    json.dumps(data, allow_nan=False).encode()


@pytest.mark.spec("v1#tree-2", "v1#tree-3", "v1#limit-4")
@pytest.mark.parametrize(
    "data",
    [
        {"$type": "os.system", "items": ["ls"]},
        {"$type": 7},
        {"$type": "tuple", "items": [], "more": 1},
        {"$type": "tuple", "items": "ab"},
        {"$type": "bytes", "data": 5},
        {"$type": "defaultdict", "factory": "eval", "pairs": []},
        {"$type": "torch.tensor", "name": "nowhere", "colour": "red"},
    ],
)
def test_a_tag_or_field_that_is_not_known_is_refused(data: object) -> None:
    from milepost.state.tree_torch import MappingSource

    with pytest.raises(FormatError, match=r"^state\.json: a: "):
        decode({"a": data}, MappingSource({}), where="state.json")


@pytest.mark.spec("v1#tree-3")
def test_the_class_of_an_enum_is_a_label() -> None:
    data = {"$type": "enum", "class": "subprocess.Popen", "name": "A", "value": 1}
    value = decode(data, None, where="state.json")
    assert type(value).__name__ == "EnumValue"
    assert value.class_name == "subprocess.Popen"


@pytest.mark.spec("v1#tree-4", "v1#limit-2")
def test_64_containers_nest_and_65_do_not() -> None:
    assert decode(encode(nested(64)), None, where="x") == nested(64)
    with pytest.raises(UnencodableError, match="nested deeper than 64 levels"):
        encode(nested(65))
    with pytest.raises(FormatError, match="nested deeper than 64 levels"):
        decode(nested(65), None, where="x")


@pytest.mark.spec("v1#tree-4")
def test_a_value_that_cannot_be_stored_is_refused_with_its_place(run: Path) -> None:
    with pytest.raises(UnencodableError, match=r"^progress\.hook: .*it is code") as caught:
        mp.save(run / "checkpoint-1", {"progress": {"hook": print}}, step=1)
    assert caught.value.key == "progress.hook"
    assert not run.exists()


@pytest.mark.spec("v1#tree-5")
def test_order_is_kept_and_sets_are_sorted(run: Path) -> None:
    value = {"z": 1, "a": OrderedDict(z=1, a=2), "set": {"b", "c", "a"}}
    path = mp.save(run / "checkpoint-1", {"progress": value}, step=1).path
    stored = document_of(path)["state"]["progress"]
    assert list(stored) == ["z", "a", "set"]
    assert stored["a"]["pairs"] == [["z", 1], ["a", 2]]
    assert stored["set"]["items"] == ["a", "b", "c"]


# ---- random state


@pytest.mark.spec("v1#rng-1")
def test_a_row_of_random_state_that_is_malformed_is_refused() -> None:
    blob = pack_rng(capture_rng())
    assert blob[:8] == b"MPRNG001"
    assert len(blob) % 256 == 0
    length = int.from_bytes(blob[8:16], "little")
    assert set(json.loads(blob[16 : 16 + length])) == {"python", "numpy", "torch", "devices"}
    unpack_rng(blob + bytes(512), "row")
    too_long = blob[:8] + len(blob).to_bytes(8, "little") + blob[16:]
    for bad in (b"MPRNG002" + blob[8:], too_long, blob + b"\1", b"", blob[:12]):
        with pytest.raises(FormatError, match=r"^row: "):
            unpack_rng(bad, "row")


def test_the_random_state_of_the_process_is_one_row(saved: Path) -> None:
    assert document_of(saved)["rng"] == {"tensor": "rng", "world_size": 1}
    tensor = read_header(saved / "training/state.safetensors").tensors["rng"]
    assert (tensor.dtype, tensor.shape[0]) == ("U8", 1)
