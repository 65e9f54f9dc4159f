"""Directories of torch's distributed checkpoint: content, slices, damage, hostile metadata."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    FormatError,
    KeyMismatchError,
    MismatchError,
    NotFoundError,
    UnsafePickleError,
)
from milepost.layouts.dcp_metadata import parse_metadata
from milepost.tools.export import ExportTarget, export_checkpoint
from milepost.tools.migrate_options import MigrateTarget, Search
from milepost.tools.migrate_sources import find_tasks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[1].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(2):
        model(torch.full((2, 4), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class App:
    """What the tutorials of torch save: a stateful object with model and optimizer inside."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded through it")


def written(kind: str, path: Path) -> tuple[nn.Module, torch.optim.AdamW]:
    """A trained model, saved by DCP in one of the ways in which programs nest their state."""
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    states: dict[str, dict[str, Any]] = {
        "nested": {
            "model": weights,
            "optimizer": moments,
            "scheduler": schedule.state_dict(),
            "progress": {"tokens": 12, "seen": [1, torch.ones(2)]},
            "step": 2,
        },
        "flattened": {"model": weights, "optimizer": flat},
        "app": {"app": App(model, optimizer)},
        "torchtitan": {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(2)}},
        "numbers": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    }
    save(states[kind], checkpoint_id=path)
    return model, optimizer


KINDS = ["nested", "flattened", "app", "torchtitan", "numbers"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_listed_and_read_under_the_names_of_the_model(
    kind: str, tmp_path: Path
) -> None:
    model, _ = written(kind, tmp_path / "step-2")
    checkpoint = mp.Checkpoint.open(tmp_path / "step-2")
    assert checkpoint.layout is mp.Layout.TORCH_DCP
    assert checkpoint.info.step == 2
    weights = model.state_dict()
    assert {n: i.shape for n, i in checkpoint.tensors().items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    read = checkpoint.read_weights()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert torch.equal(
        checkpoint.read("0.weight", [slice(1, 3), slice(0, 2)]), weights["0.weight"][1:3, 0:2]
    )
    assert checkpoint.verify().problems == ()
    with pytest.raises(NotFoundError, match=r"no tensor '0\.wieght' among 4; close: 0\.weight"):
        checkpoint.read("0.wieght")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_model_and_optimizer_take_weights_moments_and_groups(
    kind: str, tmp_path: Path
) -> None:
    model, optimizer = written(kind, tmp_path / "dcp")
    other, fresh = trained(seed=9)
    for group in fresh.param_groups:
        group["lr"] = 7.0
    report = mp.load(tmp_path / "dcp", {"model": other, "optimizer": fresh})
    assert report.level is mp.Level.RESHARDED
    for (name, param), (_, live) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(param, live), name
        saved, found = optimizer.state[param], fresh.state[live]
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[slot], found[slot]) for slot in saved), name
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_other_state_comes_back_where_it_was_saved(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    model, optimizer = trained(seed=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    progress: dict[str, Any] = {"tokens": 0, "seen": []}
    state = {"model": model, "optimizer": optimizer, "scheduler": schedule, "progress": progress}
    mp.load(tmp_path / "dcp", state)
    assert schedule.step_size == 1
    assert progress["tokens"] == 12 and torch.equal(progress["seen"][1], torch.ones(2))
    with pytest.raises(KeyMismatchError, match=r"holds no scaler; it holds model, optimizer"):
        mp.load(tmp_path / "dcp", {"model": model, "scaler": {"scale": 1.0}})
    whole = mp.Checkpoint.open(tmp_path / "dcp").training_state()
    assert whole["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    assert whole["step"] == 2


def test_a_state_without_names_is_refused_for_other_groups(tmp_path: Path) -> None:
    written("numbers", tmp_path / "dcp")
    model, _ = trained()
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match=r"groups of \[2, 2\] parameters without names"):
        mp.load(tmp_path / "dcp", {"model": model, "optimizer": other})


def test_chunks_in_the_safetensors_form_are_read_as_well(tmp_path: Path) -> None:
    model, _ = trained()
    writer = FileSystemWriter(
        tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS
    )
    save({"model": model.state_dict(), "note": "x"}, storage_writer=writer)
    read = mp.Checkpoint.open(tmp_path / "dcp").read_weights()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_a_chunk_whose_rows_do_not_lie_in_order_is_read_whole(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    save({"w": turned, "half": torch.ones(2, dtype=torch.float16)}, checkpoint_id=tmp_path)
    checkpoint = mp.Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("w"), turned)
    assert torch.equal(checkpoint.read("w", [slice(1, 3)]), turned[1:3])


def test_listing_reads_no_byte_of_a_tensor(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    file = next((tmp_path / "dcp").glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert len(mp.Checkpoint.open(tmp_path / "dcp").tensors()) == 4


def test_a_file_that_was_cut_short_is_named_with_the_tensor(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    file = next((tmp_path / "dcp").glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 100)
    checkpoint = mp.Checkpoint.open(tmp_path / "dcp")
    with pytest.raises(DamagedError, match=r"progress\.seen\.1 lies at .* cut short"):
        checkpoint.training_state()
    problems = checkpoint.verify().problems
    assert [problem.file for problem in problems] == [file.name]
    assert problems[0].tensor is not None
    file.unlink()
    with pytest.raises(CheckpointIncompleteError, match=rf"{file.name}: is missing"):
        mp.Checkpoint.open(tmp_path / "dcp" / ".metadata").read("0.weight")


def test_a_flipped_byte_is_found_by_verify_and_named(tmp_path: Path) -> None:
    model, _ = written("nested", tmp_path / "dcp")
    file = next((tmp_path / "dcp").glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    at = raw.index(model.state_dict()["0.weight"].numpy().tobytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    (problem,) = mp.Checkpoint.open(tmp_path / "dcp").verify().problems
    assert problem.tensor == "model.0.weight" and "checksum" in problem.message


class Command:
    """A pickle of this runs a command when it is loaded the usual way."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.text,)


def metadata_of(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())  # type: ignore[no-any-return]


def test_metadata_that_would_run_code_is_refused_and_named(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    metadata = metadata_of(tmp_path / "dcp")
    proof = tmp_path / "ran"
    metadata.planner_data = Command(f"touch {proof}")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        mp.Checkpoint.open(tmp_path / "dcp")
    assert not proof.exists()


def test_a_class_of_torch_that_is_no_record_of_dcp_is_refused(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    metadata = metadata_of(tmp_path / "dcp")
    metadata.planner_data = nn.Linear
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError, match=r"torch\.nn\.modules\.linear\.Linear"):
        mp.Checkpoint.open(tmp_path / "dcp")


def test_a_value_that_would_run_code_is_refused_when_it_is_read(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    save({"w": torch.ones(2), "x": {"evil": Command(f"touch {proof}")}}, checkpoint_id=tmp_path)
    checkpoint = mp.Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("w"), torch.ones(2))
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        checkpoint.training_state()
    assert not proof.exists()


def tensor_entry(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def outside(metadata: Metadata) -> None:
    tensor_entry(metadata, "model.0.weight").chunks[0].sizes = torch.Size([9, 9])


def with_a_hole(metadata: Metadata) -> None:
    tensor_entry(metadata, "model.0.weight").chunks[0].sizes = torch.Size([1, 4])


def without_chunks(metadata: Metadata) -> None:
    tensor_entry(metadata, "model.0.weight").chunks.clear()


def elsewhere(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def unplaced(metadata: Metadata) -> None:
    metadata.storage_data = {}


def transformed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outside, "lies outside of the shape"),
        (with_a_hole, "do not cover the shape"),
        (without_chunks, "do not cover the shape"),
        (elsewhere, "not a plain relative path"),
        (unplaced, "nothing says where"),
        (transformed, "stream extension"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    written("nested", tmp_path / "dcp")
    metadata = metadata_of(tmp_path / "dcp")
    change(metadata)
    with pytest.raises((FormatError, CheckpointIncompleteError), match=message):
        parse_metadata(pickle.dumps(metadata), "dcp/.metadata")


def test_a_directory_of_a_save_that_was_cut_off_is_no_checkpoint(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    shutil.move(tmp_path / "dcp" / ".metadata", tmp_path / "aside")
    with pytest.raises(mp.errors.NotCommittedError, match=r"without its \.metadata"):
        mp.Checkpoint.open(tmp_path / "dcp")


@pytest.mark.parametrize("to", list(ExportTarget))
def test_it_is_exported_to_every_layout(to: ExportTarget, tmp_path: Path) -> None:
    model, _ = written("nested", tmp_path / "step-2")
    out = tmp_path / ("out.pt" if to is ExportTarget.SINGLE_FILE else "out")
    export_checkpoint(tmp_path / "step-2", out, to=to)
    read = mp.Checkpoint.open(out).read_weights()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_migrate_says_that_export_is_the_tool_for_it(tmp_path: Path) -> None:
    written("nested", tmp_path / "dcp")
    (task,) = find_tasks([tmp_path / "dcp"], to=MigrateTarget.TRIO, out=None, search=Search.TOP)
    assert "torch's distributed checkpoint" in str(task.problem)
    assert "milepost export" in str(task.problem)
