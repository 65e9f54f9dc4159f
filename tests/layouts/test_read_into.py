"""Weights go straight into tensors that exist, from every layout, or nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import milepost as mp


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16)}


@pytest.fixture(params=["directory", "hugging-face", "single-file"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> mp.Checkpoint:
    if request.param == "single-file":
        mp.save_checkpoint(tmp_path / "x.pt", model_state=weights)
        return mp.Checkpoint.open(tmp_path / "x.pt")
    if request.param == "hugging-face":
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return mp.Checkpoint.open(tmp_path)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(t, requires_grad=False) for name, t in weights.items()}
    )
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    return mp.Checkpoint.open(tmp_path / "checkpoint-1")


def test_existing_tensors_are_filled_whatever_their_strides(
    checkpoint: mp.Checkpoint, weights: dict[str, torch.Tensor]
) -> None:
    targets = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(5, dtype=torch.bfloat16)}
    before = targets["a"].stride()
    checkpoint.read_into(targets)
    assert all(torch.equal(targets[name], weights[name]) for name in weights)
    assert targets["a"].stride() == before


def test_a_target_that_does_not_fit_changes_nothing(checkpoint: mp.Checkpoint) -> None:
    first = torch.zeros(3, 4)
    with pytest.raises(mp.errors.DtypeMismatchError, match="b: the target has dtype F32, the ch"):
        checkpoint.read_into({"a": first, "b": torch.zeros(5)})
    with pytest.raises(mp.errors.ShapeMismatchError, match=r"b: the target has shape \(4,\)"):
        checkpoint.read_into({"a": first, "b": torch.zeros(4, dtype=torch.bfloat16)})
    with pytest.raises(mp.errors.NotFoundError, match="no tensor 'c' among the 2"):
        checkpoint.read_into({"a": first, "c": torch.zeros(4)})
    assert not first.any()


def test_a_mapped_weight_is_the_weight(
    checkpoint: mp.Checkpoint, weights: dict[str, torch.Tensor]
) -> None:
    assert torch.equal(checkpoint.mapped("a"), weights["a"])
