"""`Verify.WHILE_READING`: damage is found by the read itself, and an older checkpoint is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointWarning, DamagedError, InvalidInputError, LoadTornError
from milepost.format.header import read_header
from tests.states import flip, same, snapshot, train, training

WHILE = mp.Verify.WHILE_READING


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "run" / "checkpoint-3"
    mp.save(place, training(steps=3), step=3)
    return place


def place_in(file: Path, name: str) -> int:
    """A byte in the middle of a tensor."""
    header = read_header(file)
    entry = header.tensors[name]
    return header.data_start + entry.start + entry.nbytes // 2


def some_tensor(file: Path) -> str:
    return max(read_header(file).tensors.items(), key=lambda item: item[1].nbytes)[0]


@pytest.mark.parametrize("name", ["model.safetensors", "training/optimizer.safetensors"])
def test_a_flipped_bit_is_found_by_the_read_and_the_tensor_named(name: str, path: Path) -> None:
    tensor = some_tensor(path / name)
    flip(path / name, place_in(path / name, tensor))
    mp.load(path, training(seed=8))  # sizes alone do not show it
    with pytest.raises(LoadTornError, match=f"tensor {tensor}: bytes") as raised:
        mp.load(path, training(seed=8), verify=WHILE)
    assert isinstance(raised.value.__cause__, DamagedError)


def test_what_is_no_tensor_of_weights_or_moments_is_proven_before_anything_changes(
    path: Path,
) -> None:
    file = path / "training" / "state.json"
    flip(file, file.stat().st_size // 2)
    live = training(seed=8)
    before = snapshot(live)
    with pytest.raises(DamagedError):
        mp.load(path, live, verify=WHILE)
    assert same(snapshot(live), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sound_checkpoint_loads_as_ever_into_any_dtype(dtype: torch.dtype, path: Path) -> None:
    expected, live = training(seed=8), training(seed=9)
    for state in (expected, live):
        state["model"].to(dtype)
    policy = mp.DtypePolicy.CAST
    mp.load(path, {"model": expected["model"]}, dtype=policy)
    report = mp.load(path, {"model": live["model"]}, dtype=policy, verify=WHILE)
    assert same(snapshot({"m": live["model"]}), snapshot({"m": expected["model"]}))
    assert not any("not verified" in note for note in report.notes)


def test_damage_is_found_in_a_tensor_that_is_cast_too(path: Path) -> None:
    tensor = some_tensor(path / "model.safetensors")
    flip(path / "model.safetensors", place_in(path / "model.safetensors", tensor))
    live = training(seed=8)
    live["model"].to(torch.float64)
    with pytest.raises(LoadTornError, match=tensor):
        mp.load(path, {"model": live["model"]}, dtype=mp.DtypePolicy.CAST, verify=WHILE)


def test_the_manager_goes_on_to_the_older_checkpoint(tmp_path: Path) -> None:
    state = training()
    with mp.CheckpointManager(tmp_path, verify=WHILE) as manager:
        for step in (1, 2):
            train(state, 1)
            manager.save(step, state)
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    flip(file, place_in(file, some_tensor(file)))
    live = training(seed=8)
    with (
        mp.CheckpointManager(tmp_path, verify=WHILE) as manager,
        pytest.warns(CheckpointWarning, match="are not those that were saved"),
    ):
        report = manager.resume(live)
    assert report is not None and report.step == 1
    expected = training(seed=7)
    mp.load(tmp_path / "checkpoint-1", expected)
    assert same(snapshot(live), snapshot(expected))


def test_a_checkpoint_that_is_chosen_before_there_is_a_state_is_proven_at_once(
    tmp_path: Path,
) -> None:
    state = training()
    with mp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            train(state, 1)
            manager.save(step, state)
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    flip(file, place_in(file, some_tensor(file)))
    with (
        mp.CheckpointManager(tmp_path, verify=WHILE) as manager,
        pytest.warns(CheckpointWarning, match="are not those that were saved|checkpoint-2"),
    ):
        assert manager.checkpoint_to_resume() == tmp_path / "checkpoint-1"
        report = manager.resume(training(seed=8))
    assert report is not None and report.step == 1


def test_where_nothing_can_be_proven_that_is_refused(path: Path, tmp_path: Path) -> None:
    live = training(seed=8)
    shared = mp.ReadOptions(mode=mp.ReadMode.SHARED)
    with pytest.raises(InvalidInputError, match=r"ReadMode\.SHARED"):
        mp.load(path, live, verify=WHILE, options=shared)
    mp.save_checkpoint(tmp_path / "x.pt", model_state=live["model"].state_dict())
    with pytest.raises(InvalidInputError, match="manifest"):
        mp.load(tmp_path / "x.pt", {"model": live["model"]}, verify=WHILE)
