"""Hugging Face directories: opened as they are, and every way they can be incomplete is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from tests.states import bits

PARTS = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]


def tiny(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))


def four_parts(path: Path) -> Path:
    """A four-part model as `save_pretrained` writes it, with a config."""
    path.mkdir()
    weight_map: dict[str, str] = {}
    for number, part in enumerate(PARTS):
        tensors = {f"{number}.{name}": t for name, t in tiny()[number].state_dict().items()}
        save_file(tensors, path / part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, part)
    index = {"metadata": {"total_size": 4 * 80}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"model_type": "tiny"}')
    return path


def opened(path: Path) -> HuggingFaceCheckpoint:
    checkpoint = mp.Checkpoint.open(path)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    return checkpoint


def assert_untouched_refusal(path: Path, error: type[Exception], message: str) -> None:
    """Reading, loading and verifying all name the fault; no weight has changed."""
    model = tiny(seed=9)
    before = [bits(tensor) for tensor in model.state_dict().values()]
    with pytest.raises(error, match=message):
        mp.load(path, {"model": model})
    assert [bits(tensor) for tensor in model.state_dict().values()] == before
    with pytest.raises(error, match=message):
        opened(path).read_weights()
    report = opened(path).verify()
    assert not report.ok
    assert not report.has_digests


def test_a_foreign_directory_is_read_whole_or_in_slices(tmp_path: Path) -> None:
    checkpoint = opened(four_parts(tmp_path / "hf"))
    expected = tiny().state_dict()
    assert checkpoint.layout is mp.Layout.HUGGING_FACE
    assert {name: bits(t) for name, t in checkpoint.read_weights().items()} == {
        name: bits(t) for name, t in expected.items()
    }
    assert torch.equal(checkpoint.read("2.weight", [slice(1, 3)]), expected["2.weight"][1:3])
    assert checkpoint.info.model_config == {"model_type": "tiny"}
    assert checkpoint.training_state() == {}
    roles = {file.name: file.role for file in checkpoint.files()}
    assert [name for name, role in roles.items() if role == "weights"] == PARTS
    assert checkpoint.verify().problems == ()


def test_a_foreign_directory_fills_a_model_and_says_it_was_weights_only(tmp_path: Path) -> None:
    model = tiny(seed=9)
    report = mp.load(four_parts(tmp_path / "hf"), {"model": model})
    assert report.level is mp.Level.WEIGHTS_ONLY
    assert [bits(t) for t in model.state_dict().values()] == [
        bits(t) for t in tiny().state_dict().values()
    ]
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InvalidInputError, match=r"load\(\) takes one model from it"):
        mp.load(tmp_path / "hf", {"model": model, "optimizer": optimizer})


@pytest.mark.case("V10")
def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    (path / PARTS[2]).unlink()
    assert_untouched_refusal(
        path, CheckpointIncompleteError, f"1 of 4 parts are missing: {PARTS[2]}"
    )


@pytest.mark.case("V10")
def test_a_part_that_ends_early_is_named(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    os.truncate(path / PARTS[1], (path / PARTS[1]).stat().st_size - 10)
    assert_untouched_refusal(path, DamagedError, PARTS[1])


@pytest.mark.case("V10")
def test_a_tensor_that_has_another_name_in_its_part_is_named(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    tensors = {f"renamed.{name}": t for name, t in tiny()[3].state_dict().items()}
    save_file(tensors, path / PARTS[3], metadata={"format": "pt"})
    assert_untouched_refusal(
        path, CheckpointIncompleteError, r"tensor '3\.(weight|bias)' is not in it"
    )


def test_a_tensor_that_the_index_does_not_know_is_named(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    tensors = {f"3.{name}": t for name, t in tiny()[3].state_dict().items()}
    save_file({**tensors, "extra": torch.zeros(2)}, path / PARTS[3])
    assert_untouched_refusal(path, CheckpointIncompleteError, r"holds tensor 'extra'")


@pytest.mark.case("V10")
def test_the_same_damage_to_a_directory_of_ours_is_named_too(tmp_path: Path) -> None:
    for number, damage in enumerate(("missing", "shorter", "renamed")):
        path = tmp_path / str(number) / "checkpoint-1"
        mp.save(path, {"model": tiny()}, step=1, max_shard_size=80)
        part = path / PARTS[2]
        if damage == "missing":
            part.unlink()
        elif damage == "shorter":
            os.truncate(part, part.stat().st_size - 10)
        else:
            raw = part.read_bytes()
            part.write_bytes(raw.replace(b'"2.weight"', b'"9.weight"'))
        report = mp.Checkpoint.open(path).verify()
        assert PARTS[2] in {problem.file for problem in report.problems}
        with pytest.raises(DamagedError, match=PARTS[2]):
            mp.load(path, {"model": tiny()}, verify=mp.Verify.DIGESTS)


@pytest.mark.parametrize(
    "index", [b"", b"{", b"[]", b"{}", b'{"weight_map": {"a": "../../etc/passwd"}}']
)
def test_an_index_that_cannot_be_right_is_refused(index: bytes, tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    (path / "model.safetensors.index.json").write_bytes(index)
    assert_untouched_refusal(path, FormatError, r"model\.safetensors\.index\.json")


def test_an_index_left_behind_beside_a_whole_model_is_not_used_and_reported(tmp_path: Path) -> None:
    """`from_pretrained` takes the one file; what we read is what it would load."""
    path = four_parts(tmp_path / "hf")
    save_file(tiny(seed=5).state_dict(), path / "model.safetensors")
    assert bits(opened(path).read("0.weight")) == bits(tiny(seed=5).state_dict()["0.weight"])
    report = opened(path).verify()
    assert report.ok
    assert [problem.file for problem in report.problems] == ["model.safetensors.index.json"]


def test_an_index_that_names_one_whole_part_is_used(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    save_file(tiny().state_dict(), path / "model.safetensors")
    weight_map = dict.fromkeys(tiny().state_dict(), "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert opened(path).verify().problems == ()
    assert set(opened(path).tensors()) == set(weight_map)


def test_symlinks_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs = four_parts(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for entry in blobs.iterdir():
        (snapshot / entry.name).symlink_to(f"../blobs/{entry.name}")
    assert opened(snapshot).verify().problems == ()
    assert bits(opened(snapshot).read("0.weight")) == bits(tiny().state_dict()["0.weight"])


def test_one_safetensors_file_is_a_checkpoint_of_weights(tmp_path: Path) -> None:
    save_file(tiny().state_dict(), tmp_path / "some.model.safetensors")
    checkpoint = opened(tmp_path / "some.model.safetensors")
    assert set(checkpoint.tensors()) == set(tiny().state_dict())
    assert [file.name for file in checkpoint.files()] == ["some.model.safetensors"]
    assert checkpoint.info.step is None
    with pytest.raises(NotFoundError, match=r"no tensor '0\.wieght' among 8; close: 0\.weight"):
        checkpoint.read("0.wieght")


def test_an_adapter_is_recognised_by_its_name(tmp_path: Path) -> None:
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert list(opened(tmp_path).tensors()) == ["lora_A"]


def test_sharded_experts_are_refused_with_the_command_that_merges_them(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    name = path / "model.safetensors.index.json"
    index = json.loads(name.read_bytes())
    index["metadata"]["format"] = "ep_sharded"
    name.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"milepost merge-ep-shards"):
        opened(path).tensors()


def test_a_trainer_checkpoint_gives_its_step_and_its_training_state(tmp_path: Path) -> None:
    path = four_parts(tmp_path / "checkpoint-30")
    state = {"global_step": 30, "epoch": 1.5, "log_history": []}
    (path / "trainer_state.json").write_text(json.dumps(state))
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save({"last_epoch": 30}, path / "scheduler.pt")
    rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
    torch.save(rng, path / "rng_state.pth")
    checkpoint = opened(path)
    assert (checkpoint.info.step, checkpoint.info.epoch) == (30, 1.5)
    assert checkpoint.info.dialect == "hugging-face-trainer"
    found = checkpoint.training_state()
    assert set(found) == {"optimizer", "scheduler", "rng_state"}
    assert found["scheduler"] == {"last_epoch": 30}
    moments = found["optimizer"]["state"][0]["exp_avg"]
    assert bits(moments) == bits(optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"global_step": "x", "epoch": null}'])
def test_a_trainer_state_that_is_none_gives_no_step(text: str, tmp_path: Path) -> None:
    path = four_parts(tmp_path / "hf")
    (path / "trainer_state.json").write_text(text)
    assert opened(path).info.step is None
