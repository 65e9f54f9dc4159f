"""Real worlds train, save, resume on the same shape bit by bit, and on others value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import milepost as mp
from tests.parallel.models import (
    DDP2,
    FSDP2,
    FSDP3,
    FSDP4,
    FSDP_TP,
    HSDP,
    ONE,
    TP2,
    Shape,
    gathered,
    start,
)
from tests.worlds import run_world

STEPS = 3
SHAPES = [DDP2, FSDP2, FSDP3, FSDP4, HSDP, TP2, FSDP_TP]


def train_and_save(rank: int, world_size: int, shape: Shape, run: Path, tied: bool = False) -> Any:
    """Train, save in the middle, go on: losses after the save, and the state at the save."""
    training = start(shape, tied=tied)
    for _ in range(STEPS):
        training.step()
    report = mp.save(run / f"checkpoint-{STEPS}", training.state(), step=STEPS)
    saved = gathered(training)
    losses = [training.step() for _ in range(STEPS)]
    return losses, saved, gathered(training), report.checkpoint_id


def resume(rank: int, world_size: int, shape: Shape, run: Path, tied: bool = False) -> Any:
    training = start(shape, seed=7, tied=tied)
    training.step()
    report = mp.load(run / f"checkpoint-{STEPS}", training.state())
    loaded = gathered(training)
    losses = [training.step() for _ in range(STEPS)]
    return losses, loaded, gathered(training), report.level.value


def reshard(rank: int, world_size: int, shape: Shape, run: Path, tied: bool = False) -> Any:
    training = start(shape, seed=7, tied=tied)
    state = training.state()
    report = mp.load(run / f"checkpoint-{STEPS}", state, missing=mp.Missing.KEEP)
    return gathered(training), report.level.value, report.lines()


def in_world(shape: Shape, function: Any, *arguments: Any) -> list[Any]:
    return run_world(shape.world_size, function, shape, *arguments)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [n for n, tensor in expected.items() if not torch.equal(found[n], tensor)]
    assert differing == []


@pytest.mark.case("C2.11")
@pytest.mark.case("C2.12")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_resume_on_the_same_shape_equals_the_run_that_never_stopped(
    shape: Shape, tmp_path: Path
) -> None:
    first = in_world(shape, train_and_save, tmp_path)
    second = in_world(shape, resume, tmp_path)
    for (losses, saved, end, _), (losses2, loaded, end2, level) in zip(first, second, strict=True):
        assert level == "exact"
        assert_same(loaded, saved)
        assert losses2 == losses
        assert_same(end2, end)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_saved_directory_is_the_gathered_model_for_transformers(
    shape: Shape, tmp_path: Path
) -> None:
    results = in_world(shape, train_and_save, tmp_path)
    saved = results[0][1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    for name, param in loaded.named_parameters():
        assert torch.equal(param, saved[name]), name
    report = mp.Checkpoint.open(tmp_path / f"checkpoint-{STEPS}").verify()
    assert report.problems == ()
    assert len({result[3] for result in results}) == 1


PAIRS = [
    (FSDP4, ONE), (FSDP4, TP2), (FSDP4, FSDP3), (FSDP_TP, ONE), (FSDP_TP, FSDP2), (FSDP_TP, TP2),
    (TP2, ONE), (TP2, FSDP_TP), (HSDP, FSDP3), (ONE, FSDP_TP), (DDP2, FSDP4), (FSDP3, DDP2),
]  # fmt: skip


@pytest.mark.case("E7")
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda s: str(s))
def test_another_shape_resumes_with_the_same_weights_and_moments(
    before: Shape, after: Shape, tmp_path: Path
) -> None:
    saved = in_world(before, train_and_save, tmp_path)[0][1]
    for found, level, lines in in_world(after, reshard, tmp_path):
        assert_same(found, saved)
        assert level in ("resharded", "warm-restart"), lines


@pytest.mark.parametrize("shape", [FSDP2, FSDP_TP], ids=str)
def test_tied_weights_are_stored_once_and_come_back_tied(shape: Shape, tmp_path: Path) -> None:
    first = in_world(shape, train_and_save, tmp_path, True)
    checkpoint = mp.Checkpoint.open(tmp_path / f"checkpoint-{STEPS}")
    assert dict(checkpoint.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    for (losses, *_), (losses2, *_) in zip(
        first, in_world(shape, resume, tmp_path, True), strict=True
    ):
        assert losses2 == losses
