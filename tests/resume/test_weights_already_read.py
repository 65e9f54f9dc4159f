"""Loads that leave out weights because construction read them: by id, proven, agreed on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import milepost as mp
from milepost.errors import InvalidInputError, MismatchError
from tests.parallel.models import ONE, Shape, build, start
from tests.states import same, snapshot, train, training
from tests.worlds import run_outcomes, run_world

ALREADY = mp.Weights.ALREADY_READ


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a small Llama after two steps."""
    live = start(ONE)
    live.step()
    live.step()
    mp.save(tmp_path / "run" / "checkpoint-2", live.state(), step=2)
    return tmp_path / "run" / "checkpoint-2"


def built_from(path: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(path).train()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def saved_small(run: Path, *, seed: int = 0) -> tuple[Path, dict[str, Any]]:
    live = training(seed=seed, steps=2)
    mp.save(run / "checkpoint-2", live, step=2)
    return run / "checkpoint-2", live


def test_a_model_of_transformers_is_known_by_the_directory_it_was_built_from(path: Path) -> None:
    state = built_from(path)
    report = mp.load(path, state, weights=ALREADY, unexpected=mp.Unexpected.IGNORE)
    assert any("weights not read again" in note for note in report.notes)
    assert state["optimizer"].state
    again = built_from(path)["model"].state_dict()
    assert same(snapshot(state)["model"], again)


def test_the_same_state_comes_out_as_when_weights_are_read(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path)
    other = training(seed=5)
    mp.load(path, other)
    train(other, 1)
    mp.save(tmp_path / "checkpoint-3", other, step=3)
    third = training(seed=6)
    mp.load(tmp_path / "checkpoint-3", {"model": third["model"]})  # construction, as it were
    report = mp.load(tmp_path / "checkpoint-3", third, weights=ALREADY)
    assert report.level is mp.Level.EXACT
    assert same(snapshot(third), snapshot(other))


def test_no_byte_of_weights_but_the_sample_is_read(tmp_path: Path) -> None:
    """A byte that went wrong behind the sample shows it: the model does not get it."""
    path, _ = saved_small(tmp_path)
    live = training(seed=5)
    mp.load(path, {"model": live["model"]})
    weights = path / "model.safetensors"
    wrong = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(wrong[:8], "little")
    header = json.loads(wrong[8:start])
    wrong[start + header["embedding.weight"]["data_offsets"][1] - 1] ^= 1  # its last element
    weights.write_bytes(wrong)
    before = snapshot({"model": live["model"]})
    report = mp.load(path, live, weights=ALREADY)
    assert report.level is mp.Level.EXACT
    assert same(snapshot({"model": live["model"]}), before)


def test_a_model_of_random_weights_is_refused(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path)
    live = training(seed=5)
    mp.stamp_weights_source(live["model"], None)
    before = snapshot(live)
    with pytest.raises(MismatchError, match="was built from random weights, so training would go"):
        mp.load(path, live, weights=ALREADY)
    assert same(snapshot(live), before)


def test_a_model_of_unknown_origin_is_refused(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path)
    with pytest.raises(MismatchError, match="built from something that nobody recorded"):
        mp.load(path, training(seed=5), weights=ALREADY)


def test_a_model_built_from_another_checkpoint_is_refused_by_its_id(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path / "a")
    other, _ = saved_small(tmp_path / "b", seed=3)
    live = training(seed=5)
    mp.load(other, {"model": live["model"]})
    with pytest.raises(MismatchError, match=r"was built from .*b/checkpoint-2 \("):
        mp.load(path, live, weights=ALREADY)


def test_a_model_built_from_the_base_is_refused(path: Path, tmp_path: Path) -> None:
    build(ONE, seed=9).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    with pytest.raises(MismatchError, match=r"was built from .*/base, so"):
        mp.load(path, built_from(tmp_path / "base"), weights=ALREADY)


def test_a_moved_and_a_copied_checkpoint_are_the_same_one(path: Path, tmp_path: Path) -> None:
    state = built_from(path)
    mp.stamp_weights_source(state["model"], path)
    shutil.copytree(path, tmp_path / "copy" / "checkpoint-2")
    path.rename(path.with_name("checkpoint-moved"))
    for place in (path.with_name("checkpoint-moved"), tmp_path / "copy" / "checkpoint-2"):
        report = mp.load(place, state, weights=ALREADY, unexpected=mp.Unexpected.IGNORE)
        assert any("weights not read again" in note for note in report.notes)


def test_a_configuration_of_the_checkpoint_is_not_its_weights(path: Path) -> None:
    """Both are called alike, so an id alone would be fooled."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    mp.stamp_weights_source(model, path)
    with pytest.raises(MismatchError, match="are not those of the checkpoint"):
        mp.load(path, state_of(model), weights=ALREADY, unexpected=mp.Unexpected.IGNORE)


def test_a_model_that_was_trained_since_is_refused(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path)
    live = training(seed=5)
    mp.load(path, live)
    train(live, 1)
    with pytest.raises(MismatchError, match="was changed after it was built"):
        mp.load(path, live, weights=ALREADY)


def test_a_model_without_memory_is_refused(path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    mp.stamp_weights_source(model, path)
    with pytest.raises(MismatchError, match="on the meta device and have no values"):
        mp.load(path, {"model": model}, weights=ALREADY)


def test_all_parameters_have_to_be_in_the_checkpoint(tmp_path: Path) -> None:
    path, _ = saved_small(tmp_path)
    live = training(seed=5)
    live["model"].extra = nn.Linear(2, 2)  # a small part of the model, far less than half
    mp.stamp_weights_source(live["model"], path)
    for weights in mp.Weights:
        with pytest.raises(mp.errors.KeyMismatchError, match=r"missing: extra\.weight"):
            mp.load(path, {"model": live["model"]}, weights=weights)


def test_without_a_model_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    path, live = saved_small(tmp_path)
    with pytest.raises(InvalidInputError, match="the state has no model"):
        mp.load(path, {"progress": live["progress"]}, weights=ALREADY)


# ---- adapters


class WithAdapter(nn.Module):
    """A layer beside which an adapter lies, under the names of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 4, bias=False)


def merged_checkpoint(place: Path) -> Path:
    place.mkdir(parents=True)
    save_file({"layer.weight": torch.ones(4, 4)}, place / "model.safetensors")
    inner = place / "resume_adapter"
    inner.mkdir()
    (inner / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"lora_A.weight": torch.ones(2, 4)}, inner / "adapter_model.safetensors")
    (place / "resume_adapter.json").write_text(json.dumps({"adapter_dir": "resume_adapter"}))
    return place


def test_an_adapter_on_the_merged_weights_of_the_checkpoint_would_count_twice(
    tmp_path: Path,
) -> None:
    path = merged_checkpoint(tmp_path / "merged")
    model = WithAdapter()
    mp.stamp_weights_source(model, path)
    for weights in mp.Weights:
        with pytest.raises(MismatchError, match="it would count twice"):
            mp.load(path, {"model": model}, weights=weights)


def test_an_adapter_run_does_not_resume_from_weights_that_have_no_adapter(tmp_path: Path) -> None:
    """What was merged without a marker looks like this, too."""
    full = nn.Module()
    full.layer = nn.Linear(4, 4, bias=False)
    mp.save(tmp_path / "checkpoint-1", {"model": full}, step=1)
    model = WithAdapter()
    mp.stamp_weights_source(model, tmp_path / "checkpoint-1")
    for weights in mp.Weights:
        with pytest.raises(MismatchError, match="the checkpoint holds none"):
            mp.load(tmp_path / "checkpoint-1", {"model": model}, weights=weights)


# ---- on two ranks


def load_built(rank: int, world_size: int, path: Path, sources: list[Path | None]) -> Any:
    state = start(Shape("ddp", (2,)), seed=4).state()
    inner = state["model"].module
    mp.load(path, {"model": state["model"]})
    mp.stamp_weights_source(inner, sources[rank])
    report = mp.load(path, state, weights=ALREADY, missing=mp.Missing.KEEP)
    return any("weights not read again" in note for note in report.notes)


def test_ranks_agree_on_what_their_models_were_built_from(path: Path) -> None:
    assert run_world(2, load_built, path, [path, path]) == [True, True]


def test_one_rank_with_another_model_stops_all(path: Path) -> None:
    outcomes = run_outcomes(2, load_built, path, [path, None])
    assert [outcome.error_class for outcome in outcomes] == ["MismatchError"] * 2
    for outcome in outcomes:
        assert "rank 1 from random weights" in str(outcome.error)
