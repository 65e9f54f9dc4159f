"""Frozen weights that the last save had are not copied for a save behind training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import milepost as mp
from tests.checkpointing.test_unchanged import FAST, FROZEN, TRAINED, assert_holds, train, weights
from tests.checkpointing.test_unchanged import state as lora_like
from tests.slow_disk import held_writes

EMBEDDING = "model.embed_tokens.weight"


def save(run: Path, step: int, live: dict[str, Any], **options: Any) -> mp.SaveHandle:
    return mp.save_async(
        run / f"checkpoint-{step}", live, step=step, **{"options": FAST, **options}
    )


def copied(report: mp.SaveReport) -> int:
    return report.phase_nbytes["snapshot"]


def drop_first(run: Path) -> None:
    """What was to be linked is gone: an earlier checkpoint that cannot serve any more."""
    (run / "checkpoint-1" / FROZEN).chmod(0o644)
    (run / "checkpoint-1" / FROZEN).write_bytes(b"")


@pytest.mark.parametrize("overlap", mp.Overlap)
def test_only_what_is_trained_is_copied_when_the_last_save_had_the_rest(
    tmp_path: Path, overlap: mp.Overlap
) -> None:
    live = lora_like()
    train(live)
    whole = save(tmp_path, 1, live).wait()
    assert copied(whole) > 0.9 * (tmp_path / "checkpoint-1" / FROZEN).stat().st_size
    for step in (2, 3):
        train(live)
        expected = weights(live)
        buffers = mp.HostBuffers()
        handle = save(tmp_path, step, live, overlap=overlap, buffers=buffers)
        train(live)
        report = handle.wait()
        assert report.linked == (FROZEN,)
        trained = (tmp_path / f"checkpoint-{step}" / TRAINED).stat().st_size
        assert copied(report) < 4 * trained < 0.02 * report.nbytes
        assert buffers.nbytes < 0.2 * report.nbytes
        assert_holds(tmp_path / f"checkpoint-{step}", expected)


def test_what_save_wrote_before_is_not_copied_either(tmp_path: Path) -> None:
    live = lora_like()
    mp.save(tmp_path / "checkpoint-1", live, step=1, options=FAST)
    report = save(tmp_path, 2, live).wait()
    assert report.linked == (FROZEN,) and copied(report) < 0.02 * report.nbytes


@pytest.mark.parametrize("overlap", mp.Overlap)
def test_a_frozen_weight_that_was_changed_is_saved_as_it_was_at_the_call(
    tmp_path: Path, overlap: mp.Overlap
) -> None:
    live = lora_like()
    train(live)
    save(tmp_path, 1, live).wait()
    weight = live["model"].model.embed_tokens.weight
    weight.data[5, 5] += 1  # no version counter knows of it
    expected = weights(live)
    handle = save(tmp_path, 2, live, overlap=overlap)
    train(live)  # waits for what has to be copied or written
    weight.data[5, 5] += 1
    report = handle.wait()
    assert report.linked == ()
    assert_holds(tmp_path / "checkpoint-2", expected)


def test_a_frozen_weight_may_change_while_its_part_is_being_linked(tmp_path: Path) -> None:
    live = lora_like()
    save(tmp_path, 1, live).wait()
    expected = weights(live)
    with held_writes() as gate:
        handle = save(tmp_path, 2, live)
        live["model"].model.embed_tokens.weight.data.add_(1.0)
        gate.set()
        assert handle.wait().linked == (FROZEN,)
    assert_holds(tmp_path / "checkpoint-2", expected)


def test_where_the_earlier_file_is_gone_a_held_part_is_written_from_live_memory(
    tmp_path: Path,
) -> None:
    live = lora_like()
    save(tmp_path, 1, live).wait()
    drop_first(tmp_path)
    report = save(tmp_path, 2, live).wait()
    assert report.linked == () and copied(report) < 0.02 * report.nbytes
    assert_holds(tmp_path / "checkpoint-2", weights(live))
    assert save(tmp_path, 3, live).wait().linked == (FROZEN,)


def test_where_it_is_gone_and_the_live_weight_changed_meanwhile_nothing_is_saved(
    tmp_path: Path,
) -> None:
    live = lora_like()
    save(tmp_path, 1, live).wait()
    save(tmp_path, 2, live, unchanged=mp.Unchanged.WRITE).wait()
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / FROZEN).chmod(0o644)
        (tmp_path / f"checkpoint-{step}" / FROZEN).write_bytes(b"")
    with held_writes() as gate:
        handle = save(tmp_path, 3, live)
        live["model"].model.embed_tokens.weight.data[0, 0] += 1
        gate.set()
        with pytest.raises(mp.errors.StateChangedError, match=rf"frozen .*: {EMBEDDING};"):
            handle.wait()
    assert not (tmp_path / "checkpoint-3").exists()
    report = save(tmp_path, 4, live).wait()
    assert report.written
    assert_holds(tmp_path / "checkpoint-4", weights(live))


class Average(nn.Module):
    """A moving average of weights: frozen by its flag, and another one at every save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5 * 2**20), requires_grad=False)


def test_an_average_without_gradients_is_copied_at_every_save(tmp_path: Path) -> None:
    average = Average()
    for step in range(1, 5):
        average.weight.data.add_(1.0)
        with held_writes() as gate:
            handle = save(tmp_path, step, {"model": average})
            average.weight.data.add_(0.5)
            gate.set()
            report = handle.wait()
        average.weight.data.sub_(0.5)
        assert report.linked == () and copied(report) >= 20 * 2**20
        saved = mp.Checkpoint.open(tmp_path / f"checkpoint-{step}").read("weight")
        assert (float(saved.min()), float(saved.max())) == (step, step)


def test_of_a_model_that_no_optimizer_trains_nothing_is_left_for_later(tmp_path: Path) -> None:
    live = {**lora_like(), "teacher": Average()}
    for step in (1, 2, 3):
        before = float(live["teacher"].weight[0])
        handle = save(tmp_path, step, live, overlap=mp.Overlap.UNTIL_STEP)
        live["teacher"].weight.data.add_(1.0)  # before the step of the optimizer
        train(live)
        handle.wait()
        saved = load_file(tmp_path / f"checkpoint-{step}" / "teacher" / "model.safetensors")
        weight = saved["weight"]
        assert (float(weight.min()), float(weight.max())) == (before, before)
