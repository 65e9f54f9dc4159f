"""Further files beside the weights, on which nothing depends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import milepost as mp
from tests.states import training


def test_documents_are_part_of_the_commit_and_take_the_place_of_our_own(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    documents = {"trainer_state.json": b'{"global_step": 1}', "Pooling_1/config.json": b"{}"}
    mp.save(place, training(), step=1, documents=documents)
    assert json.loads((place / "trainer_state.json").read_bytes()) == {"global_step": 1}
    assert (place / "Pooling_1" / "config.json").read_bytes() == b"{}"
    listed = {file.name: file.role for file in mp.Checkpoint.open(place).files()}
    assert listed["trainer_state.json"] == listed["Pooling_1/config.json"] == "info"
    assert mp.Checkpoint.open(place).verify().ok


@pytest.mark.parametrize(
    "name",
    [
        "milepost.json",
        "model.safetensors",
        "training/state.json",
        "../outside.json",
        "/etc/passwd",
        "a/b/c.json",
        ".hidden",
        "",
    ],
)
def test_a_document_cannot_be_or_hide_a_file_that_counts(tmp_path: Path, name: str) -> None:
    with pytest.raises(mp.errors.InvalidInputError):
        mp.save(tmp_path / "checkpoint-1", training(), step=1, documents={name: b""})
    assert not (tmp_path / "checkpoint-1").exists()
