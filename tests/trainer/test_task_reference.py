"""Scores of the frozen base: kept in every checkpoint, and refused beside other data or weights."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.tools.export import export_checkpoint
from milepost_trainer.config import ConfigError
from milepost_trainer.tasks import REFERENCE_FILE, ReferenceTask
from milepost_trainer.training import Run, train
from tests.trainer.task_runs import (
    COUNT,
    REFERENCED,
    different,
    stopped,
    task_config,
    write_lines,
)
from tests.trainer.yaml_runs import END, LLAMA, SAVED, WITHOUT_DROPOUT

PRECOMPUTED: dict[str, Any] = {"precompute_reference_logps": True}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("lines"), "dpo")


@pytest.fixture(scope="module")
def begun(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("begun"), lines, "dpo")


def begin(directory: Path, lines: Path, task: str) -> Path:
    """A run that has come to its first save, with scores of two splits."""
    others = str(evaluated(directory, task=task))
    stopped(directory / "run", lines, task, **PRECOMPUTED, eval_files=[others])
    return directory / "run"


def evaluated(directory: Path, begin: int = 40, task: str = "dpo") -> Path:
    return write_lines(directory, task, begin=begin, count=5)


def copied(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_the_file_has_the_scores_of_each_split_with_what_they_are_of(
    begun: Path, lines: Path
) -> None:
    table = torch.load(begun / f"checkpoint-{SAVED}" / REFERENCE_FILE, weights_only=True)
    assert table["settings"]["task"] == "dpo" and table["settings"]["dtype"] == "float32"
    assert {name: split["rows"] for name, split in table["splits"].items()} == {
        "train": COUNT,
        "eval": 5,
    }
    run = Run(task_config(begun, lines, "dpo", model_config=LLAMA))
    assert isinstance(run.task, ReferenceTask)
    samples = run.batches.samples
    for split in table["splits"].values():
        assert split["scores"].shape == (split["rows"], 2)
        assert len({*split["token_digests"].tolist()}) == split["rows"]
    assert torch.equal(table["splits"]["train"]["token_digests"], samples.digests())
    live = run.task.reference.scores(samples.columns())
    assert torch.allclose(table["splits"]["train"]["scores"], live, atol=1e-5)


@pytest.mark.parametrize("task", REFERENCED)
def test_a_resume_takes_the_scores_of_the_checkpoint(
    task: str, begun: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = write_lines(tmp_path, task)
    run = copied(begun, tmp_path) if task == "dpo" else begin(tmp_path, lines, task)
    others = [str(evaluated(tmp_path, task=task))]
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(task_config(run, lines, task, **PRECOMPUTED, eval_files=others))
    assert f"reference scores of {COUNT + 5} samples restored" in caplog.text
    files = [run / f"checkpoint-{step}" / REFERENCE_FILE for step in (SAVED, END)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_scores_are_part_of_a_run_and_not_of_its_model(begun: Path, tmp_path: Path) -> None:
    checkpoint = mp.Checkpoint.open(begun / f"checkpoint-{SAVED}")
    manifest = json.loads((begun / f"checkpoint-{SAVED}" / "milepost.json").read_text())
    assert REFERENCE_FILE not in manifest["needs"]
    export_checkpoint(checkpoint.path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / REFERENCE_FILE).exists()


def test_scores_of_other_samples_are_refused_with_what_differs(
    begun: Path, lines: Path, tmp_path: Path
) -> None:
    run = copied(begun, tmp_path)
    other = str(evaluated(tmp_path, begin=41))
    with pytest.raises(ConfigError, match=r"other tokens: 5 samples of eval differ, .* number 0"):
        train(task_config(run, lines, "dpo", **PRECOMPUTED, eval_files=[other]))
    more = write_lines(tmp_path, "dpo", begin=40, count=6)
    with pytest.raises(ConfigError, match=r"has 5 samples of eval, the files have 6"):
        train(task_config(run, lines, "dpo", **PRECOMPUTED, eval_files=[str(more)]))
    with pytest.raises(ConfigError, match=r"train_files.* give other samples"):
        train(task_config(run, more, "dpo", **PRECOMPUTED))
    # without the table, the base is asked
    train(task_config(run, lines, "dpo", eval_files=[other]))


def test_a_split_that_has_no_scores_is_named(lines: Path, tmp_path: Path) -> None:
    stopped(tmp_path / "run", lines, "dpo", **PRECOMPUTED)
    files = [str(evaluated(tmp_path))]
    with pytest.raises(ConfigError, match="has none for the split eval"):
        train(task_config(tmp_path / "run", lines, "dpo", **PRECOMPUTED, eval_files=files))


@pytest.mark.parametrize("precomputed", [PRECOMPUTED, {}], ids=["precomputed", "live"])
def test_another_base_under_a_run_is_refused(
    precomputed: dict[str, Any], lines: Path, tmp_path: Path
) -> None:
    made = write_lines(tmp_path, "sft")
    for name, seed in (("a", 0), ("b", 1)):
        train(task_config(tmp_path / name, made, "sft", max_steps=1, seed=seed))
    start: dict[str, dict[str, Any]] = {
        name: {"model_config": None, "model_name_or_path": str(tmp_path / name / "checkpoint-1")}
        for name in ("a", "b")
    }
    stopped(tmp_path / "run", lines, "dpo", **precomputed, **start["a"])
    with pytest.raises(ConfigError, match=r"base was \w+, is \w+ \(.*a/checkpoint-1, now .*b/"):
        train(task_config(tmp_path / "run", lines, "dpo", **precomputed, **start["b"]))
    shutil.move(tmp_path / "a" / "checkpoint-1", tmp_path / "moved")  # is still the base
    moved: dict[str, Any] = {"model_config": None, "model_name_or_path": str(tmp_path / "moved")}
    train(task_config(tmp_path / "run", lines, "dpo", **precomputed, **moved))


def test_another_configuration_of_a_random_base_is_refused(
    begun: Path, lines: Path, tmp_path: Path
) -> None:
    run = copied(begun, tmp_path)
    with pytest.raises(ConfigError, match=r"base was .* random weights of seed 0"):
        train(task_config(run, lines, "dpo", model_config=WITHOUT_DROPOUT))


def test_scores_that_were_not_kept_are_computed_from_the_base(
    lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path / "run", lines, "dpo")
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(task_config(tmp_path / "run", lines, "dpo", **PRECOMPUTED))
    assert "samples computed with random weights of seed 0" in caplog.text
    assert (tmp_path / "run" / f"checkpoint-{END}" / REFERENCE_FILE).is_file()


def test_a_policy_that_moves_leaves_its_reference_alone(lines: Path, tmp_path: Path) -> None:
    run = Run(task_config(tmp_path, lines, "dpo"))
    assert isinstance(run.task, ReferenceTask)
    batch = run.batches.next()
    before = run.task.reference.scores(batch)
    different(run.model.modules[0])
    assert torch.equal(run.task.reference.scores(batch), before)
    assert not torch.allclose(run.task.score(run.model, batch), before)
