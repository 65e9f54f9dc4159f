"""The fingerprint as meshes and placements show it, and the fields that a load names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from tests.parallel.models import FSDP_TP, HSDP, Shape, build
from tests.worlds import run_world


def state_of(shape: Shape) -> dict[str, Any]:
    model = build(shape)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def save_both(rank: int, size: int, run: Path) -> dict[str, Any]:
    state = state_of(HSDP)
    mp.save(run / "checkpoint-1", state, step=1, fingerprint={"nvlink_domain_size": 8})
    again = mp.load(run / "checkpoint-1", state)
    other = state_of(FSDP_TP)
    mp.save(run / "checkpoint-2", other, step=2)
    moved = mp.load(run / "checkpoint-1", other)
    warm = mp.load(run / "checkpoint-1", other, moments=mp.Moments.FRESH)
    stated = mp.load(run / "checkpoint-1", state, fingerprint={"nvlink_domain_size": 4})
    return {
        "again": (again.level.value, again.fingerprint),
        "moved": (moved.level.value, moved.fingerprint),
        "warm": (warm.level.value, warm.fingerprint),
        "stated": stated.fingerprint,
        "lines": moved.lines(),
    }


def test_what_differs_is_named_for_another_shape_and_for_a_warm_restart(tmp_path: Path) -> None:
    changed = {"tp_size": (1, 2), "hsdp": (True, False)}
    for found in run_world(4, save_both, tmp_path):
        assert found["again"] == ("exact", {})
        assert found["moved"] == ("resharded", changed)
        assert found["warm"] == ("warm-restart", changed)
        assert found["stated"] == {"nvlink_domain_size": (8, 4)}
        assert "fingerprint.tp_size: saved 1, now 2" in found["lines"]
    recorded = {
        step: json.loads((tmp_path / f"checkpoint-{step}" / "milepost.json").read_bytes())
        for step in (1, 2)
    }
    first, second = (recorded[step]["fingerprint"] for step in (1, 2))
    assert (first["world_size"], first["hsdp"], first["tp_size"]) == (4, True, 1)
    assert (second["hsdp"], second["tp_size"], second["optimizer_class"]) == (False, 2, "AdamW")
