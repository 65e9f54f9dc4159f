"""`milepost show` on what runs on many ranks leave: fingerprint, stages, other layouts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import milepost as mp
from milepost.format.fingerprint import FIELDS
from tests.cli.conftest import Make, Milepost


def test_the_fingerprint_is_shown_with_what_the_caller_stated(
    tmp_path: Path, milepost: Milepost
) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    stated = {"ep_scope": "node", "cp_size": 4}
    mp.save(tmp_path / "checkpoint-1", state, step=1, fingerprint=stated)
    found = milepost("show", tmp_path / "checkpoint-1", "--json").json()["fingerprint"]
    assert tuple(found) == FIELDS
    assert found["world_size"] == 1 and found["optimizer_class"] == "AdamW"
    assert (found["ep_scope"], found["cp_size"]) == ("node", 4)
    out = milepost("show", tmp_path / "checkpoint-1").out
    assert "optimizer_class AdamW" in out and "ep_scope node" in out
    report = mp.load(tmp_path / "checkpoint-1", state)
    assert report.fingerprint == {"cp_size": (4, 1)}
    assert mp.load(tmp_path / "checkpoint-1", state, fingerprint=stated).fingerprint == {}


def test_a_manifest_of_before_has_no_fingerprint_and_loads(make: Make, milepost: Milepost) -> None:
    golden = Path(__file__).parents[1] / "golden" / "directory_v1"
    path = next(iter(sorted(golden.glob("checkpoint-*"))), golden)
    assert milepost("show", path, "--json").json()["fingerprint"] is None


def test_a_dcp_directory_is_shown_and_verified(tmp_path: Path, milepost: Milepost) -> None:
    dcp_save({"model": {"w": torch.ones(3, 2)}}, checkpoint_id=tmp_path / "step-7")
    found = milepost("show", tmp_path / "step-7", "--json").json()
    assert (found["layout"], found["step"]) == ("torch-dcp", 7)
    assert found["weights"]["parameters"] == 6
    assert milepost("verify", tmp_path / "step-7").code == 0
