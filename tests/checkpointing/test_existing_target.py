"""`save` where something lies already: kept, exchanged or moved aside, never lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import ExistsError
from tests.directories import opened
from tests.states import same, training


def test_a_committed_checkpoint_is_never_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    first = mp.save(path, training(seed=1), step=1)
    with pytest.raises(ExistsError, match=r"a committed checkpoint of step 1 is there"):
        mp.save(path, training(seed=2), step=1)
    kept = mp.save(path, training(seed=2), step=1, on_existing=mp.OnExisting.KEEP)
    assert (kept.written, kept.checkpoint_id) == (False, first.checkpoint_id)
    assert "is kept" in kept.notes[0]
    weights = opened(path).read_weights()
    assert same(weights, dict(training(seed=1)["model"].state_dict()))


def test_replacing_exchanges_the_old_for_the_new_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    mp.save(path, training(seed=1), step=1, max_shard_size=100)
    report = mp.save(path, training(seed=2), step=1, on_existing=mp.OnExisting.REPLACE)
    assert opened(path).manifest.checkpoint_id == report.checkpoint_id
    assert opened(path).verify().problems == ()
    assert same(opened(path).read_weights(), dict(training(seed=2)["model"].state_dict()))
    assert sorted(os.listdir(tmp_path)) == [".milepost.lock", "checkpoint-1"]


@pytest.mark.case("V03")
def test_what_is_mapped_from_a_checkpoint_outlives_its_replacement(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint-1", bag(w=torch.tensor([5.0, 6.0, 7.0]))
    mp.save(path, {"model": model}, step=1)
    mapped = opened(path).mapped("w")
    more = bag(w=mapped, b=torch.ones(1))
    mp.save(path, {"model": more}, step=1, on_existing=mp.OnExisting.REPLACE)
    assert mapped.tolist() == [5, 6, 7]
    assert opened(path).read("w").tolist() == [5, 6, 7]
    assert opened(path).read("b").tolist() == [1]


@pytest.mark.parametrize("kind", ["empty", "torn", "file", "symlink", "damaged manifest"])
def test_what_is_torn_under_the_name_is_moved_aside_with_its_data(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "checkpoint-1"
    path.parent.mkdir()
    if kind == "file":
        path.write_text("data")
    elif kind == "symlink":
        path.symlink_to("nowhere")
    elif kind == "damaged manifest":
        mp.save(path, training(), step=1)
        os.truncate(path / "milepost.json", 10)
    else:
        path.mkdir()
        if kind == "torn":
            (path / "model.safetensors").write_text("data")
    report = mp.save(path, training(), step=1)
    assert opened(path).verify().problems == ()
    moved = tmp_path / "run" / "_incomplete_checkpoints" / "checkpoint-1"
    assert os.path.lexists(moved)
    assert any("was no committed checkpoint; moved to" in note for note in report.notes)
    if kind == "torn":
        assert (moved / "model.safetensors").read_text() == "data"


def test_a_checkpoint_committed_while_this_save_was_captured_is_not_moved(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"

    class Intruder:
        def state_dict(self) -> dict[str, Any]:
            if not path.exists():
                mp.save(path, training(seed=1), step=1)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ExistsError, match=r"a committed checkpoint of step 1 is there"):
        mp.save(path, {**training(seed=2), "intruder": Intruder()}, step=1)
    assert same(opened(path).read_weights(), dict(training(seed=1)["model"].state_dict()))
    assert sorted(os.listdir(tmp_path)) == [".milepost.lock", "checkpoint-1"]


def bag(**tensors: torch.Tensor) -> nn.Module:
    """A model of these buffers."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model
