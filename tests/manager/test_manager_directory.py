"""The manager on the directory layout: a run of `checkpoint-<step>`."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import (
    CheckpointWarning,
    DamagedError,
    ExistsError,
    InvalidInputError,
    KeyMismatchError,
    LoadTornError,
    NoSpaceError,
    NotCommittedError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from milepost.storage import fileops
from tests.manager.small_training import Training, same


def run_steps(
    run: Path, last: int, *, every: int = 1, seed: int = 0, **options: Any
) -> tuple[Training, list[float]]:
    """Start or go on with a run until `last`; the training and the losses of this process."""
    training = Training(seed=seed)
    losses = []
    with mp.CheckpointManager(run, save=mp.EveryNSteps(every), **options) as manager:
        report = manager.resume(training.state)
        for step in range((report.step or 0) + 1 if report else 1, last + 1):
            losses.append(training.step())
            manager.maybe_save(step, training.state, metrics={"loss": losses[-1]})
    return training, losses


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in mp.list_run(run).committed]


def save_at(manager: mp.CheckpointManager, training: Training, *steps: int, **more: Any) -> None:
    for step in steps:
        manager.save(step, training.state, **more)


def flip(path: Path, at: int = -10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


WEIGHTS = "model.safetensors"


# ---- resume


@pytest.mark.parametrize("cut", [2, 5, 9])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, cut: int) -> None:
    whole, expected = run_steps(tmp_path / "whole", 12)
    run_steps(tmp_path / "cut", cut)
    second, losses = run_steps(tmp_path / "cut", 12, seed=99)
    assert losses == expected[cut:]
    assert same(second.values(), whole.values())


def test_an_exact_resume_says_so(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    with mp.CheckpointManager(tmp_path) as manager:
        report = manager.resume(Training(seed=3).state)
        assert report is not None
        assert (report.step, report.level, report.passed_over) == (2, mp.Level.EXACT, [])
        assert manager.load_report is report


@pytest.mark.case("V26")
@pytest.mark.parametrize("stop", range(1, 16))
def test_the_order_of_data_goes_on_after_a_stop_at_any_step(tmp_path: Path, stop: int) -> None:
    class Order:
        """Ten ids in batches of two, shuffled anew in each epoch."""

        def __init__(self) -> None:
            self.epoch, self.position = 0, 0

        def next(self) -> list[int]:
            order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch))
            batch = order[self.position : self.position + 2].tolist()
            self.position += 2
            if self.position == 10:
                self.epoch, self.position = self.epoch + 1, 0
            return batch

        def state_dict(self) -> dict[str, int]:
            return {"epoch": self.epoch, "position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch, self.position = state["epoch"], state["position"]

    whole = Order()
    expected = [whole.next() for _ in range(15)]
    order = Order()
    seen = [order.next() for _ in range(stop)]
    with mp.CheckpointManager(tmp_path) as manager:
        manager.save(stop, {"order": order})
    other = Order()
    with mp.CheckpointManager(tmp_path) as manager:
        assert manager.resume({"order": other}) is not None
    assert seen + [other.next() for _ in range(15 - stop)] == expected


@pytest.mark.case("V29")
def test_random_state_can_be_set_once_the_iterator_exists(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6))
    Training()
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    batches = iter(loader)
    next(batches)
    with mp.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"progress": {"batch": 1}})
    expected = torch.rand(3)
    torch.manual_seed(77)
    with mp.CheckpointManager(tmp_path) as manager:
        report = manager.resume({"progress": {}}, rng=mp.RngRestore.LATER)
    assert report is not None
    next(iter(loader))
    report.restore_rng()
    assert torch.equal(torch.rand(3), expected)


def test_nothing_there_is_a_fresh_run_for_auto_alone(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path / "new") as manager:
        assert manager.resume(training.state) is None
    with (
        mp.CheckpointManager(tmp_path / "new", resume=mp.Resume.MUST) as manager,
        pytest.raises(NotFoundError, match="no checkpoint to resume from"),
    ):
        manager.resume(training.state)
    with pytest.raises(NotFoundError):
        mp.CheckpointManager(tmp_path / "mistyped", resume=mp.Resume.MUST)
    assert not (tmp_path / "mistyped").exists()
    with (
        mp.CheckpointManager(tmp_path / "new", resume=tmp_path / "run" / "checkpoint-1") as manager,
        pytest.raises(NotFoundError, match="checkpoint-1"),
    ):
        manager.resume(training.state)


@pytest.mark.case("V16")
def test_a_torn_newer_directory_is_passed_over_by_name(tmp_path: Path) -> None:
    run_steps(tmp_path, 10, every=10)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / WEIGHTS).write_bytes(b"cut short")
    training = Training(seed=1)
    with mp.CheckpointManager(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="checkpoint-10 is resumed from, not") as told:
            report = manager.resume(training.state)
        assert report is not None
        assert report.step == 10
        assert report.passed_over[0].startswith("checkpoint-20: ")
        assert told[0].filename == __file__
        save_at(manager, training, 20)
    assert steps_of(tmp_path) == [10, 20]
    assert (tmp_path / "_incomplete_checkpoints" / "checkpoint-20" / WEIGHTS).read_bytes()


@pytest.mark.case("C1.1")
@pytest.mark.parametrize("name", [WEIGHTS, "training/optimizer.safetensors", "training/state.json"])
def test_a_flipped_byte_is_found_and_the_older_one_taken(tmp_path: Path, name: str) -> None:
    expected, losses = run_steps(tmp_path, 3)
    flip(tmp_path / "checkpoint-3" / name)
    training = Training(seed=5)
    with mp.CheckpointManager(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="checkpoint-3"):
            report = manager.resume(training.state)
        assert report is not None
        assert report.step == 2
        assert training.step() == losses[2]
        save_at(manager, training, 3)
    newest = mp.newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.manifest.generation, newest.manifest.branch_step) == (3, 1, 2)
    assert (tmp_path / "_superseded_checkpoints" / "checkpoint-3").is_dir()
    assert same(training.values(), expected.values())


def test_sizes_alone_do_not_show_a_flipped_byte(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    flip(tmp_path / "checkpoint-2" / WEIGHTS)
    with mp.CheckpointManager(tmp_path, verify=mp.Verify.SIZES) as manager:
        report = manager.resume(Training().state)
    assert report is not None
    assert report.step == 2


@pytest.mark.case("C1.4")
def test_when_everything_is_damaged_that_is_an_error(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    for step in (1, 2):
        flip(tmp_path / f"checkpoint-{step}" / WEIGHTS)
    training = Training(seed=1)
    before = training.values()
    with (
        mp.CheckpointManager(tmp_path) as manager,
        pytest.raises(DamagedError, match=r"no checkpoint can be used.*checkpoint-2.*-1"),
    ):
        manager.resume(training.state)
    assert same(before, training.values())


def test_only_torn_or_foreign_things_are_never_a_fresh_run(tmp_path: Path) -> None:
    (tmp_path / "a" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "latest.safetensors").write_bytes(b"a trio of another layout")
    for name, text in (("a", "checkpoint-5"), ("b", "the trio layout")):
        with (
            mp.CheckpointManager(tmp_path / name) as manager,
            pytest.raises(NotCommittedError, match=text),
        ):
            manager.resume(Training().state)
        with mp.CheckpointManager(tmp_path / name, resume=mp.Resume.NEVER) as manager:
            assert manager.resume(Training().state) is None


def test_what_a_save_that_was_killed_leaves_is_a_fresh_run(tmp_path: Path) -> None:
    (tmp_path / ".milepost-staging-x").mkdir()
    with mp.CheckpointManager(tmp_path) as manager:
        assert manager.resume(Training().state) is None


def test_what_cannot_be_read_is_raised_and_not_stepped_back_from(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    manifest = tmp_path / "checkpoint-2" / "milepost.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # ELOOP, as good an error as EIO
    with mp.CheckpointManager(tmp_path) as manager, pytest.raises(StorageError) as raised:
        manager.resume(Training().state)
    assert not isinstance(raised.value, DamagedError)


def test_a_newer_format_is_raised_and_not_stepped_back_from(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    manifest = tmp_path / "checkpoint-2" / "milepost.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"1.0"', b'"9.0"', 1))
    with mp.CheckpointManager(tmp_path) as manager, pytest.raises(UnsupportedVersionError):
        manager.resume(Training().state)


def test_a_state_that_does_not_fit_is_raised_and_not_stepped_back_from(tmp_path: Path) -> None:
    run_steps(tmp_path, 2)
    training = Training(width=16)
    before = training.values()
    with mp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(mp.errors.ShapeMismatchError):
            manager.resume(training.state)
        with pytest.raises(KeyMismatchError, match="holds no ema"):
            manager.resume({**Training().state, "ema": {"x": 1}})
    assert same(before, training.values())


def test_an_object_that_refuses_its_state_tears_the_load(tmp_path: Path) -> None:
    class Fragile:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ArithmeticError("no")

    with mp.CheckpointManager(tmp_path) as manager:
        save_at(manager, Training(), 1, 2)
        manager.save(3, {"fragile": Fragile()})
    with mp.CheckpointManager(tmp_path) as manager, pytest.raises(LoadTornError):
        manager.resume({"fragile": Fragile()})


def test_a_new_horizon_of_the_schedule_is_named(tmp_path: Path) -> None:
    run_steps(tmp_path, 1)
    training = Training()
    training.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 200)
    with mp.CheckpointManager(tmp_path) as manager:
        report = manager.resume(training.state)
    assert report is not None
    assert any("scheduler: T_max is 30 as saved, not 200" in note for note in report.notes)


# ---- generations


def test_a_resume_from_an_older_step_supersedes_what_came_after(tmp_path: Path) -> None:
    run_steps(tmp_path, 4)
    training = Training()
    with mp.CheckpointManager(tmp_path, resume=tmp_path / "checkpoint-2") as manager:
        report = manager.resume(training.state)
        assert report is not None
        assert report.step == 2
        save_at(manager, training, 3)
    listing = mp.list_run(tmp_path)
    assert [(e.step, e.manifest.generation, e.superseded) for e in listing.committed] == [
        (1, 0, False),
        (2, 0, False),
        (4, 0, True),
        (3, 1, False),
    ]
    assert listing.newest is not None
    assert listing.newest.step == 3
    with mp.CheckpointManager(tmp_path) as manager:
        again = manager.resume(training.state)
        assert again is not None
        assert again.step == 3
        save_at(manager, training, 4)
    newest = mp.newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.manifest.generation, newest.manifest.branch_step) == (4, 1, 2)
    assert (tmp_path / "_superseded_checkpoints" / "checkpoint-4").is_dir()


def test_a_resume_from_the_newest_stays_in_its_generation(tmp_path: Path) -> None:
    run_steps(tmp_path, 1)
    run_steps(tmp_path, 2)
    first, second = mp.list_run(tmp_path).committed
    assert second.manifest.generation == 0
    assert second.manifest.parent_id == first.manifest.checkpoint_id


@pytest.mark.case("V22")
def test_beginning_again_beside_an_old_run_counts_the_new_saves_alone(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path) as manager:
        save_at(manager, Training(), 1000, metrics={"loss": 0.1})
    options: dict[str, Any] = {"resume": mp.Resume.NEVER, "keep": mp.KeepLast(1), "best": None}
    with mp.CheckpointManager(tmp_path, **options) as manager:
        save_at(manager, Training(), 10, 20)
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.current] == [20]
    assert [entry.step for entry in listing.committed] == [1000, 20], "the old one is left"


def test_a_first_save_without_the_resume_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    run_steps(tmp_path, 1)
    for resume in (mp.Resume.AUTO, mp.Resume.MUST, tmp_path / "checkpoint-1"):
        with (
            mp.CheckpointManager(tmp_path, resume=resume) as manager,
            pytest.raises(InvalidInputError, match=r"call manager\.resume\(state\)"),
        ):
            save_at(manager, Training(), 2)


def test_a_warm_start_from_another_run_begins_a_lineage(tmp_path: Path) -> None:
    run_steps(tmp_path / "old", 3)
    training = Training(seed=6)
    old = mp.newest(tmp_path / "old")
    assert old is not None
    with mp.CheckpointManager(tmp_path / "new", resume=old.path) as manager:
        report = manager.resume(training.state, moments=mp.Moments.FRESH)
        assert report is not None
        assert report.level is mp.Level.WARM_RESTART
        save_at(manager, training, 1)
    new = mp.newest(tmp_path / "new")
    assert new is not None
    assert (new.manifest.parent_id, new.manifest.generation) == (old.manifest.checkpoint_id, 0)


# ---- what is kept


@pytest.mark.case("V23")
def test_the_limit_and_the_numbers_hold_over_restarts(tmp_path: Path) -> None:
    run_steps(tmp_path, 12, keep=mp.KeepLast(3), best=None)
    assert steps_of(tmp_path) == [10, 11, 12]
    run_steps(tmp_path, 14, keep=mp.KeepLast(3), best=None)
    assert steps_of(tmp_path) == [12, 13, 14]


@pytest.mark.case("V22")
@pytest.mark.parametrize(("best_at", "limit"), [(1, 1), (3, 1), (5, 1), (1, 2), (3, 2)])
def test_the_best_and_the_newest_are_never_removed(
    tmp_path: Path, best_at: int, limit: int
) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(limit)) as manager:
        for step in range(1, 6):
            save_at(manager, training, step, metrics={"loss": 0.1 if step == best_at else 1.0})
    last = set(range(6 - limit, 6))
    assert set(steps_of(tmp_path)) == {best_at} | last


def test_the_one_resumed_from_and_pinned_ones_stay(tmp_path: Path) -> None:
    run_steps(tmp_path, 3)
    (tmp_path / "milepost-pins.json").write_text('{"steps": [1]}')
    training = Training()
    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(1), best=None) as manager:
        manager.resume(training.state)
        save_at(manager, training, 4, 5)
    assert steps_of(tmp_path) == [1, 3, 5]


def test_a_nan_is_never_best(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path) as manager:
        save_at(manager, training, 1, metrics={"loss": 2.0})
        save_at(manager, training, 2, metrics={"loss": math.nan})
        save_at(manager, training, 3, metrics={"loss": -math.inf})
    assert os.readlink(tmp_path / "best") == "checkpoint-1"


@pytest.mark.case("V21")
def test_newest_is_by_number(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(1), best=None) as manager:
        save_at(manager, Training(), 2, 9, 10, 9000, 10000)
    assert steps_of(tmp_path) == [10000]


# ---- links for people


@pytest.mark.case("V24")
def test_links_are_relative_and_never_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training()
    with mp.CheckpointManager(run) as manager:
        save_at(manager, training, 1, metrics={"loss": 0.5})
        save_at(manager, training, 2, metrics={"loss": 0.9})
    assert os.readlink(run / "latest") == "checkpoint-2"
    assert os.readlink(run / "best") == "checkpoint-1"
    moved = tmp_path / "moved"
    run.rename(moved)
    assert mp.Checkpoint.open(moved / "latest").info.step == 2
    for name in ("latest", "best"):
        (moved / name).unlink()
        (moved / name).symlink_to("checkpoint-777")
    with mp.CheckpointManager(moved) as manager:
        report = manager.resume(training.state)
        assert report is not None
        assert report.step == 2
        save_at(manager, training, 3, metrics={"loss": 0.7})
    assert os.readlink(moved / "latest") == "checkpoint-3"
    assert os.readlink(moved / "best") == "checkpoint-1"


def test_a_name_that_is_no_link_is_left_alone_and_noted(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with mp.CheckpointManager(tmp_path) as manager:
        report = manager.save(1, Training().state)
    assert any("latest is no symlink" in note for note in report.notes)
    assert (tmp_path / "latest").is_dir()


def test_a_file_system_without_links_costs_a_note(tmp_path: Path) -> None:
    def refuse(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "symlink":
            raise PermissionError(1, "Operation not permitted")
        return function(*arguments)

    with mp.CheckpointManager(tmp_path) as manager, fileops.hooked(refuse):
        report = manager.save(1, Training().state)
    assert any("no symlink to checkpoint-1" in note for note in report.notes)
    assert steps_of(tmp_path) == [1]


# ---- history, space, order


def test_the_history_grows_over_restarts(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path) as manager:
        manager.log(1, {"learning_rate": 0.1}, epoch=0.5)
        save_at(manager, training, 2, metrics={"loss": torch.tensor(0.5)})
    with mp.CheckpointManager(tmp_path) as manager:
        manager.resume(training.state)
        assert len(manager.log_history) == 2
        save_at(manager, training, 4, metrics={"loss": 0.25})
    written = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert written["log_history"] == [
        {"step": 1, "epoch": 0.5, "learning_rate": 0.1},
        {"step": 2, "loss": 0.5},
        {"step": 4, "loss": 0.25},
    ]
    assert written["global_step"] == 4


@pytest.mark.case("V18")
def test_the_first_save_says_when_the_next_two_will_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        values = list(real(path))
        values[1], values[3], values[4] = 1, 40_000, 40_000  # bytes: room for one more save
        return os.statvfs_result(values)

    training = Training()
    with mp.CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(os, "statvfs", nearly_full)
            report = manager.save(1, training.state)
        assert any("the next 2 saves do not fit" in note for note in report.notes)
        assert "the next 2 saves do not fit" in caplog.text
        assert not any("do not fit" in n for n in manager.save(2, training.state).notes)


@pytest.mark.parametrize("layout", [mp.Layout.DIRECTORY, mp.Layout.TRIO])
def test_room_that_cannot_be_told_costs_no_save(
    layout: mp.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr("milepost.manager.space_forecast.free_nbytes", stale)
    training = Training()
    with mp.CheckpointManager(tmp_path, layout=layout) as manager:
        if layout is mp.Layout.TRIO:
            manager.save_checkpoint(0, training.model)
            assert [path.name for path in manager.checkpoints_saved] == ["epoch_1"]
        else:
            report = manager.save(1, training.state)
            assert any("fit is not known: Stale file handle" in note for note in report.notes)


@pytest.mark.case("V18")
def test_a_disk_that_fills_up_costs_the_new_save_alone(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(1), best=None) as manager:
        save_at(manager, training, 1)
        count = 0

        def counting(operation: str, target: str, function: Any, arguments: Any) -> Any:
            nonlocal count
            count += operation in ("write", "reserve")
            return function(*arguments)

        with fileops.hooked(counting):
            save_at(manager, training, 2)
        for number in range(count):
            left = number

            def full(operation: str, target: str, function: Any, arguments: Any) -> Any:
                nonlocal left
                if operation in ("write", "reserve"):
                    if left == 0:
                        raise OSError(28, "No space left on device", target)
                    left -= 1
                return function(*arguments)

            with fileops.hooked(full), pytest.raises(NoSpaceError):
                save_at(manager, training, 3)
            assert steps_of(tmp_path) == [2]


def test_retention_comes_after_the_commit_and_its_trouble_is_a_note(tmp_path: Path) -> None:
    training = Training()
    order: list[str] = []

    def watch(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "rename" and "checkpoint-" in target and ".tmp" not in target:
            order.append("commit" if "staging" in target else "removal")
            if order[-1] == "removal":
                raise OSError(5, "Input/output error", target)
        return function(*arguments)

    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(1), best=None) as manager:
        save_at(manager, training, 1)
        with fileops.hooked(watch):
            report = manager.save(2, training.state)
    assert order == ["commit", "removal"]
    assert any("old checkpoints are still there" in note for note in report.notes)
    assert steps_of(tmp_path) == [1, 2]


def test_a_step_that_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path) as manager:
        save_at(manager, training, 1)
        with pytest.raises(ExistsError):
            save_at(manager, training, 1)
        kept = manager.save(1, training.state, on_existing=mp.OnExisting.KEEP)
        assert not kept.written
        training.step()
        assert manager.save(1, training.state, on_existing=mp.OnExisting.REPLACE).written


# ---- accumulation, policies, crash


def test_a_save_that_is_due_in_an_accumulation_waits_for_its_end(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, save=mp.EveryNSteps(2)) as manager:
        with manager.accumulating():
            assert manager.maybe_save(1, training.state) is None
            assert manager.maybe_save(2, training.state) is None
            with pytest.raises(InvalidInputError, match="middle of a gradient accumulation"):
                manager.save(2, training.state)
        report = manager.maybe_save(3, training.state)
        assert report is not None
        assert report.step == 3
        assert manager.maybe_save(3, training.state) is None
    assert steps_of(tmp_path) == [3]


def test_a_manager_without_a_save_policy_saves_only_when_told(tmp_path: Path) -> None:
    with (
        mp.CheckpointManager(tmp_path) as manager,
        pytest.raises(InvalidInputError, match="no save policy"),
    ):
        manager.maybe_save(1, Training().state)


def test_the_same_step_is_not_saved_again_after_a_resume(tmp_path: Path) -> None:
    run_steps(tmp_path, 4, every=2)
    training = Training()
    with mp.CheckpointManager(tmp_path, save=mp.EveryNSteps(2)) as manager:
        manager.resume(training.state)
        assert manager.maybe_save(4, training.state) is None


KILLED = """
    import os, signal, sys
    import milepost as mp
    from milepost.storage import fileops
    from tests.manager.small_training import Training
    run, kill_at = sys.argv[1], int(sys.argv[2])
    training = Training()
    manager = mp.CheckpointManager(run, keep=mp.KeepLast(1), best=None)
    manager.save(10, training.state)
    count = 0
    def count_down(operation, target, function, arguments):
        global count
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return function(*arguments)
    with fileops.hooked(count_down):
        manager.save(20, training.state)
    print(count)
"""


@pytest.mark.case("V16")
def test_a_kill_at_any_operation_of_a_save_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    def killed(kill_at: int) -> tuple[int, str]:
        run = tmp_path / str(kill_at)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(run), str(kill_at)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        return done.returncode, done.stdout

    code, out = killed(10_000)
    assert code == 0
    total = int(out)
    # Each operation is tried in the crash tests; here a few, to see the manager resume.
    for kill_at in sorted({0, 3, total // 2, total - 12, total - 6, total - 1}):
        assert killed(kill_at)[0] == -signal.SIGKILL
        training = Training(seed=1)
        run = tmp_path / str(kill_at)
        is_left = bool(mp.list_run(run).unfinished)
        with mp.CheckpointManager(run, keep=mp.KeepLast(1), best=None) as manager:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                report = manager.resume(training.state)
            assert report is not None
            assert report.step in (10, 20)
            assert [str(each.message) for each in told] == [
                f"{report.path} is resumed from, not {text}" for text in report.passed_over
            ]
            passed = [text.partition(":")[0] for text in report.passed_over]
            assert passed == ["checkpoint-20"] * is_left
            save_at(manager, training, 30)
        assert 30 in steps_of(run)
        assert not list(run.glob(".milepost-staging-*"))
        assert not list(run.glob(".milepost-aside-*"))
