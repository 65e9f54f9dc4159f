"""Fused experts come back from hub names by every way of loading, and by none in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import milepost as mp
from milepost.errors import KeyMismatchError
from tests.parallel.expert_models import optimizer_of, random_model, train, weights

EXPERTS = 3
LOSSES = {2: 0.3, 4: 0.9}


def model_of(seed: int) -> Any:
    """Two layers of three fused experts; other weights for each seed."""
    model = random_model("Qwen3Moe", num_experts=EXPERTS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.05)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one training, the first of which is the best."""
    place = tmp_path_factory.mktemp("run")
    model = model_of(1)
    optimizer = optimizer_of(model)
    state = {"model": model, "optimizer": optimizer}
    with mp.CheckpointManager(place, best=mp.BestMetric("loss")) as manager:
        manager.resume(state)
        for step, loss in LOSSES.items():
            train(model, optimizer, range(step - 2, step))
            torch.save(weights(model), place / f"weights-{step}.pt")
            manager.save(step, state, metrics={"loss": loss})
    names = load_file(place / "checkpoint-2" / "model.safetensors")
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names), "hub names, expert by expert"
    return place


def by_load(run: Path, model: Any) -> int:
    mp.load(run / "checkpoint-4", {"model": model})
    return 4


def by_resume(run: Path, model: Any) -> int:
    with mp.CheckpointManager(run, best=None) as manager:
        report = manager.resume({"model": model, "optimizer": optimizer_of(model)})
    assert report is not None and report.level is mp.Level.EXACT
    return 4


def by_best(run: Path, model: Any) -> int:
    with mp.CheckpointManager(run, best=mp.BestMetric("loss")) as manager:
        manager.resume({"model": model, "optimizer": optimizer_of(model)})
        manager.load_best({"model": model})
    return 2


def by_weights_that_were_read(run: Path, model: Any) -> int:
    """As a program that starts from `model_name_or_path`."""
    found = type(model).from_pretrained(run / "checkpoint-2")
    model.load_state_dict(found.state_dict())
    return 2


@pytest.mark.case("V53")
@pytest.mark.parametrize("way", [by_load, by_resume, by_best, by_weights_that_were_read])
def test_every_expert_is_that_of_the_checkpoint(way: Callable[[Path, Any], int], run: Path) -> None:
    model = model_of(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".experts." in name:
                param.fill_(torch.nan)
    step = way(run, model)
    wanted = torch.load(run / f"weights-{step}.pt")
    found = weights(model)
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    assert sum(".experts." in name for name in found) == 4


@pytest.mark.case("V53")
@pytest.mark.parametrize("change", ["a layer is spelled otherwise", "an expert is missing"])
def test_names_that_match_nothing_are_fatal(change: str, run: Path, tmp_path: Path) -> None:
    tensors = load_file(run / "checkpoint-4" / "model.safetensors")
    lost = "model.layers.0.mlp.experts.1.down_proj.weight"
    value = tensors.pop(lost)
    if change == "a layer is spelled otherwise":
        tensors[lost.replace("mlp.experts", "mlp.expert")] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model_of(2).config.save_pretrained(tmp_path)
    model = model_of(2)
    before = {name: value.clone() for name, value in weights(model).items()}
    with pytest.raises(KeyMismatchError, match=r"1 missing.*experts\.1\.down_proj"):
        mp.load(tmp_path, {"model": model})
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
