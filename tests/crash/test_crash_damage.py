"""Flipped bits and cut files, in every file of what several ranks wrote and of each layout."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import CheckpointError, DamagedError
from milepost.layouts.checkpoint import Severity
from milepost.layouts.trio import TrioContent, write_trio
from milepost.testing.ranks import record_ranks
from tests.crash.sharded import EVERY_RANK_WRITES, Sharded, mesh_of_world, values

PART_NBYTES = 100
"""So small that every tensor has a part of its own."""


def training(value: float) -> dict[str, Any]:
    """A sharded model with moments, after one step; the same numbers on any number of ranks."""
    model = Sharded(value, mesh_of_world())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"value": value}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several parts, written by two ranks."""
    path = tmp_path_factory.mktemp("run") / "checkpoint-1"

    def write(rank: int, world_size: int) -> None:
        mp.save(path, training(1.0), step=1, max_shard_size=PART_NBYTES)

    operations = record_ranks(write, 2, environment=EVERY_RANK_WRITES)
    assert all(any(one.name == "write" for one in each) for each in operations)
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "checkpoint-1")


def files_of(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def blamed(path: Path) -> set[str]:
    """The files that opening and verifying name."""
    try:
        return {problem.file for problem in mp.Checkpoint.open(path).verify().problems}
    except CheckpointError as error:
        return {"milepost.json"} if "milepost.json" in str(error) else {str(error)}


def damages(path: Path, count: int) -> Iterator[str]:
    """Change one bit at some places of a file, and cut it at some, each in turn; then put it back.

    The places are drawn at random, with the first and the last byte among them.
    """
    raw, chance = path.read_bytes(), random.Random(path.name)
    drawn = {chance.randrange(len(raw)) for _ in range(count)}
    for place in sorted({0, len(raw) - 1} | drawn):
        changed = bytearray(raw)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        yield f"a bit of byte {place}"
        path.write_bytes(raw[:place])
        yield f"cut at {place}"
    path.write_bytes(raw)


@pytest.mark.case("C1.1")
@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_to_any_file_that_two_ranks_wrote_is_found_and_the_file_named(
    count: int, copy: Path
) -> None:
    files = files_of(copy)
    assert len([name for name in files if name.startswith("model-")]) == 3
    assert any(name.startswith("training/optimizer") for name in files)
    for name in files:
        for what in damages(copy / name, count):
            assert name in blamed(copy), f"{name}: {what}"
    assert blamed(copy) == set()


def is_state(name: str) -> bool:
    return name.startswith("training/")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


HARMS: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
    "flipped": flip,
}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.case("C1.3")
@pytest.mark.parametrize("harm", HARMS)
def test_weights_load_with_any_file_of_the_training_state_broken_and_the_error_says_so(
    harm: str, made: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(name for name in files_of(made) if is_state(name)):
        path = shutil.copytree(made, tmp_path / str(number) / "checkpoint-1")
        HARMS[harm](path / name)
        model = Sharded(5.0)
        assert mp.load(path, {"model": model}).level is mp.Level.WEIGHTS_ONLY
        assert same(model.state_dict(), values(1.0))
        untouched = training(5.0)
        said = f"{name}.*its weights are not concerned: load them alone"
        if name == "training/digests.bin":
            said = name  # without it nothing else is proven
        with pytest.raises(DamagedError, match=said):
            mp.load(path, untouched, verify=mp.Verify.DIGESTS)
        assert same(untouched["model"].state_dict(), values(5.0))


@pytest.mark.case("C1.3")
@pytest.mark.parametrize("harm", HARMS)
def test_the_training_state_loads_with_any_part_of_the_weights_broken(
    harm: str, made: Path, tmp_path: Path
) -> None:
    for name in files_of(made):
        if not name.startswith("model-"):
            continue
        path = shutil.copytree(made, tmp_path / name / "checkpoint-1")
        HARMS[harm](path / name)
        live = training(5.0)
        mp.load(path, {"progress": live["progress"]})
        assert live["progress"] == {"value": 1.0}
        with pytest.raises(DamagedError, match=f"{name}.*load it without the model"):
            mp.load(path, live, verify=mp.Verify.DIGESTS)
        assert same(live["model"].state_dict(), values(5.0))


# ---- trio and .pt


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def write_layouts(root: Path) -> dict[str, list[Path]]:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    content = TrioContent(
        model_state=dict(model.state_dict()), optimizer_state=optimizer.state_dict(), epoch=1,
        loss=0.5, model_config={"d": 3},
    )  # fmt: skip
    write_trio(root, ["latest"], content)
    mp.save_checkpoint(root / "one.pt", model.state_dict(), optimizer.state_dict(), epoch=1)
    return {
        "latest": sorted(root.glob("latest.*")),
        "one.pt": [root / "one.pt"],
    }


def is_found(path: Path) -> bool:
    try:
        report = mp.Checkpoint.open(path).verify()
    except CheckpointError:
        return True
    return any(problem.severity is Severity.ERROR for problem in report.problems)


@pytest.mark.case("C1.1")
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_damage_to_any_file_of_the_other_layouts_is_found(count: int, tmp_path: Path) -> None:
    for name, files in write_layouts(tmp_path).items():
        assert not is_found(tmp_path / name)
        for file in files:
            missed = [what for what in damages(file, count) if not is_found(tmp_path / name)]
            assert missed == [], file
        assert not is_found(tmp_path / name)
