"""What DCP saved on several ranks, loaded by any shape: DCP itself is the one who wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import milepost as mp
from tests.parallel.models import FSDP2, FSDP4, FSDP_TP, HSDP, ONE, TP2, Shape, build, whole
from tests.worlds import run_world

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train(model: Any, steps: int) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for slot, value in optimizer.state.get(param, {}).items():
            found[f"{name}.{slot}"] = whole(value)
    return found


def write(rank: int, size: int, shape: Shape, run: Path) -> Any:
    """Two ways in which programs call DCP: moments nested, and moments flattened under `app`."""
    model = build(shape)
    optimizer = train(model, 2)
    weights = get_model_state_dict(model)
    nested = get_optimizer_state_dict(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_save({"model": weights, "optimizer": nested}, checkpoint_id=run / "nested")
    dcp_save({"app": {"model": weights, "optim": flat}}, checkpoint_id=run / "app")
    return values(model, optimizer)


def read(rank: int, size: int, shape: Shape, run: Path) -> Any:
    found = []
    for place in ("nested", "app"):
        model = build(shape, seed=7)
        optimizer = train(model, 1)
        report = mp.load(run / place, {"model": model, "optimizer": optimizer})
        assert report.level is mp.Level.RESHARDED
        found.append(values(model, optimizer))
    return found


def on(shape: Shape, function: Any, run: Path) -> list[Any]:
    if shape.world_size == 1:
        return [function(0, 1, shape, run)]
    return run_world(shape.world_size, function, shape, run)


@pytest.mark.parametrize("written", [FSDP2, FSDP4, ONE], ids=str)
def test_any_shape_loads_what_dcp_saved(written: Shape, tmp_path: Path) -> None:
    saved = on(written, write, tmp_path)[0]
    checkpoint = mp.Checkpoint.open(tmp_path / "nested")
    assert checkpoint.verify().problems == ()
    for name, tensor in checkpoint.read_weights().items():
        assert torch.equal(tensor, saved[name]), name
    for shape in (ONE, TP2, FSDP_TP if written is FSDP2 else HSDP):
        for both in on(shape, read, tmp_path):
            for found in both:
                assert found.keys() == saved.keys()
                assert [n for n, t in saved.items() if not torch.equal(found[n], t)] == []
