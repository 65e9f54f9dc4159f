"""The manifest stays small however many tensors there are: their records lie beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import milepost as mp

LIMIT = 100_000


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"layer_{number}_weight", nn.Parameter(torch.ones(2, 3)))


@pytest.mark.parametrize("count", [30, 6000])
def test_the_manifest_has_roots_and_the_records_their_own_file(count: int, tmp_path: Path) -> None:
    model = Many(count)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": model, "optimizer": optimizer}, step=1)
    raw = (path / "milepost.json").read_bytes()
    assert len(raw) < LIMIT
    assert not any(f"layer_{n}_weight".encode() in raw for n in (0, count - 1))
    records = sum(file["records"][1] for file in json.loads(raw)["files"] if file.get("records"))
    assert (path / "training" / "digests.bin").stat().st_size == 32 * records > 32 * count
    assert mp.Checkpoint.open(path).verify().problems == ()
