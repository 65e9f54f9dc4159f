"""The native layout: read in parts, verified to the byte, and readable for ever."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    FormatError,
    InvalidInputError,
    NotCommittedError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from tests.directories import opened, reseal
from tests.golden import make_directory
from tests.states import same, snapshot, training

GOLDEN = Path(__file__).parents[1] / "golden" / "directory_v1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model in several parts, after two steps."""
    path = tmp_path_factory.mktemp("run") / "checkpoint-2"
    mp.save(path, training(steps=2), step=2, epoch=0.5, metrics={"loss": 1.5}, max_shard_size=500)
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "checkpoint-2")


# The golden directory.


def test_the_golden_directory_of_version_1_loads_with_every_value() -> None:
    make_directory.seed()
    expected = make_directory.state(trained=True)
    live = make_directory.state(trained=False)
    report = mp.load(GOLDEN, live, verify=mp.Verify.DIGESTS, rng=mp.RngRestore.LATER)
    assert report.step == make_directory.STEP
    assert same(snapshot(live), snapshot(expected))
    assert live["model"].head.weight is live["model"].embedding.weight
    assert report.metrics == {"loss": 0.25, "ppl": "inf"}
    assert not report.models["model"].missing and not report.kept and not report.not_loaded


def test_the_golden_random_state_still_gives_the_same_draws() -> None:
    make_directory.seed()
    expected = random.random(), np.random.rand(), torch.rand(3)
    report = mp.load(GOLDEN, make_directory.state(trained=False))
    torch.manual_seed(99)
    assert report.restore_rng() == []
    got = random.random(), np.random.rand(), torch.rand(3)
    assert got[:2] == expected[:2]
    # The seed was set before the model drew its first weights.
    make_directory.seed()
    make_directory.state(trained=True)
    assert torch.equal(torch.rand(3), got[2])


def test_the_golden_directory_verifies() -> None:
    report = mp.Checkpoint.open(GOLDEN).verify(threads=2)
    assert report.ok and report.problems == () and report.has_digests


# What is on disk, and reading it.


def test_the_safetensors_at_the_top_are_the_weight_parts_and_nothing_else(made: Path) -> None:
    """Servers load `*.safetensors` by glob."""
    index = json.loads((made / "model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) > 2
    assert {path.name for path in made.glob("*.safetensors")} == set(index["weight_map"].values())
    names = [name for path in made.glob("*.safetensors") for name in keys(path)]
    assert sorted(names) == sorted(index["weight_map"])
    assert not [path for path in made.iterdir() if path.suffix in (".bin", ".pt", ".pth")]


def keys(path: Path) -> list[str]:
    with safetensors.safe_open(path, "pt") as file:
        return list(file.keys())


def test_every_part_opens_with_safetensors_itself_and_holds_the_same_values(made: Path) -> None:
    checkpoint = opened(made)
    for path in made.rglob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                if path.parent == made:
                    assert torch.equal(file.get_tensor(name), checkpoint.read(name))


def test_a_handle_lists_what_the_manifest_lists(made: Path) -> None:
    checkpoint = opened(made)
    on_disk = {p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()}
    files = checkpoint.files()
    assert {file.name for file in files} == on_disk
    assert files[-1].name == "milepost.json"
    assert all(file.nbytes == (made / file.name).stat().st_size for file in files)
    assert checkpoint.nbytes == sum(file.nbytes for file in files)
    assert (checkpoint.info.step, checkpoint.info.epoch) == (2, 0.5)
    assert checkpoint.info.metrics == {"loss": 1.5}
    assert checkpoint.layout is mp.Layout.DIRECTORY


def test_tied_names_are_read_but_listed_once(made: Path) -> None:
    checkpoint = opened(made)
    assert dict(checkpoint.tied) == {"head.weight": "embedding.weight"}
    assert "head.weight" not in checkpoint.tensors()
    weights = checkpoint.read_weights()
    assert weights["head.weight"] is weights["embedding.weight"]
    assert same(
        dict(sorted(weights.items())), dict(sorted(training(steps=2)["model"].state_dict().items()))
    )
    assert torch.equal(checkpoint.read("head.weight"), weights["embedding.weight"])
    assert torch.equal(checkpoint.mapped("head.weight"), weights["embedding.weight"])


def test_a_slice_is_read_by_name_and_a_wrong_one_is_explained(made: Path) -> None:
    checkpoint = opened(made)
    whole = checkpoint.read("embedding.weight")
    assert torch.equal(
        checkpoint.read("head.weight", [slice(2, 5), slice(-3, None)]), whole[2:5, -3:]
    )
    with pytest.raises(
        InvalidInputError, match=r"head.weight: 3 slices .* stored shape is \(11, 8\)"
    ):
        checkpoint.read("head.weight", [slice(1)] * 3)


def test_an_unknown_name_is_refused_with_close_matches(made: Path) -> None:
    with pytest.raises(NotFoundError, match=r"'layer.0.weight' among 8; close: layers.0.weight"):
        opened(made).read("layer.0.weight")
    with pytest.raises(NotFoundError, match=r"no model 'ema'; it holds model"):
        opened(made).weights("ema")


def test_the_training_state_is_read_without_objects_to_put_it_in(made: Path) -> None:
    state = opened(made).training_state()
    assert state["progress"]["tokens"] == 30
    assert state["scheduler"]["last_epoch"] == 2
    names = opened(made).state_tensors()
    assert {f"optimizer.{name}" for name in state["optimizer"]["tensors"]} == {
        name for name in names if name.startswith("optimizer.")
    }


WITHOUT_TORCH = """
import sys
import milepost as mp
checkpoint = mp.Checkpoint.open(sys.argv[1])
assert checkpoint.tensors() and checkpoint.state_tensors() and checkpoint.files()
assert checkpoint.verify(threads=2).ok
assert mp.list_run(checkpoint.path.parent).newest.step == 2
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def test_looking_and_verifying_need_no_torch(made: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(made)], check=True)


# What is no checkpoint.


def test_a_path_that_is_wrong_says_what_lies_nearby(made: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nothing is there; .* holds checkpoint-2"):
        mp.Checkpoint.open(made.with_name("checkpoint-3"))
    with pytest.raises(NotFoundError, match=r"does not exist either"):
        mp.Checkpoint.open(tmp_path / "no" / "such")
    with pytest.raises(NotCommittedError, match=r"a run directory, .* name one of checkpoint-2"):
        mp.Checkpoint.open(made.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotCommittedError, match=r"no save of it was ever committed"):
        mp.Checkpoint.open(tmp_path / "empty")


def test_the_manifest_itself_opens_its_checkpoint(made: Path) -> None:
    assert opened(made / "milepost.json").path == made


def test_documents_of_a_newer_version_are_refused_by_name(copy: Path) -> None:
    reseal(copy, lambda document: document.update(format_version="2.0"))
    with pytest.raises(UnsupportedVersionError, match=r"version 2.0, this Milepost reads 1.x"):
        mp.Checkpoint.open(copy)


def test_a_state_document_of_a_newer_version_or_another_kind_is_refused(copy: Path) -> None:
    path = copy / "training" / "state.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "format_version": "2.0"}))
    with pytest.raises(UnsupportedVersionError, match=r"state.json: written in format version 2.0"):
        opened(copy).training_state()
    path.write_text(json.dumps({**document, "format": "other"}))
    with pytest.raises(FormatError, match=r"not a training state of milepost"):
        opened(copy).training_state()
    path.write_text(json.dumps({**document, "state": []}))
    with pytest.raises(FormatError, match=r"state: expected an object"):
        opened(copy).training_state()
    path.unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"weights can still be read"):
        opened(copy).training_state()


def test_a_manifest_beyond_all_size_is_not_even_read(copy: Path) -> None:
    with (copy / "milepost.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FormatError, match=r"a manifest has at most"):
        mp.Checkpoint.open(copy)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_what_cannot_be_read_is_no_damage(copy: Path) -> None:
    (copy / "milepost.json").chmod(0)
    with pytest.raises(StorageError, match=r"neither used nor ruled out"):
        mp.Checkpoint.open(copy)
