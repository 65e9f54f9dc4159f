"""A resume that lands before a save that was cut off says so."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import warnings
from pathlib import Path

import pytest

import milepost as mp
from milepost.errors import CheckpointWarning
from milepost.storage.lease import Owner
from milepost.storage.staging import OWNER_NAME, STAGING_PREFIX
from milepost.testing.faults import Ending, Fault, FaultPlan, record
from milepost.testing.forked import run_with_fault
from tests.manager.small_training import Training, same

LEFT = f"{STAGING_PREFIX}0123-checkpoint-20"
DEAD = Owner(host=Owner.this_process().host, boot_id="another", pid=1, start="1")


def save_at(run: Path, training: Training, step: int) -> None:
    with mp.CheckpointManager(run, resume=mp.Resume.NEVER) as manager:
        manager.save(step, training.state)


def left_in(run: Path, owner: Owner | None, name: str = LEFT) -> None:
    (run / name).mkdir()
    if owner is not None:
        (run / name / OWNER_NAME).write_bytes(owner.to_bytes())


def passed_over(run: Path) -> list[str]:
    """What a resume says that it passed over: in its report, and once each as a warning."""
    with mp.CheckpointManager(run) as manager, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        manager.checkpoint_to_resume()
        report = manager.resume(Training(seed=1).state)
    assert report is not None
    texts = [str(each.message) for each in told if each.category is CheckpointWarning]
    assert texts == [f"{report.path} is resumed from, not {text}" for text in report.passed_over]
    assert all(f"passed over: {text}" in report.lines() for text in report.passed_over)
    return report.passed_over


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of step 10."""
    run = tmp_path_factory.mktemp("run")
    save_at(run, Training(), 10)
    return run


@pytest.mark.case("V16")
def test_at_every_cut_point_the_resume_lands_on_step_10_and_names_step_20(
    made: Path, tmp_path: Path
) -> None:
    later = Training()
    later.steps(2)
    run = Path(shutil.copytree(made, tmp_path / "whole"))
    operations = record(lambda: save_at(run, later, 20))
    cut = 0
    for nth in range(len(operations)):
        if operations[nth].name == "write" and nth % 4:
            continue  # the inside of a file looks the same everywhere
        run = Path(shutil.copytree(made, tmp_path / str(nth)))
        action = functools.partial(save_at, run, later, 20)
        assert run_with_fault(action, FaultPlan(nth, Fault.KILL_BEFORE)).ending is Ending.KILLED
        listing = mp.list_run(run)
        assert listing.newest is not None
        texts = passed_over(run)
        if listing.newest.step == 20:
            assert texts == []
            continue
        assert listing.newest.step == 10
        assert [text.partition(":")[0] for text in texts] == ["checkpoint-20"] * bool(
            listing.unfinished
        )
        cut += len(texts)
        shutil.rmtree(run)
    assert cut > 10


def test_what_was_cut_off_goes_at_the_next_save(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    left_in(run, DEAD)
    training = Training(seed=1)
    with mp.CheckpointManager(run) as manager:
        with pytest.warns(CheckpointWarning, match="checkpoint-20: its save was cut off"):
            manager.resume(training.state)
        assert same(training.values(), Training().values())
        assert (run / LEFT).is_dir()
        manager.save(11, training.state)
    listing = mp.list_run(run)
    assert listing.unfinished == () and [entry.step for entry in listing.committed] == [10, 11]
    assert [entry.manifest.generation for entry in listing.committed] == [0, 0]


@pytest.mark.parametrize(
    ("owner", "name", "is_told"),
    [
        (DEAD, LEFT, True),
        (None, LEFT, True),
        (DEAD, f"{STAGING_PREFIX}0123-checkpoint-10", True),
        (DEAD, f"{STAGING_PREFIX}0123-checkpoint-9", False),
        (DEAD, f"{STAGING_PREFIX}0123-merged", False),
        (Owner.this_process(), LEFT, False),
        (Owner(host="elsewhere", boot_id="b", pid=1, start="1"), LEFT, False),
    ],
    ids=["dead", "no owner", "replacing", "older", "no step", "alive", "another host"],
)
def test_a_left_over_is_what_a_dead_writer_of_a_newer_step_left(
    made: Path, tmp_path: Path, owner: Owner | None, name: str, is_told: bool
) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    left_in(run, owner, name)
    told = [name.partition("0123-")[2]] if is_told else []
    assert [text.partition(":")[0] for text in passed_over(run)] == told


def test_a_writer_of_another_host_is_taken_for_dead_after_a_day(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    left_in(run, Owner(host="elsewhere", boot_id="b", pid=1, start="1"))
    owner = run / LEFT / OWNER_NAME
    long_ago = owner.stat().st_mtime - 25 * 3600
    os.utime(owner, (long_ago, long_ago))
    assert len(passed_over(run)) == 1


def test_a_fresh_run_after_a_first_save_that_was_cut_off_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_in(tmp_path, DEAD)
    with mp.CheckpointManager(tmp_path) as manager:
        assert manager.resume(Training().state) is None
    assert "a fresh run; checkpoint-20: its save was cut off" in caplog.text
    assert [each.levelno for each in caplog.records if "fresh run" in each.message] == [
        logging.WARNING
    ]
