"""Runs that train an adapter of peft: from what they are built, and their best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

import milepost as mp
from milepost.errors import MismatchError
from tests.adapters.lora_models import adapted, base, optimizer_of, steps

IN_PLACE = {"use_grouped_gemm": True}


def saved(place: Path, adapters: mp.Adapters) -> dict[str, Any]:
    model = adapted()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer}
    mp.save(place, state, step=2, adapters=adapters)
    return state


def trained_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lora_on(model: LlamaForCausalLM) -> nn.Module:
    """The adapter of `adapted`, untrained, on another model."""
    names = ["q_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    found: nn.Module = get_peft_model(model, config)
    return found


@pytest.mark.parametrize("adapters", [mp.Adapters.ALONE, mp.Adapters.MERGED])
@pytest.mark.parametrize("weights", list(mp.Weights))
def test_the_base_is_built_and_the_adapter_restored(
    tmp_path: Path, adapters: mp.Adapters, weights: mp.Weights
) -> None:
    place = tmp_path / "checkpoint-2"
    state = saved(place, adapters)
    source = mp.resolve_resume_weights_source(place, {"model_name_or_path": "hub/base"}, IN_PLACE)
    assert (source.path, source.origin) == ("hub/base", mp.WeightsOrigin.BASE)
    model = adapted(seed=9)
    live = {"model": model, "optimizer": optimizer_of(model)}
    report = mp.load(place, live, weights=weights)
    assert report.level is mp.Level.EXACT
    assert equal(trained_of(model), trained_of(state["model"]))


@pytest.mark.parametrize("weights", list(mp.Weights))
def test_an_adapter_on_its_own_merged_weights_is_refused(
    tmp_path: Path, weights: mp.Weights
) -> None:
    place = tmp_path / "checkpoint-2"
    saved(place, mp.Adapters.MERGED)
    model = lora_on(LlamaForCausalLM.from_pretrained(place))
    before = trained_of(model)
    with pytest.raises(MismatchError, match="which contain it already"):
        mp.load(place, {"model": model}, weights=weights)
    assert equal(trained_of(model), before)


def test_weights_of_a_whole_model_are_nothing_for_an_adapter_run(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-2"
    mp.save(place, {"model": base()}, step=2)
    model = lora_on(LlamaForCausalLM.from_pretrained(place))
    for weights in mp.Weights:
        with pytest.raises(MismatchError, match="has an adapter and the checkpoint holds none"):
            mp.load(place, {"model": model}, weights=weights)


def test_the_best_adapter_comes_back_and_the_base_stays(tmp_path: Path) -> None:
    model = adapted()
    optimizer = optimizer_of(model)
    state = {"model": model, "optimizer": optimizer}
    kept = {}
    with mp.CheckpointManager(tmp_path, best=mp.BestMetric("eval_loss")) as manager:
        manager.resume(state)
        for step, loss in {1: 0.9, 2: 0.3, 3: 0.5}.items():
            steps(model, optimizer, 1)
            kept[step] = trained_of(model)
            manager.save(step, state, metrics={"eval_loss": loss})
        frozen = frozen_of(model)
        report = manager.load_best(state)
    assert report.step == 2
    assert equal(trained_of(model), kept[2])
    assert equal(frozen_of(model), frozen)
