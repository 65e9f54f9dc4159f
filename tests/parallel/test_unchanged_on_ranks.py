"""Frozen weights that several ranks hold parts of are linked by one decision, or written by all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.plan import parts
from tests.parallel.models import FSDP2, TP2, Shape, Training, gathered, start
from tests.worlds import run_world

FROZEN = "model-00001-of-00002.safetensors"
Linked = tuple[str, ...]


def frozen_but_norms(shape: Shape) -> Training:
    parts.FROZEN_NBYTES = 1
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training = start(shape)
    for name, parameter in training.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return training


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one | two if not torch.equal(one[name], two[name])]


def save_behind_twice(
    rank: int, world_size: int, shape: Shape, run: Path
) -> tuple[Linked, float, list[str]]:
    """What the second save linked, the share of bytes that it copied, and values that differ."""
    training = frozen_but_norms(shape)
    mp.save_async(run / "checkpoint-1", training.state(), step=1, rng=mp.Rng.LEAVE_OUT).wait()
    expected = gathered(training)
    path, late = run / "checkpoint-2", mp.Overlap.UNTIL_STEP
    handle = mp.save_async(path, training.state(), step=2, rng=mp.Rng.LEAVE_OUT, overlap=late)
    training.step()
    report = handle.wait()
    other = frozen_but_norms(shape)
    mp.load(path, other.state())
    share = report.phase_nbytes["snapshot"] / report.nbytes
    return report.linked, share, differing(gathered(other), expected)


@pytest.mark.parametrize("shape", [FSDP2, TP2], ids=str)
def test_what_no_rank_changed_is_not_copied_unless_it_travels(shape: Shape, tmp_path: Path) -> None:
    for linked, share, unlike in run_world(2, save_behind_twice, shape, tmp_path):
        assert linked == (FROZEN,) and unlike == []
        assert share < 0.05 if shape is FSDP2 else share > 0.05


def save_four_times(
    rank: int, world_size: int, shape: Shape, run: Path, unchanged: mp.Unchanged
) -> tuple[list[Linked], list[int], list[list[str]]]:
    """What each save linked and wrote, and which values differ when they are loaded."""
    training = frozen_but_norms(shape)
    linked: list[Linked] = []
    written: list[int] = []
    unlike: list[list[str]] = []
    for step in range(1, 5):
        training.step()
        if step == 3:  # on one rank alone
            with torch.no_grad():
                weight: Any = training.model.model.layers[1].mlp.down_proj.weight  # type: ignore[union-attr,index]
                weight.to_local()[0, 0] += 1.0 if rank == 1 else 0.0
        path = run / f"checkpoint-{step}"
        keywords: Any = {"step": step, "rng": mp.Rng.LEAVE_OUT, "unchanged": unchanged}
        if step < 4:
            report = mp.save(path, training.state(), **keywords)
        else:
            report = mp.save_async(path, training.state(), **keywords).wait()
        linked.append(report.linked)
        written.append(report.phase_nbytes["write"])
        expected = gathered(training)
        other = frozen_but_norms(shape)
        mp.load(path, other.state())
        unlike.append(differing(gathered(other), expected))
    return linked, written, unlike


@pytest.mark.parametrize("unchanged", [mp.Unchanged.LINK_VERIFIED, mp.Unchanged.LINK])
@pytest.mark.parametrize("shape", [FSDP2, TP2], ids=str)
def test_all_ranks_link_what_none_of_them_changed(
    shape: Shape, unchanged: mp.Unchanged, tmp_path: Path
) -> None:
    found = run_world(2, save_four_times, shape, tmp_path, unchanged)
    for linked, written, unlike in found:
        assert linked == [(), (FROZEN,), (), (FROZEN,)]
        assert unlike == [[]] * 4
        assert max(written[1], written[3]) < min(written[0], written[2]) / 2
    inodes = [(tmp_path / f"checkpoint-{step}" / FROZEN).stat().st_ino for step in range(1, 5)]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    for step in range(1, 5):
        assert not mp.Checkpoint.open(tmp_path / f"checkpoint-{step}").verify().problems


def save_mapped_twice(rank: int, world_size: int, run: Path) -> list[Linked]:
    os.environ["MILEPOST_INNER_DIM"] = "mapped"
    training = frozen_but_norms(TP2)
    return [
        mp.save(run / f"checkpoint-{step}", training.state(), step=step).linked for step in (1, 2)
    ]


def test_what_ranks_put_together_in_the_mapped_file_is_written_again(tmp_path: Path) -> None:
    assert run_world(2, save_mapped_twice, tmp_path) == [[(), ()]] * 2
    assert not mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().problems


def save_on_two_disks(rank: int, world_size: int, runs: Path) -> list[Linked]:
    os.environ["MILEPOST_HOST_ID"] = f"node-{rank}"
    training = frozen_but_norms(FSDP2)
    run = runs / str(rank)
    linked: list[Linked] = []
    for step in (1, 2, 3):
        training.step()
        if step == 3 and rank == 1:  # nothing to link on this disk
            for old in (1, 2):
                shutil.rmtree(run / f"checkpoint-{old}")
        path = run / f"checkpoint-{step}"
        report = mp.save(path, training.state(), step=step, copies=mp.Copies.PER_NODE)
        linked.append(report.linked)
    return linked


def test_a_part_is_linked_in_the_copies_of_all_nodes_or_in_none(tmp_path: Path) -> None:
    assert run_world(2, save_on_two_disks, tmp_path) == [[(), (FROZEN,), ()]] * 2
    for rank in (0, 1):
        assert not mp.Checkpoint.open(tmp_path / str(rank) / "checkpoint-3").verify().problems
    links = [(tmp_path / "0" / f"checkpoint-{step}" / FROZEN).stat().st_nlink for step in (1, 2, 3)]
    assert links == [2, 2, 1]
