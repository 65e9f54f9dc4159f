"""A mirror belongs to one run, and another run that is pointed at it is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

import milepost as mp
from milepost.errors import CheckpointWarning, InvalidInputError
from milepost.manager.mirror_owner import RUN_ID_NAME
from tests.manager.small_training import Training
from tests.manager.test_mirror import files_of, mirrored, resume, save_at, steps_of
from tests.worlds import run_world


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def one_run(run: Path, copies: Path, *steps: int) -> None:
    training = Training()
    with mirrored(run, copies) as manager:
        manager.resume(training.state)
        save_at(manager, training, *steps)


def forget(*places: Path) -> None:
    """As it was before runs had ids."""
    for place in places:
        (place / RUN_ID_NAME).unlink()


def test_a_mirror_of_another_run_is_refused_and_stays_as_it_is(
    tmp_path: Path, copies: Path
) -> None:
    one_run(tmp_path / "one", copies, 1, 2)
    one_run(tmp_path / "two", tmp_path / "mirror of two", 1)
    before = files_of(copies)
    with pytest.raises(InvalidInputError, match=r"mirror: it holds checkpoints of another run"):
        mirrored(tmp_path / "two", copies)
    assert files_of(copies) == before
    with mp.CheckpointManager(tmp_path / "two"):  # nobody holds it after that
        pass


@pytest.mark.parametrize("marked", ["neither", "the run", "the mirror"])
def test_without_an_id_the_checkpoints_themselves_tell(
    tmp_path: Path, copies: Path, marked: str
) -> None:
    one_run(tmp_path / "one", copies, 1, 2)
    one_run(tmp_path / "two", tmp_path / "mirror of two", 1)
    forget(tmp_path / "one", copies, tmp_path / "two")
    if marked == "the run":
        mirrored(tmp_path / "two", tmp_path / "mirror of two").close()
    elif marked == "the mirror":
        mirrored(tmp_path / "one", copies).close()
        forget(tmp_path / "one")
    with pytest.raises(InvalidInputError, match="another run"):
        mirrored(tmp_path / "two", copies)
    one_run(tmp_path / "one", copies, 3)
    assert steps_of(copies) == [1, 2, 3]
    ids = {(place / RUN_ID_NAME).read_bytes() for place in (tmp_path / "one", copies)}
    assert len(ids) == 1


def test_a_run_knows_its_mirror_when_they_have_no_checkpoint_in_common_any_more(
    tmp_path: Path, copies: Path
) -> None:
    run = tmp_path / "run"
    one_run(run, copies, 1)
    with mp.CheckpointManager(run, keep=mp.KeepLast(1)) as manager:  # the mirror is away
        training = Training()
        manager.resume(training.state)
        save_at(manager, training, 2, 3)
    one_run(run, copies, 4)
    assert steps_of(copies) == [1, 3, 4]


def test_a_run_that_was_lost_takes_over_its_mirror(tmp_path: Path, copies: Path) -> None:
    run = tmp_path / "run"
    one_run(run, copies, 1, 2)
    shutil.rmtree(run)
    with pytest.warns(CheckpointWarning, match="gone from"):
        report, _ = resume(run, copies)
    assert report.step == 2
    assert (run / RUN_ID_NAME).read_bytes() == (copies / RUN_ID_NAME).read_bytes()


def test_what_turns_out_to_be_another_run_later_is_left_alone_and_noted(
    tmp_path: Path, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror was not mounted when the manager began."""
    one_run(tmp_path / "one", tmp_path / "unmounted", 1)
    training = Training()
    with caplog.at_level(logging.WARNING), mirrored(tmp_path / "two", copies) as manager:
        manager.resume(training.state)
        shutil.copytree(tmp_path / "unmounted", copies)
        before = files_of(copies)
        save_at(manager, training, 2)
    assert "another run" in caplog.text
    assert files_of(copies) == before


def refused_on_ranks(rank: int, world_size: int, run: Path, copies: Path) -> str:
    try:
        mirrored(run, copies)
    except InvalidInputError as error:
        return str(error)
    return "not refused"


def test_every_rank_is_told_of_it(tmp_path: Path, copies: Path) -> None:
    one_run(tmp_path / "one", copies, 1)
    one_run(tmp_path / "two", tmp_path / "mirror of two", 1)
    for text in run_world(2, refused_on_ranks, tmp_path / "two", copies):
        assert "another run" in text
