"""The decision table: from what a resumed run builds its model, the same on all ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import milepost as mp
from milepost.adapters.kinds import CheckpointKind
from milepost.checkpointing.weights_source import origin_of
from milepost.errors import (
    CheckpointIncompleteError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotCommittedError,
    NotFoundError,
)
from tests.states import training
from tests.worlds import run_outcomes, run_world

BASE = "hub/base-model"
ALONE = SimpleNamespace(use_grouped_gemm=False, ep_size=1, expert_tp_size=1, cp_size=1, tp_size=1)
IN_PLACE: list[Any] = [
    SimpleNamespace(),  # grouped products are the default
    SimpleNamespace(use_grouped_gemm=None, ep_size=1),
    {"use_grouped_gemm": True},
    {"use_grouped_gemm": False, "ep_size": 2},
    {"use_grouped_gemm": False, "ep_group_size": 2},
    {"use_grouped_gemm": False, "expert_tp_size": 2},
    {"use_grouped_gemm": False, "cp_size": 2},
    {"use_grouped_gemm": False, "tp_size": 2},
]


def full(place: Path) -> Path:
    mp.save(place / "checkpoint-1", {"model": training()["model"]}, step=1)
    return place / "checkpoint-1"


def adapter(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"base.lora_A.weight": torch.ones(2, 4)}, place / "adapter_model.safetensors")
    return place


def merged(place: Path) -> Path:
    place.mkdir(parents=True)
    save_file({"weight": torch.ones(2)}, place / "model.safetensors")
    adapter(place / "resume_adapter")
    (place / "resume_adapter.json").write_text(json.dumps({"adapter_dir": "resume_adapter"}))
    return place


def resolved(path: Path | None, parallelism: Any) -> mp.WeightsSource:
    config = SimpleNamespace(model_name_or_path=BASE)
    before = dict(vars(config))
    found = mp.resolve_resume_weights_source(path, config, parallelism)
    assert vars(config) == before
    return found


@pytest.mark.parametrize("parallelism", [ALONE, *IN_PLACE])
def test_without_a_checkpoint_the_base_is_built(parallelism: Any) -> None:
    found = resolved(None, parallelism)
    assert (found.path, found.origin, found.kind) == (BASE, mp.WeightsOrigin.BASE, None)


@pytest.mark.parametrize("make", [full, adapter, merged])
def test_a_run_that_wraps_and_cuts_nothing_builds_the_base_and_loads(
    tmp_path: Path, make: Any
) -> None:
    found = resolved(make(tmp_path / "run"), ALONE)
    assert (found.path, found.origin) == (BASE, mp.WeightsOrigin.BASE)


@pytest.mark.parametrize("parallelism", IN_PLACE)
def test_any_other_run_builds_a_full_checkpoint_itself(tmp_path: Path, parallelism: Any) -> None:
    path = full(tmp_path)
    found = resolved(path, parallelism)
    assert (found.path, found.origin) == (path, mp.WeightsOrigin.CHECKPOINT)
    assert (found.kind, found.adapter) == (CheckpointKind.FULL, None)


@pytest.mark.parametrize("parallelism", [ALONE, *IN_PLACE])
def test_an_adapter_keeps_the_base_and_says_where_it_lies(tmp_path: Path, parallelism: Any) -> None:
    path = adapter(tmp_path / "alone")
    found = resolved(path, parallelism)
    assert (found.path, found.kind, found.adapter) == (BASE, CheckpointKind.ADAPTER, path)


@pytest.mark.parametrize("parallelism", [ALONE, *IN_PLACE])
def test_a_merged_checkpoint_keeps_the_base_and_restores_its_adapter(
    tmp_path: Path, parallelism: Any
) -> None:
    path = merged(tmp_path / "merged")
    found = resolved(path, parallelism)
    assert (found.path, found.kind) == (BASE, CheckpointKind.MERGED_ADAPTER)
    assert found.adapter == path / "resume_adapter"


@pytest.mark.parametrize("parallelism", [ALONE, IN_PLACE[0]])
def test_a_marker_without_its_adapter_is_refused_before_there_is_a_model(
    tmp_path: Path, parallelism: Any
) -> None:
    path = merged(tmp_path / "merged")
    shutil.rmtree(path / "resume_adapter")
    with pytest.raises(CheckpointIncompleteError, match="its marker names is not there"):
        resolved(path, parallelism)


@pytest.mark.parametrize("parallelism", [ALONE, IN_PLACE[0]])
def test_nothing_to_build_from_is_refused(tmp_path: Path, parallelism: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotCommittedError, match="neither weights of a model nor an adapter"):
        resolved(tmp_path, parallelism)


def test_slices_of_experts_are_refused_with_the_command_that_merges_them(tmp_path: Path) -> None:
    save_file({"experts.w.shard_0": torch.ones(2)}, tmp_path / "model-00000-of-00001.safetensors")
    index = {
        "metadata": {"format": "ep_sharded", "ep_size": 1, "total_size": 8},
        "weight_map": {"experts.w.shard_0": "model-00000-of-00001.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        resolved(tmp_path, IN_PLACE[0])


def test_a_path_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        resolved(tmp_path / "checkpoint-9", IN_PLACE[0])


def test_a_configuration_that_names_no_base_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="without model_name_or_path"):
        mp.resolve_resume_weights_source(None, SimpleNamespace(), ALONE)


@pytest.mark.parametrize("kind", list(CheckpointKind))
@pytest.mark.parametrize("in_place", [False, True])
def test_only_a_full_checkpoint_is_ever_built_from(kind: CheckpointKind, in_place: bool) -> None:
    is_built = kind is CheckpointKind.FULL and in_place
    expected = mp.WeightsOrigin.CHECKPOINT if is_built else mp.WeightsOrigin.BASE
    assert origin_of(kind, builds_in_place=in_place) is expected


# ---- on two ranks


def resolve_on(rank: int, world_size: int, places: list[str | None], grouped: list[bool]) -> Any:
    place = places[rank]
    found = mp.resolve_resume_weights_source(
        place, {"model_name_or_path": BASE}, {"use_grouped_gemm": grouped[rank]}
    )
    return found.origin.value, str(found.path)


def test_the_coordinator_decides_for_all_ranks(tmp_path: Path) -> None:
    path = str(full(tmp_path))
    found = run_world(2, resolve_on, [path, path], [True, False])
    assert found == [("checkpoint", path)] * 2
    found = run_world(2, resolve_on, [path, path], [False, True])
    assert found == [("base", BASE)] * 2


def test_all_ranks_raise_what_the_coordinator_finds(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    path = str(tmp_path / "checkpoint-1")
    outcomes = run_outcomes(2, resolve_on, [path, path], [True, True])
    assert [outcome.error_class for outcome in outcomes] == ["NotCommittedError"] * 2


def test_ranks_that_resume_from_different_things_are_told_so(tmp_path: Path) -> None:
    path = str(full(tmp_path))
    outcomes = run_outcomes(2, resolve_on, [path, None], [True, True])
    assert [outcome.error_class for outcome in outcomes] == [MismatchError.__name__] * 2
    for outcome in outcomes:
        assert "rank 1 from no checkpoint" in str(outcome.error)
