"""Evaluation, the best checkpoint of a run, and its weights at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost_trainer.config import ConfigError
from milepost_trainer.training import BEST, Run, train
from tests.states import same
from tests.trainer.task_runs import history, run_task, task_config, write_lines
from tests.trainer.yaml_runs import LLAMA, MOE

# Of the loss, which falls, more: so that it is not the last checkpoint that is the best.
MOST_LOSS: dict[str, Any] = {
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("files")
    return write_lines(directory, "sft"), write_lines(directory, "sft", begin=50, count=9)


def evaluations(checkpoint: Path) -> dict[int, float]:
    return {e["step"]: e["eval_loss"] for e in history(checkpoint) if "eval_loss" in e}


def test_an_evaluation_is_the_mean_over_whole_batches_and_changes_nothing(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    lines, held_out = files
    run = Run(task_config(tmp_path, lines, "sft", eval_files=[str(held_out)]))
    state = torch.get_rng_state()
    found = run.evaluate()
    samples = run.splits["eval"].samples.columns()
    parts = [{k: v[begin : begin + 4] for k, v in samples.items()} for begin in (0, 4)]
    expected = sum(run.model.evaluate(part) for part in parts) / 2
    assert found == {"eval_loss": pytest.approx(expected, rel=1e-6)}
    assert torch.equal(torch.get_rng_state(), state)
    assert run.model.modules[0].training and run.batches.consumed == 0


def test_a_run_that_is_evaluated_has_the_weights_of_one_that_is_not(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    lines, held_out = files
    train(task_config(tmp_path / "a", lines, "sft"))
    train(task_config(tmp_path / "b", lines, "sft", eval_files=[str(held_out)], eval_steps=1))
    ends = [mp.Checkpoint.open(tmp_path / n / "checkpoint-6").read_weights() for n in ("a", "b")]
    assert same(*ends)
    assert [*evaluations(tmp_path / "b" / "checkpoint-6")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "mesh",
    [
        *("", "tp2"),
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("dp_shard2", "cp2", "dp_shard2 tp2", "dp_shard2 ep2", "cp2 ep2")
        ),
    ],
)
def test_the_best_weights_by_the_evaluation_are_left_at_the_end(
    mesh: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    lines, held_out = files
    changes = {**MOST_LOSS, "model_config": MOE if "ep" in mesh else LLAMA}
    end = run_task(tmp_path, lines, "sft", mesh, eval_files=[str(held_out)], **changes)
    seen = evaluations(end)
    best = max(seen, key=lambda step: seen[step])
    assert sorted(seen) == [2, 4, 6] and best != 6
    left = mp.Checkpoint.open(tmp_path / BEST)
    assert same(
        left.read_weights(), mp.Checkpoint.open(tmp_path / f"checkpoint-{best}").read_weights()
    )
    assert (tmp_path / BEST / "tokenizer.json").is_file()


def test_more_of_a_margin_is_better(tmp_path: Path) -> None:
    lines = write_lines(tmp_path, "dpo")
    held_out = write_lines(tmp_path, "dpo", begin=50, count=8)
    changes: dict[str, Any] = {
        "eval_files": [str(held_out)],
        "metric_for_best_model": "eval_rewards/margins",
        "load_best_model_at_end": True,
        "save_steps": 1,
        "max_steps": 4,
    }
    train(task_config(tmp_path / "run", lines, "dpo", **changes))
    margins = {
        e["step"]: e["eval_rewards/margins"]
        for e in history(tmp_path / "run" / "checkpoint-4")
        if "eval_loss" in e
    }
    best = max(margins, key=lambda step: margins[step])
    assert mp.Checkpoint.open(tmp_path / "run" / BEST).info.step == best
    assert (tmp_path / "run" / "best").resolve().name == f"checkpoint-{best}"


def test_fewer_samples_than_a_batch_cannot_be_evaluated(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    few = write_lines(tmp_path, "sft", count=3)
    with pytest.raises(ConfigError, match="eval_files: 3 samples are less than one batch"):
        Run(task_config(tmp_path, files[0], "sft", eval_files=[str(few)]))
