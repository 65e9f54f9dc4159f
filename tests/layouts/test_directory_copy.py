"""A committed checkpoint copied elsewhere is proven on the way and appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine.write import WriteOptions
from milepost.errors import DamagedError, NoSpaceError, ReplacedError
from milepost.layouts.directory_copy import copy_checkpoint
from milepost.storage import fileops
from tests.states import flip, training


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoint-3"
    mp.save(path, training(steps=1), step=3, max_shard_size=600)
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {
        place.relative_to(path).as_posix(): place.read_bytes()
        for place in path.rglob("*")
        if place.is_file()
    }


def copy(source: Path, target: Path) -> int:
    return copy_checkpoint(source, target, WriteOptions(threads=2))


def test_a_copy_has_the_same_files_and_verifies(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "mirror" / "checkpoint-3"
    assert copy(saved, target) == mp.Checkpoint.open(saved).manifest.nbytes  # type: ignore[attr-defined]
    assert files_of(target) == files_of(saved)
    assert mp.Checkpoint.open(target).verify().ok
    assert [entry.step for entry in mp.list_run(tmp_path / "mirror").committed] == [3]


def test_a_checkpoint_that_is_there_already_is_not_copied_again(
    saved: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mirror" / "checkpoint-3"
    copy(saved, target)
    before = target.stat().st_ino
    assert copy(saved, target) == 0
    assert target.stat().st_ino == before


def test_another_checkpoint_of_the_same_name_is_replaced(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "mirror" / "checkpoint-3"
    mp.save(target, training(seed=9), step=3)
    copy(saved, target)
    assert files_of(target) == files_of(saved)
    assert os.listdir(target.parent) != []
    assert not [name for name in os.listdir(target.parent) if "staging" in name]


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_mixed_with_the_new_one(
    saved: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "checkpoint-3"
    mp.save(other, training(seed=9), step=3)

    once = iter([True])

    def replace(name: str, target: str, function: Any, arguments: Any) -> Any:
        if name == "write" and target.endswith(".safetensors") and next(once, False):
            saved.rename(tmp_path / "old")
            other.rename(saved)
        return function(*arguments)

    with fileops.hooked(replace), pytest.raises(ReplacedError, match="while it was being copied"):
        copy(saved, tmp_path / "mirror" / "checkpoint-3")
    assert mp.list_run(tmp_path / "mirror").committed == ()
    copy(saved, tmp_path / "mirror" / "checkpoint-3")
    assert mp.Checkpoint.open(tmp_path / "mirror" / "checkpoint-3").verify().ok


@pytest.mark.parametrize("at", [20, -3])
def test_a_flipped_byte_in_any_file_is_found_and_nothing_is_published(
    saved: Path, tmp_path: Path, at: int
) -> None:
    names = [name for name in files_of(saved) if name != "milepost.json"]
    assert "training/digests.bin" in names and len(names) > 6
    for number, name in enumerate(names):
        place = saved / name
        raw = place.read_bytes()
        changed = bytearray(raw)
        changed[at % len(raw)] ^= 1
        place.write_bytes(changed)
        mirror = tmp_path / f"mirror-{number}"
        with pytest.raises(DamagedError):
            copy(saved, mirror / "checkpoint-3")
        assert not (mirror / "checkpoint-3").exists(), name
        assert not [left for left in os.listdir(mirror) if "staging" in left], name
        place.write_bytes(raw)
    copy(saved, tmp_path / "mirror" / "checkpoint-3")


def test_a_truncated_file_is_named(saved: Path, tmp_path: Path) -> None:
    part = next(saved.glob("model-*.safetensors"))
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(DamagedError, match=part.name):
        copy(saved, tmp_path / "mirror" / "checkpoint-3")


def test_a_full_disk_leaves_nothing_behind(saved: Path, tmp_path: Path) -> None:
    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "reserve":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return function(*arguments)

    mirror = tmp_path / "mirror"
    with fileops.hooked(hook), pytest.raises(NoSpaceError):
        copy(saved, mirror / "checkpoint-3")
    assert [n for n in os.listdir(mirror) if not n.startswith(".milepost.lock")] == []


class Adapted(nn.Module):
    """17 MB that are frozen, and a little that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(2048, 2100), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(4))


def two_that_share(run: Path) -> tuple[Path, Path]:
    model = Adapted()
    paths = run / "checkpoint-1", run / "checkpoint-2"
    for step, path in enumerate(paths, start=1):
        mp.save(path, {"model": model}, step=step)
        with torch.no_grad():
            model.trained.add_(1)
    return paths


def test_copies_of_checkpoints_that_share_a_file_share_it_too(tmp_path: Path) -> None:
    first, second = two_that_share(tmp_path / "run")
    mirror = tmp_path / "mirror"
    name = "model-00001-of-00002.safetensors"
    copied = copy(first, mirror / first.name), copy(second, mirror / second.name)
    assert copied[1] < copied[0] / 100
    assert (mirror / first.name / name).samefile(mirror / second.name / name)
    assert (mirror / second.name / name).stat().st_mode & 0o777 == 0o444
    for path in (first, second):
        assert files_of(mirror / path.name) == files_of(path)
        assert mp.Checkpoint.open(mirror / path.name).verify().ok


def test_a_copy_does_not_link_what_is_damaged_in_the_mirror(tmp_path: Path) -> None:
    first, second = two_that_share(tmp_path / "run")
    mirror = tmp_path / "mirror"
    copy(first, mirror / first.name)
    flip(mirror / first.name / "model-00001-of-00002.safetensors", 2**20)
    copy(second, mirror / second.name)
    assert not mp.Checkpoint.open(mirror / first.name).verify().ok
    assert mp.Checkpoint.open(mirror / second.name).verify().ok
