"""Sidecars: files that the weights need are committed with them, listed, and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from tests.states import training

BIASES = {"model.layers.0.mlp.gate": torch.arange(4.0)}


def save(path: Path, sidecars: Any) -> mp.SaveReport:
    return mp.save(path, training(), step=1, sidecars=sidecars)


def manifest_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "milepost.json").read_text())
    return found


def test_sidecars_are_written_listed_and_needed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, {"router_balancing_biases.pt": BIASES, "provenance.json": b"{}"})
    loaded = torch.load(path / "router_balancing_biases.pt", weights_only=True)
    assert loaded.keys() == BIASES.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in BIASES.items())
    assert (path / "provenance.json").read_bytes() == b"{}"
    manifest = manifest_of(path)
    assert manifest["needs"] == ["router_balancing_biases.pt", "provenance.json"]
    roles = {file["name"]: file["role"] for file in manifest["files"]}
    assert {roles[name] for name in manifest["needs"]} == {"weights"}
    assert mp.Checkpoint.open(path).verify().problems == ()


def test_a_sidecar_that_changed_or_went_away_is_found(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, {"provenance.json": b'{"a": 1}'})
    (path / "provenance.json").write_bytes(b'{"a": 2}')
    [problem] = mp.Checkpoint.open(path).verify().problems
    assert problem.severity is mp.Severity.ERROR and problem.file == "provenance.json"
    (path / "provenance.json").unlink()
    assert not mp.Checkpoint.open(path).verify().ok
    assert mp.newest(tmp_path) is None


def test_a_checkpoint_without_sidecars_needs_none(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", training(), step=1)
    assert manifest_of(tmp_path / "checkpoint-1")["needs"] == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/b.pt", b"", "without a path"),
        ("..", b"", "without a path"),
        ("", b"", "without a path"),
        (".hidden", b"", "without a path"),
        ("milepost.json", b"", "has a file of this name already"),
        ("trainer_state.json", b"", "has a file of this name already"),
        ("model.safetensors", b"", "has a file of this name already"),
        ("biases.safetensors", b"", "choose another ending"),
        ("biases.bin", BIASES, "choose another ending"),
        ("biases.json", BIASES, r"end the name in \.pt"),
    ],
)
def test_a_name_that_cannot_be_a_sidecar_is_refused_before_a_file_exists(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(mp.errors.InvalidInputError, match=message):
        save(tmp_path / "checkpoint-1", {name: content})
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_manager_passes_sidecars_on(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.resume(training()) is None
        report = manager.save(1, training(), sidecars={"biases.pt": BIASES})
    assert manifest_of(report.path)["needs"] == ["biases.pt"]
