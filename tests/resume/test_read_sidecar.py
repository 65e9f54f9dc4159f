"""Files beside the weights: read safely, and by all ranks alike or not at all."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    FormatError,
    InvalidInputError,
    UnsafePickleError,
)
from tests.worlds import run_outcomes, run_world

BIASES = "router_balancing_biases.pt"
PROVENANCE = "training_provenance.json"


def saved(run: Path) -> Path:
    path = run / "checkpoint-1"
    sidecars: Any = {
        BIASES: {"layers.0.gate": torch.arange(4.0)},
        PROVENANCE: b'{"gpt_oss_attention_sinks": "neutralized"}',
        "note.txt": b"plain",
    }
    mp.save(path, {"model": nn.Linear(2, 2)}, step=1, sidecars=sidecars)
    return path


def test_tensors_documents_and_bytes_come_back(tmp_path: Path) -> None:
    path = saved(tmp_path)
    biases = mp.read_sidecar(path, BIASES)
    assert biases is not None and list(biases) == ["layers.0.gate"]
    assert torch.equal(biases["layers.0.gate"], torch.arange(4.0))
    assert mp.read_sidecar(path, PROVENANCE) == {"gpt_oss_attention_sinks": "neutralized"}
    assert mp.read_sidecar(path, "note.txt") == b"plain"


def test_scores_of_a_frozen_reference_are_plain_containers(tmp_path: Path) -> None:
    scores: Any = {"train": {"logps": torch.randn(3), "digests": ["a", "b"], "rows": 2}}
    torch.save(scores, tmp_path / "reference_logps.pt")
    found = mp.read_sidecar(tmp_path, "reference_logps.pt")
    assert found is not None
    assert torch.equal(found["train"]["logps"], scores["train"]["logps"])
    assert found["train"]["rows"] == 2


def test_what_is_nowhere_is_none(tmp_path: Path) -> None:
    assert mp.read_sidecar(saved(tmp_path), "reference_logps.pt") is None
    assert mp.read_sidecar(tmp_path / "nothing", BIASES) is None


def test_what_the_manifest_lists_and_is_gone_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / BIASES).unlink()
    with pytest.raises(CheckpointIncompleteError, match="though the manifest"):
        mp.read_sidecar(path, BIASES)


def test_a_changed_byte_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / PROVENANCE).write_bytes((path / PROVENANCE).read_bytes().replace(b"neut", b"Neut"))
    with pytest.raises(DamagedError, match="not those that were saved"):
        mp.read_sidecar(path, PROVENANCE)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_a_pickle_that_runs_something_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"x": Evil()}, tmp_path / BIASES, pickle_module=pickle)
    with pytest.raises(UnsafePickleError):
        mp.read_sidecar(tmp_path, BIASES)


def test_a_document_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROVENANCE).write_text("{")
    with pytest.raises(FormatError):
        mp.read_sidecar(tmp_path, PROVENANCE)


@pytest.mark.parametrize("name", ["", "../x.pt", "training/state.json", ".hidden"])
def test_only_plain_names_are_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="without a path"):
        mp.read_sidecar(tmp_path, name)


# ---- on two ranks


def read_own(rank: int, world_size: int, places: list[Path]) -> Any:
    found = mp.read_sidecar(places[rank], BIASES)
    return None if found is None else float(found["layers.0.gate"].sum())


def with_biases(place: Path, value: float) -> Path:
    place.mkdir()
    torch.save({"layers.0.gate": torch.full((2,), value)}, place / BIASES)
    return place


def test_all_ranks_read_the_same(tmp_path: Path) -> None:
    place = with_biases(tmp_path / "a", 2.0)
    assert run_world(2, read_own, [place, place]) == [4.0, 4.0]
    assert run_world(2, read_own, [tmp_path, tmp_path]) == [None, None]


@pytest.mark.parametrize("present", [0, 1])
def test_a_file_that_one_rank_does_not_see_stops_all(tmp_path: Path, present: int) -> None:
    places = [tmp_path, tmp_path]
    places[present] = with_biases(tmp_path / "a", 2.0)
    outcomes = run_outcomes(2, read_own, places)
    assert [outcome.error_class for outcome in outcomes] == ["NotFoundError"] * 2
    assert all(f"not there for rank {1 - present}" in str(o.error) for o in outcomes)


def test_different_files_stop_all(tmp_path: Path) -> None:
    places = [with_biases(tmp_path / "a", 2.0), with_biases(tmp_path / "b", 3.0)]
    outcomes = run_outcomes(2, read_own, places)
    assert [outcome.error_class for outcome in outcomes] == ["MismatchError"] * 2


def test_a_file_that_one_rank_cannot_read_stops_all(tmp_path: Path) -> None:
    places = [with_biases(tmp_path / "a", 2.0), tmp_path / "b"]
    (tmp_path / "b" / BIASES).mkdir(parents=True)  # a directory: reading it fails
    outcomes = run_outcomes(2, read_own, places)
    assert [outcome.error_class for outcome in outcomes] == ["StorageError"] * 2
    assert all("rank 1: " in str(outcome.error) for outcome in outcomes)
