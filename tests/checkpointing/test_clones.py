"""Where an unchanged part cannot be linked it is cloned, and written where it cannot be that."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import NoSpaceError
from milepost.layouts.directory import read_manifest
from milepost.layouts.directory_copy import copy_checkpoint
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast
from milepost.plan import parts
from milepost.storage import fileops
from milepost.testing.faults import Operation, record

FROZEN = "model-00001-of-00002.safetensors"


class Adapted(nn.Module):
    """A frozen tensor, the same in every state, and a trained one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.arange(4096.0).reshape(64, 64), requires_grad=False)
        self.trained = nn.Parameter(torch.full((4,), value))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)


@contextmanager
def unlinkable(number: int, *, clones: bool) -> Iterator[None]:
    """A file system that refuses links, and has clones, which this one need not have."""

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "link":
            raise OSError(number, os.strerror(number), target)
        if name == "clone" and clones:
            descriptor, source = arguments
            data = Path(source).read_bytes()
            return os.pwrite(descriptor, data, 0) == len(data)
        return function(*arguments)

    with fileops.hooked(hook):
        yield


def save(run: Path, step: int, **options: Any) -> mp.SaveReport:
    return mp.save(
        run / f"checkpoint-{step}", {"model": Adapted(float(step))}, step=step, **options
    )


def assert_holds(run: Path, step: int) -> None:
    assert not mp.Checkpoint.open(run / f"checkpoint-{step}").verify().problems
    live = Adapted(0.5)
    nn.init.zeros_(live.frozen)
    mp.load(run / f"checkpoint-{step}", {"model": live})
    wanted = Adapted(float(step))
    assert torch.equal(live.frozen, wanted.frozen) and torch.equal(live.trained, wanted.trained)


def of_frozen(operations: list[Operation]) -> list[str]:
    """What is done to the frozen part of the second checkpoint, in order."""
    return [one.name for one in operations if one.target.endswith(f"checkpoint-2/{FROZEN}")]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_part_that_cannot_be_linked_is_cloned_and_made_durable(
    tmp_path: Path, number: int
) -> None:
    first = save(tmp_path, 1)
    reports = []
    with unlinkable(number, clones=True):
        operations = record(lambda: reports.append(save(tmp_path, 2)))
    (second,) = reports
    clone = tmp_path / "checkpoint-2" / FROZEN
    assert of_frozen(operations) == ["link", "open", "clone", "open", "fsync"]
    assert second.linked == (FROZEN,) and second.linked_nbytes == clone.stat().st_size
    assert second.nbytes == pytest.approx(first.nbytes, rel=0.1)
    assert second.phase_nbytes["write"] <= second.nbytes - second.linked_nbytes
    assert read_manifest(tmp_path / "checkpoint-2").linked == [FROZEN]
    assert not clone.samefile(tmp_path / "checkpoint-1" / FROZEN) and clone.stat().st_nlink == 1
    assert clone.stat().st_mode & 0o222, "nobody else has this file"
    assert_holds(tmp_path, 1)
    prune_run(tmp_path, [KeepLast(1)])
    assert_holds(tmp_path, 2)
    assert save(tmp_path, 3).linked == (FROZEN,), "a clone is as good a source as any"
    assert_holds(tmp_path, 3)


def test_a_part_that_is_not_to_be_durable_is_cloned_without_fsync(tmp_path: Path) -> None:
    options = mp.WriteOptions(durability=mp.Durability.PAGE_CACHE)
    save(tmp_path, 1, options=options)
    with unlinkable(errno.EMLINK, clones=True):
        operations = record(lambda: save(tmp_path, 2, options=options))
    assert of_frozen(operations) == ["link", "open", "clone"]


def test_where_the_file_system_has_no_clones_the_part_is_written(tmp_path: Path) -> None:
    """On this one, as it is; some do have clones."""
    save(tmp_path, 1)
    reports = []
    with unlinkable(errno.EMLINK, clones=False):
        operations = record(lambda: reports.append(save(tmp_path, 2)))
    (clone,) = (one for one in operations if one.name == "clone")
    begin = ["link", "open", "clone"]
    if clone.happened:
        assert reports[0].linked == (FROZEN,) and of_frozen(operations)[:3] == begin
    else:
        assert reports[0].linked == ()
        assert of_frozen(operations)[:5] == [*begin, "unlink", "open"]
        assert "write" in of_frozen(operations)
    assert_holds(tmp_path, 2)


def test_a_disk_that_is_full_when_a_part_is_cloned_costs_the_new_save_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "clone":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return function(*arguments)

    with unlinkable(errno.EMLINK, clones=False), fileops.hooked(hook), pytest.raises(NoSpaceError):
        save(tmp_path, 2)
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1] and listing.unfinished == ()
    assert_holds(tmp_path, 1)


def test_a_source_that_is_gone_when_it_is_cloned_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "clone":
            (tmp_path / "checkpoint-1" / FROZEN).unlink()
        return function(*arguments)

    with unlinkable(errno.EMLINK, clones=False), fileops.hooked(hook):
        assert save(tmp_path, 2).linked == ()
    assert_holds(tmp_path, 2)


def test_a_mirror_clones_what_it_cannot_link(tmp_path: Path) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    for step in (1, 2):
        save(run, step)
    copy_checkpoint(run / "checkpoint-1", copies / "checkpoint-1", mp.WriteOptions())
    with unlinkable(errno.EMLINK, clones=True):
        operations = record(
            lambda: copy_checkpoint(
                run / "checkpoint-2", copies / "checkpoint-2", mp.WriteOptions()
            )
        )
    assert of_frozen(operations) == ["link", "open", "clone", "open", "fsync"]
    assert_holds(copies, 2)
