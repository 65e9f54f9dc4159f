"""A manager tells a callback of its saves, whichever of them waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import InvalidInputError
from milepost.plan import parts
from tests.manager.small_training import Training
from tests.slow_disk import failing_writes, held_writes


def manager_of(run: Path, told: list[mp.SaveEvent], **options: Any) -> mp.CheckpointManager[Any]:
    return mp.CheckpointManager(run, on_event=told.append, **options)


@pytest.mark.parametrize("saving", mp.Saving)
def test_every_save_is_told_with_its_phases(tmp_path: Path, saving: mp.Saving) -> None:
    told: list[mp.SaveEvent] = []
    training = Training()
    with manager_of(tmp_path, told, saving=saving, save=mp.EveryNSteps(2)) as manager:
        manager.resume(training.state)
        for step in range(1, 5):
            manager.maybe_save(step, training.state)
        manager.save(5, training.state)
    committed = [event for event in told if event.kind is mp.EventKind.COMMITTED]
    assert [event.step for event in committed] == [2, 4, 5]
    assert [event.path for event in committed] == [
        tmp_path / f"checkpoint-{step}" for step in (2, 4, 5)
    ]
    for step in (2, 4, 5):
        phases = {e.phase: e for e in told if e.step == step and e.kind is mp.EventKind.PHASE}
        assert {"capture", "plan", "stage", "write", "commit"} <= set(phases)
        assert phases["write"].nbytes > 0 and phases["write"].gib_per_s
        written = [e.nbytes for e in told if e.step == step and e.kind is mp.EventKind.WRITTEN]
        assert sum(written) == phases["write"].nbytes


def test_what_is_left_out_and_what_fails_is_told_too(tmp_path: Path) -> None:
    told: list[mp.SaveEvent] = []
    training = Training()
    options: dict[str, Any] = {"saving": mp.Saving.ASYNC, "in_flight": mp.InFlight.SKIP}
    with manager_of(tmp_path, told, **options) as manager:
        manager.resume(training.state)
        with held_writes() as gate:
            manager.save(1, training.state)
            assert manager.save(2, training.state).wait().written is False
            gate.set()
        with failing_writes():
            handle = manager.save(3, training.state)
            with pytest.raises(mp.errors.StorageError):
                handle.wait()
    ends = [(e.step, e.kind) for e in told if e.kind not in (mp.EventKind.PHASE,)]
    assert (1, mp.EventKind.COMMITTED) in ends
    assert [kind for step, kind in ends if step == 2] == [mp.EventKind.LEFT_OUT]
    assert ends[-1] == (3, mp.EventKind.FAILED)


def test_trios_tell_nothing_and_a_callback_for_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="on_event with layout"):
        manager_of(tmp_path, [], layout=mp.Layout.TRIO)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(100_000), requires_grad=False)
        self.head = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("unchanged", [mp.Unchanged.LINK, mp.Unchanged.WRITE])
def test_the_forecast_of_space_counts_what_will_be_linked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchanged: mp.Unchanged
) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        values = list(real(path))
        values[1], values[3], values[4] = 1, 500_000, 500_000  # bytes: one whole save and more
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with mp.CheckpointManager(tmp_path) as manager:
        report = manager.save(1, {"model": Frozen()}, unchanged=unchanged)
    is_told = any("the next 2 saves do not fit" in note for note in report.notes)
    assert is_told is (unchanged is mp.Unchanged.WRITE)
    assert (report.linkable_nbytes > 400_000) is (unchanged is mp.Unchanged.LINK)
