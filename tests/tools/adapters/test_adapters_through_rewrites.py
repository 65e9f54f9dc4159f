"""Checkpoints of adapters go through exports and rewrites: they resume, and peft finds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

import milepost as mp
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import DamagedError
from milepost.tools.cast import cast
from milepost.tools.export import TrainingState, export_checkpoint
from milepost.tools.reshard import reshard
from tests.adapters.lora_models import adapted, base, logits, optimizer_of, steps
from tests.tools.rewrite.hub import QUICK

FAST = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)
Rewritten = Callable[[Path, Path], Any]


def export(source: Path, out: Path) -> None:
    export_checkpoint(source, out, options=FAST)


REWRITES: dict[str, Rewritten] = {
    "export": export,
    "reshard": lambda source, out: reshard(source, out, options=QUICK),
    "cast": lambda source, out: cast(source, out, dtype="float32", options=QUICK),
}


class Scored(nn.Module):
    """A model with an adapter, and a head that is trained beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.backbone = adapted(seed)
        torch.manual_seed(seed)
        self.head = nn.Linear(32, 1)


@pytest.mark.parametrize("adapters", [mp.Adapters.ALONE, mp.Adapters.MERGED])
def test_an_exported_adapter_run_resumes_as_if_it_had_never_stopped(
    tmp_path: Path, adapters: mp.Adapters
) -> None:
    model = adapted(5)
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    source, out = tmp_path / "checkpoint-2", tmp_path / "out"
    state = {"model": model, "optimizer": optimizer}
    mp.save(source, state, step=2, adapters=adapters, options=FAST)
    export_checkpoint(source, out, training_state=TrainingState.INCLUDE, options=FAST)
    assert mp.Checkpoint.open(out).verify().ok
    expected = steps(model, optimizer, 3)
    second = adapted(9)
    optimizer2 = optimizer_of(second)
    report = mp.load(out, {"model": second, "optimizer": optimizer2})
    assert report.level is mp.Level.EXACT
    assert steps(second, optimizer2, 3) == expected


@pytest.mark.parametrize("rewritten", REWRITES.values(), ids=REWRITES)
def test_a_rewritten_adapter_loads_in_stock_peft_and_here(
    tmp_path: Path, rewritten: Rewritten
) -> None:
    model = adapted(5)
    source, out = tmp_path / "checkpoint-2", tmp_path / "out"
    mp.save(source, {"model": model}, step=2, adapters=mp.Adapters.ALONE, options=FAST)
    rewritten(source, out)
    names = {path.name for path in out.iterdir()}
    assert not {name for name in names if name.startswith("model") or name == "config.json"}
    assert torch.equal(logits(PeftModel.from_pretrained(base(), out)), logits(model))
    fresh = adapted(9)
    mp.load(out, {"model": fresh})
    assert torch.equal(logits(fresh), logits(model))


@pytest.mark.parametrize("rewritten", REWRITES.values(), ids=REWRITES)
def test_what_is_trained_beside_an_adapter_goes_along_and_is_proven(
    tmp_path: Path, rewritten: Rewritten
) -> None:
    model, fresh = Scored(5), Scored(9)
    source = tmp_path / "checkpoint-2"
    mp.save(source, {"model": model}, step=2, adapters=mp.Adapters.ALONE, options=FAST)
    rewritten(source, tmp_path / "out")
    assert mp.Checkpoint.open(tmp_path / "out").verify().ok
    mp.load(tmp_path / "out", {"model": fresh})
    assert torch.equal(fresh.head.weight, model.head.weight)
    extra = source / "adapter_extra.safetensors"
    raw = bytearray(extra.read_bytes())
    raw[-1] ^= 1
    extra.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"adapter_extra\.safetensors"):
        rewritten(source, tmp_path / "again")
    assert not (tmp_path / "again").exists()
