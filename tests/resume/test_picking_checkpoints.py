"""Which checkpoint a run goes on from: the newest good one, the named one, or none at all."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import milepost as mp
from milepost.errors import (
    CheckpointWarning,
    DamagedError,
    NotCommittedError,
    NotFoundError,
)
from tests.manager.small_training import Training, leaves_untouched, same
from tests.worlds import run_outcomes, run_world


def run_of(run: Path, *steps: int, seed: int = 0, **options: Any) -> Training:
    training = Training(seed=seed)
    with mp.CheckpointManager(run, **options) as manager:
        manager.resume(training.state)
        for step in steps:
            training.step()
            manager.save(step, training.state, metrics={"loss": 1 / step})
    return training


def torn(run: Path, step: int) -> Path:
    """What a killed program of another kind leaves: weights, and nothing that was written last."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"weight": torch.zeros(2)}, place / "model.safetensors")
    return place


def resumed(run: Path, resume: Any, seed: int = 5) -> mp.LoadReport | None:
    with mp.CheckpointManager(run, resume=resume) as manager:
        return manager.resume(Training(seed=seed).state)


# ---- true


def test_true_takes_the_newest_one(tmp_path: Path) -> None:
    run_of(tmp_path, 9, 10)
    report = resumed(tmp_path, True)
    assert report is not None and report.step == 10


def test_true_begins_a_fresh_run_when_there_is_nothing_at_all_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resumed(tmp_path / "new", True) is None
    assert "no checkpoint to resume from, a fresh run" in caplog.text


def test_must_does_not_begin_a_fresh_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint to resume from"):
        resumed(tmp_path / "new", mp.Resume.MUST)


def test_false_begins_again_beside_what_is_there(tmp_path: Path) -> None:
    run_of(tmp_path, 1)
    assert resumed(tmp_path, False) is None
    run_of(tmp_path, 2, resume=False)
    assert [entry.step for entry in mp.list_run(tmp_path).current] == [2]


@pytest.mark.parametrize("resume", [True, mp.Resume.AUTO, mp.Resume.MUST])
def test_only_torn_directories_are_refused_with_what_was_found(tmp_path: Path, resume: Any) -> None:
    torn(tmp_path, 3)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(NotCommittedError, match=r"checkpoint-3 \(.*checkpoint-5 \(") as caught:
        resumed(tmp_path, resume)
    assert "resume=Resume.NEVER" in str(caught.value)


def test_torn_directories_stay_until_a_save_needs_their_name(tmp_path: Path) -> None:
    training = run_of(tmp_path, 1)
    for step in (2, 7):
        torn(tmp_path, step)
    with pytest.warns(CheckpointWarning, match="is resumed from, not"):
        report = resumed(tmp_path, True)
    assert report is not None and report.step == 1
    assert (tmp_path / "checkpoint-2").is_dir()
    with (
        pytest.warns(CheckpointWarning),
        mp.CheckpointManager(tmp_path) as manager,
    ):
        manager.resume(training.state)
        manager.save(2, training.state)
    moved = tmp_path / "_incomplete_checkpoints" / "checkpoint-2"
    assert (moved / "model.safetensors").is_file()
    assert (tmp_path / "checkpoint-7" / "model.safetensors").is_file()
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").info.step == 2


# ---- a path


def test_a_path_in_the_run_or_elsewhere_is_taken(tmp_path: Path) -> None:
    run_of(tmp_path / "a", 1, 2)
    report = resumed(tmp_path / "a", tmp_path / "a" / "checkpoint-1")
    assert report is not None and report.step == 1
    report = resumed(tmp_path / "b", tmp_path / "a" / "checkpoint-2")
    assert report is not None and report.step == 2


@pytest.mark.parametrize("only_model", [False, True])
def test_a_path_that_lost_its_manifest_is_refused_and_not_taken_for_a_model(
    tmp_path: Path, only_model: bool
) -> None:
    run_of(tmp_path / "a", 1)
    path = tmp_path / "a" / "checkpoint-1"
    (path / "milepost.json").unlink()
    (path / "trainer_state.json").unlink()
    training = Training(seed=5)
    state = {"model": training.model} if only_model else training.state
    with (
        mp.CheckpointManager(tmp_path / "b", resume=path) as manager,
        pytest.raises(NotCommittedError, match="one of which is written last"),
    ):
        manager.resume(state)


def test_a_path_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path / "a", 1)
    path = tmp_path / "a" / "checkpoint-1"
    (path / "training" / "state.json").unlink()
    training = Training(seed=5)
    with mp.CheckpointManager(tmp_path / "b", resume=path) as manager:
        assert leaves_untouched(training, lambda: manager.resume(training.state))
        with pytest.raises(DamagedError, match=r"state\.json is missing"):
            manager.resume(training.state)


def test_a_path_where_nothing_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="checkpoint-4"):
        resumed(tmp_path / "b", tmp_path / "a" / "checkpoint-4")


def test_a_run_in_place_of_a_checkpoint_is_refused_with_their_names(tmp_path: Path) -> None:
    run_of(tmp_path / "a", 1, 2)
    with pytest.raises(NotCommittedError, match="name one of checkpoint-1, checkpoint-2"):
        resumed(tmp_path / "b", tmp_path / "a")


# ---- chosen before there is a model


def test_what_is_chosen_before_is_what_is_resumed(tmp_path: Path) -> None:
    before = run_of(tmp_path, 1, 2)
    with mp.CheckpointManager(tmp_path) as manager:
        assert manager.checkpoint_to_resume() == tmp_path / "checkpoint-2"
        assert manager.checkpoint_to_resume() == tmp_path / "checkpoint-2"
        training = Training(seed=5)
        report = manager.resume(training.state)
        assert report is not None and report.step == 2
        assert same(training.values(), before.values())
        manager.save(3, training.state)
    newest = mp.newest(tmp_path)
    assert newest is not None and newest.manifest.generation == 0


def test_a_damaged_one_is_passed_over_when_it_is_chosen(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    wrong = bytearray(weights.read_bytes())
    wrong[-1] ^= 1
    weights.write_bytes(wrong)
    with mp.CheckpointManager(tmp_path) as manager:
        path = manager.checkpoint_to_resume()
        assert path == tmp_path / "checkpoint-1"
        live = Training(seed=5)
        mp.load(path, {"model": live.model})
        with pytest.warns(CheckpointWarning, match="checkpoint-2"):
            report = manager.resume(live.state, weights=mp.Weights.ALREADY_READ)
    assert report is not None and report.step == 1
    assert [text.partition(":")[0] for text in report.passed_over] == ["checkpoint-2"]


@pytest.mark.parametrize("resume", [False, True])
def test_nothing_is_chosen_for_a_fresh_run(tmp_path: Path, resume: bool) -> None:
    with mp.CheckpointManager(tmp_path / "new", resume=resume) as manager:
        assert manager.checkpoint_to_resume() is None
        assert manager.resume(Training().state) is None


def test_a_named_one_is_chosen_and_refused_alike(tmp_path: Path) -> None:
    run_of(tmp_path / "a", 1)
    path = tmp_path / "a" / "checkpoint-1"
    with mp.CheckpointManager(tmp_path / "b", resume=path) as manager:
        assert manager.checkpoint_to_resume() == path
        report = manager.resume(Training(seed=5).state)
        assert report is not None and report.step == 1
    with (
        mp.CheckpointManager(tmp_path / "c", resume=torn(tmp_path / "d", 1)) as manager,
        pytest.raises(NotCommittedError),
    ):
        manager.checkpoint_to_resume()


# ---- on two ranks


def choose_on(rank: int, world_size: int, run: Path) -> Any:
    with mp.CheckpointManager(run) as manager:
        chosen = manager.checkpoint_to_resume()
        report = manager.resume(Training(seed=rank).state, missing=mp.Missing.KEEP)
    return str(chosen), None if report is None else report.step


def test_all_ranks_choose_the_same(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    expected = (str(tmp_path / "checkpoint-2"), 2)
    assert run_world(2, choose_on, tmp_path) == [expected, expected]


def test_all_ranks_are_refused_alike(tmp_path: Path) -> None:
    torn(tmp_path, 3)
    outcomes = run_outcomes(2, choose_on, tmp_path)
    assert [outcome.error_class for outcome in outcomes] == ["NotCommittedError"] * 2
    assert all("checkpoint-3 (" in str(outcome.error) for outcome in outcomes)


def test_a_directory_that_cannot_be_listed_stops_all_ranks(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 1)
    shutil.copy(tmp_path / "run" / "checkpoint-1" / "milepost.json", tmp_path / "manifest")
    newer = tmp_path / "run" / "checkpoint-2"
    newer.mkdir()
    text = (
        (tmp_path / "manifest")
        .read_text()
        .replace('"format_version": "1.0"', '"format_version": "2.0"')
    )
    (newer / "milepost.json").write_text(text)
    outcomes = run_outcomes(2, choose_on, tmp_path / "run")
    assert [outcome.error_class for outcome in outcomes] == ["UnsupportedVersionError"] * 2
