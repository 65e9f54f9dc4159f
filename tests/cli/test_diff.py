"""`milepost diff`: what differs between two checkpoints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.trio import TrioContent, write_trio
from milepost.tools import compare
from tests.cli.conftest import Make, Milepost


def test_equal_checkpoints_of_other_layouts_are_the_same(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    path = make(1)
    weights = Checkpoint.open(path).read_weights()
    write_trio(tmp_path, ["best"], TrioContent(model_state=weights, model_config={"hidden": 8}))
    result = milepost("diff", path, tmp_path / "best", "--values", "--json")
    assert result.code == 0, result.out
    found = result.json()
    assert found["same"] is True
    assert [row["same"] for row in found["values"]] == [True, True, True]


def test_the_step_and_metrics_are_shown_and_are_no_difference(
    make: Make, milepost: Milepost
) -> None:
    result = milepost("diff", make(1, loss=2.0), make(2, loss=1.0))
    assert result.code == 0
    assert "step 1" in result.out
    assert "loss 1" in result.out
    assert "config, names, shapes, dtypes: the same" in result.out


def test_names_shapes_dtypes_and_config_that_differ_are_listed(
    milepost: Milepost, tmp_path: Path
) -> None:
    for name, tensors, hidden in (
        ("a", {"x": torch.ones(2, 3), "y": torch.ones(2), "gone": torch.ones(1)}, 3),
        ("b", {"x": torch.ones(3, 2), "y": torch.ones(2).half(), "new": torch.ones(1)}, 4),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        config = {"hidden_size": hidden, "rope": {"theta": hidden * 10}, "same": [1]}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    result = milepost("diff", tmp_path / "a", tmp_path / "b", "--json")
    found = result.json()
    assert result.code == 1
    assert found["only_first"] == ["gone"]
    assert found["only_second"] == ["new"]
    assert {c["name"]: (c["first"]["dtype"], c["second"]["shape"]) for c in found["changed"]} == {
        "x": ("F32", [3, 2]),
        "y": ("F32", [2]),
    }
    assert found["config"] == {
        "hidden_size": {"first": 3, "second": 4},
        "rope.theta": {"first": 30, "second": 40},
    }
    out = milepost("diff", tmp_path / "a", tmp_path / "b").out
    assert "only in A: 1 tensor\n  gone" in out
    assert "F32 2x3" in out


def test_values_are_compared_in_pieces_with_their_relative_change(
    milepost: Milepost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PIECE_ELEMENTS", 8)
    base = torch.full((6, 4), 2.0)
    moved = base.clone()
    moved[5, 3] += 0.5
    odd = torch.tensor([float("nan"), 1.0, float("inf")])
    save_file({"w": base, "odd": odd, "z": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"w": moved, "odd": odd, "z": -torch.zeros(2)}, tmp_path / "b.safetensors")
    result = milepost(
        "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--values", "--json"
    )
    rows = {row["name"]: row for row in result.json()["values"]}
    assert result.code == 1
    assert rows["w"]["relative"] == pytest.approx(0.5 / base.norm().item())
    assert rows["w"]["largest"] == 0.5
    assert (rows["w"]["differing"], rows["w"]["elements"]) == (1, 24)
    assert rows["odd"]["same"] is True
    assert rows["z"]["same"] is False
    assert rows["z"]["note"] == "equal values, other bits"


def test_a_change_of_dtype_alone_is_told_from_a_change_of_values(
    milepost: Milepost, tmp_path: Path
) -> None:
    exact = torch.tensor([1.0, 2.0])
    save_file({"w": exact}, tmp_path / "a.safetensors")
    save_file({"w": exact.to(torch.bfloat16)}, tmp_path / "b.safetensors")
    result = milepost("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--values")
    assert result.code == 1
    assert "equal values, other bits" in result.out


@pytest.mark.parametrize("name", ["float8_e4m3fn", "bool", "int64", "complex64", "float16"])
def test_values_of_every_kind_of_dtype_are_compared(
    milepost: Milepost, tmp_path: Path, name: str
) -> None:
    dtype = getattr(torch, name)
    save_file({"w": torch.tensor([1, 0, 1]).to(dtype)}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([1, 1, 1]).to(dtype)}, tmp_path / "b.safetensors")
    result = milepost(
        "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--values", "--json"
    )
    (row,) = result.json()["values"]
    assert (row["differing"], row["largest"]) == (1, 1.0)


def test_another_model_differs_in_shape(make: Make, milepost: Milepost, tmp_path: Path) -> None:
    result = milepost("diff", make(1), make(1, run=tmp_path / "wide", hidden=12), "--values")
    assert result.code == 1
    assert "shape or dtype, differing: 3 tensors" in result.out
    assert "shapes differ" in result.out
