"""Random state in a checkpoint: every generator, at the moment that is right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointError
from tests.states import same, snapshot, training


@pytest.mark.case("V29")
def test_the_next_draws_of_every_generator_are_those_of_the_saved_run(tmp_path: Path) -> None:
    def draws() -> list[Any]:
        return [
            [random.random() for _ in range(5)],
            [random.gauss(0, 1) for _ in range(3)],
            np.random.rand(5).tolist(),
            np.random.standard_normal(3).tolist(),
            torch.rand(5).tolist(),
            torch.randperm(5).tolist(),
        ]

    random.gauss(0, 1)  # an odd number of these leaves half of a pair in the state
    np.random.standard_normal(1)
    state = training(steps=1)
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    expected = draws()
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    live = training(seed=5)
    mp.load(tmp_path / "checkpoint-1", live)
    assert draws() == expected
    draws()
    report = mp.load(tmp_path / "checkpoint-1", live, rng=mp.RngRestore.LATER)
    assert draws() != expected
    assert report.restore_rng() == []
    assert draws() == expected


def test_random_state_can_be_restored_once_the_loader_has_its_iterator(tmp_path: Path) -> None:
    """Making an iterator draws from the global generator."""
    state = training(steps=1)
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    expected = torch.rand(3)
    report = mp.load(tmp_path / "checkpoint-1", state, rng=mp.RngRestore.LATER)
    data: Any = torch.utils.data.DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    iterator = iter(data)
    report.restore_rng()
    assert torch.equal(torch.rand(3), expected)
    next(iterator)


@pytest.mark.parametrize(
    "document",
    [{"tensor": 7}, {"tensor": "absent"}, [], "rng", {}, {"tensor": "progress.mask"}],
    ids=str,
)
def test_a_malformed_random_state_is_refused_before_anything_is_touched(
    document: Any, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-1"
    mp.save(path, training(steps=1), step=1)
    state = path / "training" / "state.json"
    content = json.loads(state.read_bytes())
    content["rng"] = document
    raw = json.dumps(content).encode()
    state.write_bytes(raw.ljust(state.stat().st_size))
    live, before, draws = training(seed=8), snapshot(training(seed=8)), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"random state|absent"):
        mp.load(path, live)
    assert same(snapshot(live), before)
    assert torch.equal(torch.get_rng_state(), draws)
