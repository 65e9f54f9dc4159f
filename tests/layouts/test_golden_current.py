"""What this version wrote once must load for ever: a trio and a single file, with their digests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import milepost as mp

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["single_file_v1.pt", "trio_v2_milepost.meta.json"])
def test_a_golden_checkpoint_loads_with_every_value_and_verifies(name: str) -> None:
    checkpoint = mp.load_checkpoint(GOLDEN / name)
    state = checkpoint["model_state"]
    assert torch.equal(state["embed.weight"], torch.arange(12.0).reshape(4, 3))
    assert state["head.bias"].dtype == torch.bfloat16
    assert state["head.bias"].tolist() == [0.5, -0.25]
    optimizer = checkpoint["optimizer"]
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.95)
    assert optimizer["state"][0]["exp_avg"].tolist() == [[0.125] * 3] * 4
    report = mp.Checkpoint.open(GOLDEN / name).verify()
    assert report.ok and report.has_digests and report.problems == ()


def test_a_golden_trio_keeps_its_metadata() -> None:
    checkpoint = mp.load_checkpoint(GOLDEN / "trio_v2_milepost")
    assert checkpoint["epoch"] == 2 and checkpoint["loss"] == 1.5
    assert checkpoint["extra_state"] == {"seen": [1, 2]}
    assert checkpoint["scheduler_state"] == {"last_epoch": 3}
    assert checkpoint["config"] == {"hidden_size": 3}


def test_a_flipped_byte_of_a_golden_file_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "single_file_v1.pt"
    shutil.copyfile(GOLDEN / copy.name, copy)
    raw = bytearray(copy.read_bytes())
    raw[len(raw) // 2] ^= 1
    copy.write_bytes(raw)
    assert not mp.Checkpoint.open(copy).verify().ok
