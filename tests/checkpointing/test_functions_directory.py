"""`load_checkpoint` on a checkpoint directory: the same mapping that a `.pt` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]) -> Path:
    state: dict[str, Any] = {"model": trained[0], "optimizer": trained[1], "seen": {"ids": (1, 2)}}
    config = {"hidden": 3, "betas": (0.9, 0.95)}
    mp.save(path / "checkpoint-7", state, step=7, epoch=1.5, model_config=config)
    return path / "checkpoint-7"


def test_stock_objects_take_what_a_directory_gives(
    tmp_path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    checkpoint = mp.load_checkpoint(saved(tmp_path, trained))
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(checkpoint["model_state"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert (checkpoint["step"], checkpoint["epoch"]) == (7, 1.5)
    assert checkpoint["config"] == {"hidden": 3, "betas": (0.9, 0.95)}
    assert checkpoint["training_state"] == {"seen": {"ids": (1, 2)}}
    for one, other in ((trained[0], trained[1]), (model, optimizer)):
        torch.manual_seed(1)
        one(torch.randn(4, 3)).sum().backward()
        other.step()
    assert torch.equal(model.weight, trained[0].weight)  # type: ignore[arg-type]


def test_a_damaged_training_state_leaves_weights_and_one_warning(
    tmp_path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    path = saved(tmp_path, trained)
    document = path / "training" / "state.json"
    document.write_bytes(document.read_bytes()[:-20])
    with pytest.warns(mp.errors.CheckpointWarning, match="only weights and metadata") as caught:
        checkpoint = mp.load_checkpoint(path)
    assert len(caught) == 1
    assert torch.equal(checkpoint["model_state"]["weight"], trained[0].weight)  # type: ignore[arg-type]
    assert "optimizer" not in checkpoint and checkpoint["step"] == 7
