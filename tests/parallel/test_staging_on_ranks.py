"""`Staging.FULL` on ranks: what one of them cannot read leaves all of them as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointError, LoadTornError
from milepost.format.header import read_header
from tests.parallel.models import FSDP2, FSDP4, Shape, Training, gathered, start
from tests.parallel.test_optimizer_parts_on_ranks import (
    QUANTISED,
    Weights,
    save_quantised,
    states,
)
from tests.state.quantised import QuantisedAdam
from tests.states import flip, same
from tests.worlds import run_world

FULL, WHILE = mp.Staging.FULL, mp.Verify.WHILE_READING


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def held(training: Training) -> dict[str, Any]:
    """All that this rank holds of weights and moments, and the rest of the state."""
    found: dict[str, Any] = {n: local(p) for n, p in training.model.named_parameters()}
    for number, slots in enumerate(training.optimizer.state.values()):
        found |= {f"{number}.{slot}": local(value) for slot, value in slots.items()}
    rest = {"data": training.batches.state_dict(), "lr": training.scheduler.state_dict()}
    return {**found, **rest, "random": torch.get_rng_state()}


def save(rank: int, size: int, run: Path) -> None:
    training = start(FSDP2)
    training.step()
    mp.save(run / "checkpoint-1", training.state(), step=1)


def in_training() -> Training:
    training = start(FSDP2, seed=5)
    training.step()
    training.step()
    return training


def last_row(file: Path, name: str) -> int:
    """A byte of the last row of a tensor, which the last rank holds alone."""
    header = read_header(file)
    return header.data_start + header.tensors[name].end - 1


def load_damaged(rank: int, size: int, run: Path) -> tuple[str, str, bool, bool]:
    training = in_training()
    before = held(training)
    with pytest.raises(CheckpointError) as refused:
        mp.load(run / "checkpoint-1", training.state(), staging=FULL, verify=WHILE)
    is_same = same(held(training), before)
    with pytest.raises(LoadTornError):
        mp.load(run / "checkpoint-1", training.state(), verify=WHILE)
    error = refused.value
    return type(error).__name__, str(error), is_same, same(held(training), before)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("model.safetensors", "model.embed_tokens.weight"),
        ("training/optimizer.safetensors", "model.embed_tokens.weight.exp_avg_sq"),
    ],
)
def test_a_damaged_part_of_one_rank_leaves_all_untouched(
    tmp_path: Path, file: str, name: str
) -> None:
    run_world(2, save, tmp_path)
    place = tmp_path / "checkpoint-1" / file
    names = [each for each in read_header(place).tensors if each.endswith(name.rsplit(".")[-1])]
    flip(place, last_row(place, name if name in names else names[0]))
    for kind, text, is_same, is_same_without in run_world(2, load_damaged, tmp_path):
        assert kind == "DamagedError" and "are not those that were saved" in text
        assert is_same, "every bit is what it was, on both ranks"
        assert not is_same_without, "straight into the state, some of it was filled"


def load_unreadable(rank: int, size: int, run: Path) -> bool:
    """Rank 1 cannot read; the files are shared reads, in which it goes on answering."""
    training = in_training()
    before = held(training)
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    options = mp.ReadOptions(mode=mp.ReadMode.SHARED)
    files = run / "checkpoint-1"
    if rank == 1:
        os.preadv = failing  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError, match="Input/output error") as refused:
            mp.load(files, {"model": training.model}, staging=FULL, options=options)
    finally:
        os.preadv = real
    assert not isinstance(refused.value, LoadTornError)
    is_same = same(held(training), before)
    mp.load(files, training.state(), staging=FULL, options=options)
    other = in_training()
    mp.load(files, other.state())
    assert same(gathered(training), gathered(other))
    return is_same


def test_a_rank_that_cannot_read_leaves_all_untouched_and_the_next_load_works(
    tmp_path: Path,
) -> None:
    run_world(2, save, tmp_path)
    assert run_world(2, load_unreadable, tmp_path) == [True, True]


def load_on(rank: int, size: int, run: Path, shape: Shape) -> bool:
    straight, staged = start(shape, seed=6), start(shape, seed=7)
    for training, staging in ((straight, mp.Staging.NONE), (staged, FULL)):
        state = {"model": training.model, "optimizer": training.optimizer}
        mp.load(run / "checkpoint-1", state, staging=staging)
    return same(gathered(staged), gathered(straight)) and same(held(staged), held(straight))


def test_another_topology_is_staged_as_it_is_loaded(tmp_path: Path) -> None:
    run_world(2, save, tmp_path)
    assert all(run_world(4, load_on, tmp_path, FSDP4))


def load_anew(rank: int, size: int, run: Path) -> tuple[bool, int]:
    found = []
    for staging in mp.Staging:
        model = Weights(QUANTISED, seed=2)
        optimizer = QuantisedAdam(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        path = run / "checkpoint-3"
        report = mp.load(path, state, blocks=mp.BlockPolicy.REQUANTISE, staging=staging)
        found.append(states(model, optimizer))
    return same(found[0], found[1]), len(report.optimizers["optimizer"].requantised)


@pytest.mark.case("V37")
def test_quantised_state_is_quantised_anew_from_what_was_staged(tmp_path: Path) -> None:
    run_world(2, save_quantised, tmp_path)
    for is_same, count in run_world(4, load_anew, tmp_path):
        assert is_same and count


def load_differently(rank: int, size: int, run: Path) -> str:
    training = in_training()
    staging = FULL if rank else mp.Staging.NONE
    with pytest.raises(CheckpointError) as refused:
        mp.load(run / "checkpoint-1", training.state(), staging=staging)
    return str(refused.value)


def test_ranks_that_stage_differently_are_refused(tmp_path: Path) -> None:
    run_world(2, save, tmp_path)
    for text in run_world(2, load_differently, tmp_path):
        assert "the same read mode and staging" in text
