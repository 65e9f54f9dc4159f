"""Adapters of sharded models: written from slices, whole on disk, exact and at home everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

import milepost as mp
from tests.adapters.lora_models import base, logits, start_adapter, tensors_of
from tests.parallel.models import (
    DDP2,
    FSDP2,
    FSDP4,
    FSDP_TP,
    HSDP,
    ONE,
    TP2,
    Shape,
    gathered,
)
from tests.worlds import run_world

STEPS = 2
QUICK = [FSDP2, TP2]
SLOW = [pytest.param(s, marks=pytest.mark.slow) for s in (DDP2, FSDP4, FSDP_TP, HSDP)]
SHAPES = [*QUICK, *SLOW]
BOTH = [mp.Adapters.ALONE, mp.Adapters.MERGED]


def train_and_save(
    rank: int,
    world_size: int,
    shape: Shape,
    run: Path,
    adapters: mp.Adapters,
    *,
    data: bool = True,
) -> Any:
    training = start_adapter(shape)
    for _ in range(STEPS):
        training.step()
    state = training.state()
    if not data:
        del state["data"]  # which is each rank's own
    mp.save(run / f"checkpoint-{STEPS}", state, step=STEPS, adapters=adapters)
    saved = {n: t for n, t in gathered(training).items() if "lora_" in n}
    return [training.step() for _ in range(STEPS)], saved


def train_and_save_no_data(rank: int, world_size: int, shape: Shape, run: Path) -> Any:
    return train_and_save(rank, world_size, shape, run, mp.Adapters.ALONE, data=False)


def save_dora(rank: int, world_size: int, shape: Shape, run: Path, adapters: mp.Adapters) -> Any:
    """Not trained: peft's DoRA cannot run on weights that are cut."""
    training = start_adapter(shape, use_dora=True)
    with torch.no_grad():
        for name, param in training.model.named_parameters():
            if "magnitude" in name:
                param.mul_(1.25)
    mp.save(run / f"checkpoint-{STEPS}", training.state(), step=STEPS, adapters=adapters)


def train_and_save_async(
    rank: int, world_size: int, shape: Shape, run: Path, adapters: mp.Adapters
) -> Any:
    training = start_adapter(shape)
    for _ in range(STEPS):
        training.step()
    place = run / f"checkpoint-{STEPS}"
    handle = mp.save_async(
        place, training.state(), step=STEPS, adapters=adapters, overlap=mp.Overlap.UNTIL_STEP
    )
    training.step()
    handle.wait()


def resume(rank: int, world_size: int, shape: Shape, run: Path) -> Any:
    training = start_adapter(shape, seed=9)
    training.step()
    report = mp.load(run / f"checkpoint-{STEPS}", training.state())
    loaded = {n: t for n, t in gathered(training).items() if "lora_" in n}
    return [training.step() for _ in range(STEPS)], loaded, report.level.value


def reshard(rank: int, world_size: int, shape: Shape, run: Path) -> Any:
    training = start_adapter(shape, seed=9)
    state = training.state()
    del state["data"]
    report = mp.load(run / f"checkpoint-{STEPS}", state)
    loaded = {n: t for n, t in gathered(training).items() if "lora_" in n}
    return loaded, report.level.value


def in_world(shape: Shape, function: Any, *arguments: Any) -> list[Any]:
    return run_world(shape.world_size, function, shape, *arguments)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    assert [n for n, tensor in expected.items() if not torch.equal(found[n], tensor)] == []


@pytest.mark.case("V44")
@pytest.mark.case("V45")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_adapter_of_a_sharded_model_is_whole_on_disk_and_loads_in_peft(
    shape: Shape, tmp_path: Path
) -> None:
    (_, saved), *_ = in_world(shape, train_and_save, tmp_path, mp.Adapters.ALONE)
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    expected = {n.replace(".default", ""): t for n, t in saved.items() if n.endswith("weight")}
    assert_same(tensors_of(checkpoint), expected)
    assert not list(checkpoint.glob("model*"))
    stock = PeftModel.from_pretrained(base(), checkpoint)
    live = start_adapter(ONE)
    for name, param in live.model.named_parameters():
        if "lora_" in name:
            param.data.copy_(saved[name])
    assert torch.equal(logits(stock), logits(live.model))


@pytest.mark.parametrize("adapters", BOTH, ids=lambda each: str(each.value))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_adapter_run_that_resumes_equals_the_run_that_never_stopped(
    shape: Shape, adapters: mp.Adapters, tmp_path: Path
) -> None:
    first = in_world(shape, train_and_save, tmp_path, adapters)
    second = in_world(shape, resume, tmp_path)
    for (losses, saved), (losses2, loaded, level) in zip(first, second, strict=True):
        assert level == "exact"
        assert_same(loaded, saved)
        assert losses2 == losses


@pytest.mark.parametrize(
    "function",
    [train_and_save, save_dora, train_and_save_async],
    ids=["lora", "dora", "behind-training"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merged_weights_of_a_sharded_model_are_those_that_peft_merges(
    shape: Shape, function: Any, tmp_path: Path
) -> None:
    in_world(shape, function, tmp_path, mp.Adapters.MERGED)
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    merged = LlamaForCausalLM.from_pretrained(checkpoint)
    stock: Any = PeftModel.from_pretrained(base(), checkpoint / "resume_adapter")
    torch.testing.assert_close(logits(merged), logits(stock), rtol=1e-4, atol=1e-5)
    expected = stock.merge_and_unload().state_dict()
    plain = base().state_dict()
    found = merged.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    changed = [name for name in expected if not torch.equal(found[name], plain[name])]
    assert len(changed) == 6  # three projections in two layers


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (ONE, FSDP2),
        (FSDP2, ONE),
        (TP2, FSDP2),
        pytest.param(FSDP4, ONE, marks=pytest.mark.slow),
        pytest.param(FSDP_TP, FSDP2, marks=pytest.mark.slow),
        pytest.param(FSDP2, FSDP_TP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_adapter_run_goes_on_on_another_topology_with_the_same_values(
    saved_on: Shape, loaded_on: Shape, tmp_path: Path
) -> None:
    (_, saved), *_ = in_world(saved_on, train_and_save_no_data, tmp_path)
    for loaded, level in in_world(loaded_on, reshard, tmp_path):
        assert_same(loaded, saved)
        assert level == "resharded"
