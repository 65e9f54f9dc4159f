"""What kind of checkpoint lies in a directory, by the names of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import milepost as mp
from milepost.adapters.kinds import ADAPTER_PICKLE as PICKLE
from milepost.adapters.kinds import CheckpointKind, checkpoint_kind
from milepost.checkpointing.adapter_load import stored_adapter
from milepost.errors import FormatError, InvalidInputError, NotCommittedError, NotFoundError
from milepost.layouts.checkpoint import Checkpoint
from tests.adapters.lora_models import adapted, base

KINDS = [
    (["model.safetensors"], CheckpointKind.FULL),
    (["model.safetensors.index.json"], CheckpointKind.FULL),
    (["pytorch_model.bin"], CheckpointKind.FULL),
    (["adapter_model.safetensors", "adapter_config.json"], CheckpointKind.ADAPTER),
    (["adapter_model.bin"], CheckpointKind.ADAPTER),
    (["model.safetensors", "adapter_model.safetensors"], CheckpointKind.FULL),
    (["model.safetensors", "resume_adapter.json"], CheckpointKind.MERGED_ADAPTER_MISSING),
    (
        ["model.safetensors", "resume_adapter.json", "resume_adapter/adapter_model.safetensors"],
        CheckpointKind.MERGED_ADAPTER,
    ),
    (
        ["model.safetensors", "resume_adapter.json", "resume_adapter/adapter_model.bin"],
        CheckpointKind.MERGED_ADAPTER,
    ),
    (["model.safetensors", "resume_adapter/adapter_model.safetensors"], CheckpointKind.FULL),
    (["config.json"], CheckpointKind.INVALID),
    ([], CheckpointKind.INVALID),
]


def make(directory: Path, names: list[str]) -> Path:
    directory.mkdir()
    for name in names:
        place = directory / name
        place.parent.mkdir(exist_ok=True)
        content = {"adapter_dir": "resume_adapter"} if name == "resume_adapter.json" else {}
        if name.endswith("index.json"):
            content = {"metadata": {}, "weight_map": {}}  # type: ignore[dict-item]
        place.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(("names", "kind"), KINDS, ids=str)
def test_names_of_files_say_what_a_directory_is(
    names: list[str], kind: CheckpointKind, tmp_path: Path
) -> None:
    assert checkpoint_kind(make(tmp_path / "checkpoint-1", names)) is kind


def test_slices_of_experts_per_rank_are_nothing_to_load(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint-1", ["model-00000-of-00002.safetensors"])
    index = {"metadata": {"format": "ep_sharded"}, "weight_map": {}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_kind(directory) is CheckpointKind.INVALID
    (directory / "adapter_model.safetensors").write_bytes(b"")
    assert checkpoint_kind(directory) is CheckpointKind.ADAPTER


@pytest.mark.parametrize("content", ["[]", "{}", '{"adapter_dir": 3}', '{"adapter_dir": "../x"}'])
def test_a_marker_that_names_no_directory_of_its_own_is_refused(
    content: str, tmp_path: Path
) -> None:
    directory = make(tmp_path / "checkpoint-1", ["model.safetensors"])
    (directory / "resume_adapter.json").write_text(content)
    with pytest.raises(FormatError, match=r"resume_adapter\.json"):
        checkpoint_kind(directory)


def test_nothing_at_a_path_is_no_kind(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        checkpoint_kind(tmp_path / "absent")


def test_of_a_committed_checkpoint_only_what_its_manifest_lists_counts(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": base()}, step=1)
    (place / "resume_adapter.json").write_text('{"adapter_dir": "resume_adapter"}')
    assert mp.checkpoint_kind(place) is CheckpointKind.FULL
    mp.save(tmp_path / "checkpoint-2", {"model": adapted()}, step=2)
    assert mp.checkpoint_kind(mp.Checkpoint.open(tmp_path / "checkpoint-2")) is (
        CheckpointKind.ADAPTER
    )
    torch.manual_seed(0)
    merged = tmp_path / "checkpoint-3"
    mp.save(merged, {"model": adapted()}, step=3, adapters=mp.Adapters.MERGED)
    assert mp.checkpoint_kind(merged) is CheckpointKind.MERGED_ADAPTER
    (merged / "resume_adapter" / "adapter_model.safetensors").unlink()
    assert mp.checkpoint_kind(merged) is CheckpointKind.MERGED_ADAPTER_MISSING


def test_an_adapter_that_is_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    """Old versions of peft wrote `adapter_model.bin`."""
    alone, beside = tmp_path / "alone", tmp_path / "merged"
    for place in (alone, beside / "resume_adapter"):
        place.mkdir(parents=True)
        torch.save({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, place / PICKLE)
        (place / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(NotCommittedError, match=rf"it holds {PICKLE}: name the file"):
        Checkpoint.open(alone)
    save_file({"q.weight": torch.ones(2, 2)}, beside / "model.safetensors", {"format": "pt"})
    (beside / "resume_adapter.json").write_text('{"adapter_dir": "resume_adapter"}')
    with pytest.raises(InvalidInputError, match=rf"its adapter is {PICKLE}, a pickle"):
        stored_adapter(Checkpoint.open(beside))
