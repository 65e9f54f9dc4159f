"""`Staging.FULL`: all tensors are read beside the live ones, which change when nothing can fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import milepost as mp
from milepost.errors import DamagedError, InvalidInputError, LoadTornError, StorageError
from milepost.format.header import read_header
from tests.states import TinyLM, flip, same, snapshot, train, training

FULL, WHILE = mp.Staging.FULL, mp.Verify.WHILE_READING
FILES = ["model.safetensors", "training/optimizer.safetensors"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "run" / "checkpoint-3"
    mp.save(place, training(steps=3), step=3)
    return place


def middle_of_the_last(file: Path) -> int:
    """A byte in the middle of the tensor that lies last."""
    header = read_header(file)
    entry = max(header.tensors.values(), key=lambda entry: entry.end)
    return header.data_start + (entry.start + entry.end) // 2


def objects(state: dict[str, Any]) -> set[tuple[int, int]]:
    """Which tensors the model and its optimizer have, and where these lie."""
    tensors = [*state["model"].parameters(), *state["model"].buffers()]
    for slots in state["optimizer"].state.values():
        tensors += [value for value in slots.values() if isinstance(value, torch.Tensor)]
    return {(id(tensor), tensor.data_ptr()) for tensor in tensors}


@pytest.mark.parametrize("steps", [0, 2], ids=["no state yet", "in training"])
def test_it_restores_what_a_load_restores_into_the_same_tensors(path: Path, steps: int) -> None:
    straight, staged = training(seed=8, steps=steps), training(seed=8, steps=steps)
    before = objects(staged)
    expected = mp.load(path, straight, verify=WHILE)
    report = mp.load(path, staged, verify=WHILE, staging=FULL)
    assert same(snapshot(staged), snapshot(straight))
    assert same(snapshot(staged), snapshot(training(steps=3)))
    assert report.lines() == expected.lines() and report.level is mp.Level.EXACT
    assert before <= objects(staged)
    assert train(staged, 2) == train(training(steps=3), 2)


def test_values_are_cast_as_ever(path: Path) -> None:
    straight, staged = (training(seed=8)["model"].to(torch.float64) for _ in range(2))
    for model, staging in ((straight, mp.Staging.NONE), (staged, FULL)):
        mp.load(path, {"model": model}, dtype=mp.DtypePolicy.CAST, staging=staging)
    assert same(staged.state_dict(), straight.state_dict())


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_leaves_all_as_it_was(path: Path, name: str) -> None:
    flip(path / name, middle_of_the_last(path / name))
    live = training(seed=8, steps=2)
    before, held = snapshot(live), objects(live)
    with pytest.raises(DamagedError, match="are not those that were saved") as raised:
        mp.load(path, live, verify=WHILE, staging=FULL)
    assert not isinstance(raised.value, LoadTornError)
    assert same(snapshot(live), before) and objects(live) == held
    with pytest.raises(LoadTornError):
        mp.load(path, live, verify=WHILE)
    assert not same(snapshot(live), before), "without it, some of it was filled"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_leaves_all_as_it_was(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = training(seed=8, steps=2)
    before = snapshot(live)
    end, inode = middle_of_the_last(path / name), (path / name).stat().st_ino
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        nbytes = sum(memoryview(each).nbytes for each in buffers)
        if os.fstat(descriptor).st_ino == inode and offset <= end < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        mp.load(path, live, staging=FULL)
    assert same(snapshot(live), before)
    monkeypatch.undo()
    mp.load(path, live, staging=FULL)
    assert same(snapshot(live), snapshot(training(steps=3)))


def test_nothing_is_filled_before_everything_has_been_read(path: Path) -> None:
    live = training(seed=8, steps=2)
    before = snapshot(live)
    seen: list[bool] = []
    nbytes: list[int] = []

    def look(count: int) -> None:
        nbytes.append(count)
        seen.append(same(snapshot(live), before))

    mp.load(path, live, staging=FULL, options=mp.ReadOptions(threads=1, on_bytes=look))
    assert seen and all(seen)
    headers = [read_header(path / name) for name in FILES]
    assert sum(nbytes) == sum(t.nbytes for header in headers for t in header.tensors.values())
    assert same(snapshot(live), snapshot(training(steps=3)))


def test_a_model_on_meta_stays_there_when_it_fails_and_is_filled_when_not(path: Path) -> None:
    with torch.device("meta"):
        model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    name = FILES[1]
    flip(path / name, middle_of_the_last(path / name))
    with pytest.raises(DamagedError):
        mp.load(path, state, verify=WHILE, staging=FULL)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not optimizer.state
    flip(path / name, middle_of_the_last(path / name))
    mp.load(path, state, verify=WHILE, staging=FULL)
    expected = training(steps=3)
    assert same(model.state_dict(), expected["model"].state_dict())
    wanted = expected["optimizer"].state_dict()["state"]
    assert same(optimizer.state_dict()["state"], wanted)


def test_a_warm_restart_where_moments_are_damaged_is_made_of_untouched_state(path: Path) -> None:
    flip(path / FILES[1], middle_of_the_last(path / FILES[1]))
    live = training(seed=8, steps=2)
    report = mp.load(path, live, verify=WHILE, staging=FULL, moments=mp.Moments.FRESH_IF_UNUSABLE)
    assert "are not those that were saved" in report.fresh_moments["optimizer"]
    assert same(live["model"].state_dict(), training(steps=3)["model"].state_dict())
    assert not live["optimizer"].state


def test_weights_of_other_layouts_are_staged_too_and_dcp_is_refused(tmp_path: Path) -> None:
    saved = training(steps=1)["model"]
    mp.save_checkpoint(tmp_path / "x.pt", model_state=saved.state_dict())
    live = training(seed=8)["model"]
    mp.load(tmp_path / "x.pt", {"model": live}, staging=FULL)
    assert same(live.state_dict(), saved.state_dict())
    dcp_save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "dcp")
    before = snapshot({"model": training(seed=9)["model"]})
    other = training(seed=9)["model"]
    with pytest.raises(InvalidInputError, match=r"DCP.*staging=Staging\.NONE"):
        mp.load(tmp_path / "dcp", {"model": other}, staging=FULL)
    assert same(snapshot({"model": other}), before)
