"""The best checkpoint of a run at the end of training, whatever topology saved it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import DamagedError, InvalidInputError, NotFoundError
from tests.manager.small_training import Training
from tests.parallel.models import FSDP2, FSDP_TP, ONE, TP2, Shape, gathered, start
from tests.worlds import run_outcomes, run_world

LOSSES = {1: 0.9, 2: 0.3, 3: 0.5}


def weights_of(training: Training) -> list[torch.Tensor]:
    return [param.detach().clone() for param in training.model.parameters()]


def trained(manager: Any, training: Training, losses: dict[int, Any]) -> dict[int, Any]:
    """Steps and saves; the weights at each save."""
    kept = {}
    for step, loss in losses.items():
        training.step()
        kept[step] = weights_of(training)
        metrics = {} if loss is None else {"eval_loss": loss, "accuracy": 1 - loss}
        handle = manager.save(step, training.state, metrics=metrics)
        assert handle is not None
    return kept


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BEST = mp.BestMetric("eval_loss")


@pytest.mark.parametrize(
    ("best", "step"),
    [(BEST, 2), (mp.BestMetric("accuracy", mp.BestMode.MIN), 1)],
)
def test_only_the_weights_of_the_best_one_come_back(
    tmp_path: Path, best: mp.BestMetric, step: int
) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=best) as manager:
        manager.resume(training.state)
        kept = trained(manager, training, LOSSES)
        found = manager.best()
        assert found is not None
        assert (found.step, found.path) == (step, str(tmp_path / f"checkpoint-{step}"))
        before = training.values()
        report = manager.load_best(training.state)
        after = training.values()
    assert (report.step, report.level) == (step, mp.Level.WEIGHTS_ONLY)
    assert equal(weights_of(training), kept[step])
    rest = [name for name in before if not name.startswith("model.")]
    assert all(torch.equal(before[name], after[name]) for name in rest)


def test_a_save_behind_training_counts_too(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=BEST, saving=mp.Saving.ASYNC) as manager:
        manager.resume(training.state)
        kept = trained(manager, training, {1: 0.9, 2: 0.3})
        report = manager.load_best({"model": training.model})
    assert report.step == 2 and equal(weights_of(training), kept[2])


def test_the_run_stands_where_it_stood(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=BEST) as manager:
        manager.resume(training.state)
        trained(manager, training, LOSSES)
        manager.load_best(training.state)
        manager.save(4, training.state)
    entries = mp.list_run(tmp_path).current
    ids = [entry.manifest.checkpoint_id for entry in entries]
    assert [entry.step for entry in entries] == [1, 2, 3, 4]
    assert (entries[3].manifest.parent_id, entries[3].manifest.generation) == (ids[2], 0)


def test_what_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=BEST) as manager:
        manager.resume(training.state)
        trained(manager, training, {1: 0.9, 2: math.nan, 3: -math.inf, 4: None})
        assert manager.load_best(training.state).step == 1


def test_without_the_metric_there_is_no_best_and_a_load_is_refused(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=mp.BestMetric("f1")) as manager:
        manager.resume(training.state)
        with pytest.raises(NotFoundError, match="no committed checkpoint to choose the best of"):
            manager.load_best(training.state)
        trained(manager, training, LOSSES)
        assert manager.best() is None
        with pytest.raises(
            NotFoundError, match=r"metric 'f1'.* have accuracy, eval_loss"
        ) as caught:
            manager.load_best(training.state)
        assert "none of 3 checkpoints" in str(caught.value)


def test_a_manager_without_a_metric_is_refused(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=None) as manager:
        manager.resume(training.state)
        assert manager.best() is None
        with pytest.raises(InvalidInputError, match="best=BestMetric"):
            manager.load_best(training.state)


def test_a_state_without_a_model_is_refused(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=BEST) as manager:
        manager.resume(training.state)
        trained(manager, training, LOSSES)
        with pytest.raises(InvalidInputError, match="the state has none"):
            manager.load_best({"optimizer": training.optimizer})


def test_a_damaged_best_is_an_error_and_not_the_second_best(tmp_path: Path) -> None:
    training = Training()
    with mp.CheckpointManager(tmp_path, best=BEST) as manager:
        manager.resume(training.state)
        trained(manager, training, LOSSES)
        weights = tmp_path / "checkpoint-2" / "model.safetensors"
        wrong = bytearray(weights.read_bytes())
        wrong[-1] ^= 1
        weights.write_bytes(wrong)
        before = weights_of(training)
        with pytest.raises(DamagedError, match=r"model\.safetensors"):
            manager.load_best(training.state)
        assert equal(weights_of(training), before)


# ---- topologies


def save_run(rank: int, world_size: int, shape: Shape, run: Path) -> Any:
    training = start(shape)
    kept = {}
    with mp.CheckpointManager(run, best=BEST) as manager:
        manager.resume(training.state())
        for step, loss in LOSSES.items():
            training.step()
            kept[step] = gathered(training)
            manager.save(step, training.state(), metrics={"eval_loss": loss})
    return kept[2]


def load_best_on(rank: int, world_size: int, shape: Shape, run: Path) -> Any:
    training = start(shape, seed=7)
    with mp.CheckpointManager(run, best=BEST) as manager:
        report = manager.load_best(training.state())
    return report.step, gathered(training)


def moved(tmp_path: Path, saved: Shape, loaded: Shape) -> None:
    expected = run_world(saved.world_size, save_run, saved, tmp_path)[0]
    for step, found in run_world(loaded.world_size, load_best_on, loaded, tmp_path):
        assert step == 2
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_best_comes_back_on_two_ranks_of_fsdp(tmp_path: Path) -> None:
    moved(tmp_path, FSDP2, FSDP2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(FSDP_TP, FSDP_TP), (FSDP_TP, ONE), (ONE, FSDP_TP), (TP2, FSDP2), (FSDP2, TP2)],
    ids=str,
)
def test_the_best_comes_back_on_any_topology(tmp_path: Path, saved: Shape, loaded: Shape) -> None:
    """Also on several axes at once, where other programs refuse it."""
    moved(tmp_path, saved, loaded)


def refused_on(rank: int, world_size: int, run: Path) -> None:
    with mp.CheckpointManager(run, best=mp.BestMetric("f1")) as manager:
        manager.load_best(start(FSDP2).state())


def test_all_ranks_are_refused_alike(tmp_path: Path) -> None:
    run_world(2, save_run, FSDP2, tmp_path)
    outcomes = run_outcomes(2, refused_on, tmp_path)
    assert [outcome.error_class for outcome in outcomes] == ["NotFoundError"] * 2
