"""`save`: what it writes, what it leaves alone, and the directory it makes."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import milepost as mp
from milepost.format.dtypes import DTYPES
from milepost.format.header import read_header
from tests.directories import opened
from tests.states import TinyLM, bits, same, snapshot, train, training


def test_a_save_says_what_it_wrote_and_how_long_each_phase_took(tmp_path: Path) -> None:
    report = mp.save(tmp_path / "run" / "checkpoint-3", training(steps=1), step=3)
    assert (report.step, report.written, report.path) == (3, True, tmp_path / "run/checkpoint-3")
    assert set(report.phases) == {"capture", "plan", "stage", "write", "commit"}
    checkpoint = opened(report.path)
    assert checkpoint.manifest.checkpoint_id == report.checkpoint_id
    assert report.notes == ("model: not a Hugging Face model: TinyLM has no config.json",)
    assert sorted(os.listdir(tmp_path / "run")) == [".milepost.lock", "checkpoint-3"]


def test_the_manifest_tells_what_wrote_it_and_from_what(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3"
    metrics: dict[str, Any] = {
        "loss": torch.tensor(0.5),
        "accuracy": np.float32(0.25),
        "tokens": 7,
    }
    mp.save(
        path,
        training(steps=1),
        step=3,
        epoch=1.5,
        metrics=metrics,
        model_config={"hidden_size": 8},
    )
    manifest = opened(path).manifest
    assert (manifest.step, manifest.epoch) == (3, 1.5)
    assert manifest.metrics == {"loss": 0.5, "accuracy": 0.25, "tokens": 7}
    assert manifest.writer["torch"] == torch.__version__
    assert manifest.provenance["packages"]["torch"]
    assert manifest.provenance["command"]
    assert manifest.exactness["threads"] == torch.get_num_threads()
    kinds = {key: entry.kind for key, entry in manifest.state.items()}
    assert kinds == {
        "model": "model",
        "optimizer": "optimizer",
        "scheduler": "stateful",
        "progress": "value",
    }
    assert manifest.state["optimizer"].class_name == "torch.optim.adamw.AdamW"


@pytest.mark.case("C3.15")
def test_numbers_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    minus: Any = torch.tensor(-float("inf"))
    metrics = {"nan": float("nan"), "inf": float("inf"), "minus": minus}
    mp.save(tmp_path / "checkpoint-1", training(), step=1, metrics=metrics)
    assert opened(tmp_path / "checkpoint-1").info.metrics == {
        "nan": "nan",
        "inf": "inf",
        "minus": "-inf",
    }
    for path in (tmp_path / "checkpoint-1").rglob("*.json"):
        json.loads(path.read_bytes(), parse_constant=pytest.fail)


def test_saving_changes_nothing_that_lives(tmp_path: Path) -> None:
    state = training(steps=2)
    fresh = torch.optim.AdamW(state["model"].parameters())
    state["fresh"] = fresh
    before, gradients = snapshot(state), [bits(p.grad) for p in state["model"].parameters()]
    places = [(p.data_ptr(), p.stride()) for p in state["model"].parameters()]
    draws = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    mp.save(tmp_path / "checkpoint-2", state, step=2)
    assert same(snapshot(state), before)
    assert [bits(p.grad) for p in state["model"].parameters()] == gradients
    assert [(p.data_ptr(), p.stride()) for p in state["model"].parameters()] == places
    after = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    assert same(after, draws)
    assert not fresh.state, "nothing is initialised by saving"


@pytest.mark.parametrize("step", [0, 7])
def test_a_name_without_a_step_may_hold_any(step: int, tmp_path: Path) -> None:
    mp.save(tmp_path / "final", training(), step=step)
    assert mp.Checkpoint.open(tmp_path / "final").info.step == step


def test_paths_may_be_text_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mp.save("checkpoint-1", training(), step=1)
    mp.save("deep/run/checkpoint-1/", training(), step=1)
    assert mp.load("deep/run/checkpoint-1", training(seed=3)).step == 1
    assert mp.Checkpoint.open("checkpoint-1").verify().ok


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    mp.save(tmp_path / "checkpoint-1", training(), step=1)
    monkeypatch.chdir(tmp_path)


def test_a_command_line_that_is_no_utf_8_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "caf\udce9.py", "x" * 10_000])
    mp.save(tmp_path / "checkpoint-1", training(), step=1)
    command = opened(tmp_path / "checkpoint-1").manifest.provenance["command"]
    assert command[:2] == ["python", "caf\N{REPLACEMENT CHARACTER}.py"]
    assert len(command[2]) == 400


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        mp.save(tmp_path / "checkpoint-1", training(), step=1)
    finally:
        os.umask(before)
    for path in (tmp_path / "checkpoint-1").rglob("*"):
        wanted = 0o750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_the_page_cache_mode_writes_the_same_directory(tmp_path: Path) -> None:
    options = mp.WriteOptions(durability=mp.Durability.PAGE_CACHE)
    mp.save(tmp_path / "checkpoint-1", training(steps=1), step=1, options=options)
    assert mp.Checkpoint.open(tmp_path / "checkpoint-1").verify().ok


def test_every_mode_writes_the_same_bytes(tmp_path: Path) -> None:
    state, digests = training(steps=1), set()
    for mode in mp.WriteMode:
        path = tmp_path / mode.value
        mp.save(path, state, step=1, rng=mp.Rng.LEAVE_OUT, options=mp.WriteOptions(mode=mode))
        digests.add(
            tuple((f.name, f.digest) for f in opened(path).manifest.files if f.role != "info")
        )
    assert len(digests) == 1


# Tensors of every kind.


class Bag(nn.Module):
    """A model of whatever tensors it is given."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def round_trip(
    tmp_path: Path, tensors: dict[str, Tensor], limit: int | str = "5GB"
) -> dict[str, Tensor]:
    """Save a bag and give back what a fresh bag of contiguous zeros has loaded."""
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": Bag(**tensors)}, step=1, max_shard_size=limit)
    zeros = {
        name: torch.zeros(t.shape, dtype=torch.uint8).view(t.dtype)
        if t.dtype.itemsize == 1
        else torch.zeros(t.shape, dtype=t.dtype)
        for name, t in tensors.items()
    }
    live = Bag(**zeros)
    mp.load(path, {"model": live})
    return dict(live.named_buffers())


@pytest.mark.case("V05")
@pytest.mark.parametrize("limit", ["5GB", 1])
def test_every_type_of_tensor_survives_in_one_part_and_in_many(
    limit: int | str, tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    for row in DTYPES.values():
        dtype = getattr(torch, row.torch_name or "", None)
        if dtype is None:
            continue
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24 * dtype.itemsize,))
        tensors[f"t_{row.name}"] = raw.to(torch.uint8).view(dtype).view(4, 6)
    tensors |= {
        "scalar": torch.tensor(2**62, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "nothing": torch.empty(3, 0, dtype=torch.bfloat16),
    }
    got = round_trip(tmp_path, tensors, limit)
    assert {n: (t.dtype, t.shape, bits(t)) for n, t in got.items()} == {
        n: (t.dtype, t.shape, bits(t)) for n, t in tensors.items()
    }


@pytest.mark.case("V02")
def test_views_are_saved_as_their_values_and_keep_their_strides(tmp_path: Path) -> None:
    views = {
        "transposed": torch.randn(3, 5).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "every_other": torch.randn(11)[::2],
        "expanded": torch.randn(1).expand(1000),
        "slice": torch.randn(100_000)[5:10],
    }
    strides = {name: tensor.stride() for name, tensor in views.items()}
    got = round_trip(tmp_path, views)
    assert {name: bits(t) for name, t in got.items()} == {n: bits(t) for n, t in views.items()}
    assert {name: tensor.stride() for name, tensor in views.items()} == strides
    header = read_header(tmp_path / "checkpoint-1" / "model.safetensors")
    assert header.tensors["slice"].nbytes == 20, "the hidden buffer is not written"
    assert header.file_nbytes - header.data_start == 4 * (15 + 96 + 6 + 1000 + 5)


@pytest.mark.case("V01")
def test_slices_of_one_buffer_are_saved_apart_and_overlapping_ones_in_full(tmp_path: Path) -> None:
    flat = torch.randn(300)
    parts = {"a": flat[:100], "b": flat[100:200], "c": flat[200:], "overlap": flat[50:150]}
    got = round_trip(tmp_path, parts)
    assert {name: bits(t) for name, t in got.items()} == {n: bits(t) for n, t in parts.items()}
    assert opened(tmp_path / "checkpoint-1").tied == {}
    header = read_header(tmp_path / "checkpoint-1" / "model.safetensors")
    assert header.file_nbytes - header.data_start == 4 * 400


@pytest.mark.case("V01")
@pytest.mark.case("C4.21")
def test_a_tied_head_is_written_once_and_tied_again_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    state = training(steps=1)
    mp.save(path, state, step=1)
    on_disk = load_file(path / "model.safetensors")
    assert "embedding.weight" in on_disk and "head.weight" not in on_disk
    live = training(seed=4)
    mp.load(path, live)
    assert live["model"].head.weight is live["model"].embedding.weight
    assert same(snapshot(live), snapshot(state))


@pytest.mark.case("V11")
def test_the_size_limit_counts_tensor_bytes_and_the_total_counts_tied_ones_once(
    tmp_path: Path,
) -> None:
    path, tensor = tmp_path / "checkpoint-1", torch.zeros(100)
    bag = Bag(a=tensor, b=torch.zeros(100), c=torch.zeros(100), d=torch.zeros(750))
    bag.register_buffer("again", tensor)
    mp.save(path, {"model": bag}, step=1, max_shard_size="1KB")
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 400 * 3 + 3000
    assert index["weight_map"] == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }
    mp.save(tmp_path / "checkpoint-2", {"model": bag}, step=2)
    assert [p.name for p in (tmp_path / "checkpoint-2").glob("*.safetensors")] == [
        "model.safetensors"
    ]


@pytest.mark.case("V07")
def test_every_part_carries_the_tag_of_the_framework(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", training(steps=1), step=1, max_shard_size=100)
    parts = list((tmp_path / "checkpoint-1").rglob("*.safetensors"))
    assert len(parts) > 5
    assert all(read_header(part).metadata == {"format": "pt"} for part in parts)


# The place in a run.


def test_a_save_follows_the_newest_of_its_run_unless_told_otherwise(tmp_path: Path) -> None:
    first = mp.save(tmp_path / "checkpoint-1", training(), step=1)
    mp.save(tmp_path / "checkpoint-2", training(), step=2)
    manifest = opened(tmp_path / "checkpoint-2").manifest
    assert (manifest.parent_id, manifest.generation) == (first.checkpoint_id, 0)
    branch = mp.Lineage(parent_id=first.checkpoint_id, generation=1, branch_step=1)
    mp.save(tmp_path / "checkpoint-5", training(), step=5, lineage=branch)
    mp.save(tmp_path / "checkpoint-6", training(), step=6)
    manifest = opened(tmp_path / "checkpoint-6").manifest
    assert (manifest.generation, manifest.branch_step) == (1, 1)
    assert [entry.step for entry in mp.list_run(tmp_path).current] == [1, 5, 6]


def test_the_log_history_lies_where_the_hugging_face_trainer_puts_it(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("nan")}]
    mp.save(tmp_path / "checkpoint-2", training(), step=2, epoch=0.25, log_history=history)
    document = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_bytes())
    assert (document["global_step"], document["epoch"]) == (2, 0.25)
    assert document["log_history"] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_training_goes_on_after_a_save_as_if_there_had_been_none(tmp_path: Path) -> None:
    saved, never = training(), training()
    torch.manual_seed(7)
    losses = train(never, 4)
    torch.manual_seed(7)
    first = train(saved, 2)
    mp.save(tmp_path / "checkpoint-2", saved, step=2)
    assert first + train(saved, 2) == losses
    assert same(snapshot(saved), snapshot(never))


def test_a_model_without_parameters_and_a_fresh_optimizer_are_saved_too(tmp_path: Path) -> None:
    model = TinyLM()
    state = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "none": nn.Identity(),
    }
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    assert mp.load(tmp_path / "checkpoint-1", state).level is mp.Level.EXACT
    assert mp.Checkpoint.open(tmp_path / "checkpoint-1").verify().problems == ()
