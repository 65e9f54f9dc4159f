"""Saves and evaluations that keep different time: the best stays, and so does the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from tests.manager.small_training import Training

SAVE_EVERY, EVALUATE_EVERY, LAST = 3, 2, 18


@pytest.mark.case("V22")
@pytest.mark.parametrize("saving", mp.Saving)
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("best_at", [6, 12, 18])
def test_the_best_of_those_that_were_evaluated_is_never_removed(
    tmp_path: Path, best_at: int, limit: int, saving: Any
) -> None:
    training = Training()
    with mp.CheckpointManager(
        tmp_path,
        save=mp.EveryNSteps(SAVE_EVERY),
        keep=mp.KeepLast(limit),
        best=mp.BestMetric("loss"),
        saving=saving,
    ) as manager:
        manager.resume(training.state)
        for step in range(1, LAST + 1):
            training.step()
            is_evaluated = step % EVALUATE_EVERY == 0
            loss = {"loss": 0.1 if step == best_at else 1.0 + step} if is_evaluated else {}
            manager.maybe_save(step, training.state, metrics=loss)
            mp.wait_for_saves()
            if step >= best_at:
                assert (tmp_path / f"checkpoint-{best_at}").is_dir(), step
    newest = range(LAST, LAST - SAVE_EVERY * limit, -SAVE_EVERY)
    assert {entry.step for entry in mp.list_run(tmp_path).committed} == {best_at, *newest}
    assert os.readlink(tmp_path / "best") == f"checkpoint-{best_at}"
    assert os.readlink(tmp_path / "latest") == f"checkpoint-{LAST}"
