"""trainer_state.json as the Hugging Face Trainer reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from milepost.hf.trainer_state import BestCheckpoint, trainer_state


def refuse(token: str) -> NoReturn:
    raise AssertionError(f"{token} is not strict JSON")


def test_the_trainer_of_transformers_reads_the_file(tmp_path: Path) -> None:
    from transformers import TrainerState

    history: list[dict[str, Any]] = [{"loss": 1.5, "step": 10}, {"eval_loss": 1.25, "step": 20}]
    content, notes = trainer_state(
        global_step=20,
        epoch=0.5,
        log_history=history,
        best=BestCheckpoint(metric=1.25, step=20, path="run/checkpoint-20"),
        max_steps=40,
        num_train_epochs=1,
    )
    (tmp_path / "trainer_state.json").write_bytes(content)
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.epoch, state.max_steps) == (20, 0.5, 40)
    assert (state.best_metric, state.best_global_step) == (1.25, 20)
    assert state.best_model_checkpoint == "run/checkpoint-20"
    assert state.log_history == history
    assert notes == []


def test_the_fields_and_defaults_are_those_of_the_installed_trainer(tmp_path: Path) -> None:
    from transformers import TrainerState

    TrainerState().save_to_json(str(tmp_path / "theirs.json"))
    content, _ = trainer_state(global_step=0)
    assert content == (tmp_path / "theirs.json").read_bytes().replace(
        b'"epoch": 0,', b'"epoch": 0.0,'
    )
    assert set(json.loads(content)) == {field.name for field in dataclasses.fields(TrainerState)}


def test_values_without_a_json_form_become_null_and_are_named() -> None:
    content, notes = trainer_state(
        global_step=3,
        best=BestCheckpoint(metric=float("inf"), step=1, path="run/checkpoint-1"),
        log_history=[{"loss": float("nan")}, {"loss": 2.0, "grad": np.array([1.0, -np.inf])}],
    )
    document = json.loads(content, parse_constant=refuse)
    assert document["best_metric"] is None
    assert document["log_history"] == [{"loss": None}, {"loss": 2.0, "grad": [1.0, None]}]
    assert notes == [
        "trainer_state.json: best_metric: inf has no JSON form and is written as null",
        "trainer_state.json: log_history[0].loss: nan has no JSON form and is written as null",
        "trainer_state.json: log_history[1].grad[1]: -inf has no JSON form and is written as null",
    ]


def test_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    entry = {
        "a": np.float64(0.5),
        "b": np.int64(3),
        "c": torch.tensor(0.25, dtype=torch.bfloat16),
        "d": np.float32(1.5),
        "e": True,
        "f": Path("x"),
    }
    content, notes = trainer_state(global_step=1, log_history=[entry])
    plain = {"a": 0.5, "b": 3, "c": 0.25, "d": 1.5, "e": True, "f": "x"}
    assert json.loads(content)["log_history"] == [plain]
    assert notes == [
        f"trainer_state.json: log_history[0].f: a {type(Path('x')).__name__} is written as text"
    ]
