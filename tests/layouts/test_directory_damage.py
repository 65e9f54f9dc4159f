"""Damage to a checkpoint directory: found, named, and no more in the way than it must be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointError, DamagedError, NotFoundError
from milepost.format.header import read_header
from milepost.layouts.checkpoint import Severity
from tests.directories import opened, reseal
from tests.states import flip, same, snapshot, training


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model in several parts, after two steps."""
    path = tmp_path_factory.mktemp("run") / "checkpoint-2"
    mp.save(path, training(steps=2), step=2, epoch=0.5, metrics={"loss": 1.5}, max_shard_size=500)
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "checkpoint-2")


# Weights without the training state, and the reverse.


def read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MiB of weights with 8 MiB of moments."""
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("large") / "checkpoint-1"
    mp.save(path, {"model": model, "optimizer": optimizer}, step=1)
    return path


@pytest.mark.case("C4.22")
def test_loading_weights_reads_the_weights_and_looking_reads_none_of_them(large: Path) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    mp.load(large, {"model": model})  # imports are done
    weights = (large / "model.safetensors").stat().st_size
    before = read_by_this_process()
    mp.load(large, {"model": model})
    loaded = read_by_this_process() - before
    assert weights <= loaded < weights + 150_000
    before = read_by_this_process()
    checkpoint = opened(large)
    assert checkpoint.tensors() and checkpoint.state_tensors() and checkpoint.info.step == 1
    assert read_by_this_process() - before < 100_000


STRACED = """
import sys, torch, milepost as mp
mp.load(sys.argv[1], {"model": torch.nn.Linear(1024, 1024, bias=False)})
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_loading_weights_never_opens_the_optimizer(large: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    trace = [
        "strace",
        "-f",
        "-qq",
        "--seccomp-bpf",
        "-e",
        "trace=open,openat,openat2",
        "-o",
        str(log),
    ]
    done = subprocess.run([*trace, sys.executable, "-c", STRACED, str(large)], capture_output=True)
    if done.returncode != 0 and b"ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr.decode()
    opened_files = log.read_text()
    assert "model.safetensors" in opened_files
    assert "training/optimizer" not in opened_files


BROKEN_STATE: dict[str, Callable[[Path], object]] = {
    "optimizer of zeros": lambda p: zeros(p / "training" / "optimizer.safetensors"),
    "no optimizer": lambda p: (p / "training" / "optimizer.safetensors").unlink(),
    "no state document": lambda p: (p / "training" / "state.json").unlink(),
    "a cut state document": lambda p: os.truncate(p / "training" / "state.json", 20),
    "no training state at all": lambda p: shutil.rmtree(p / "training"),
}


def zeros(path: Path) -> None:
    """Same size, no byte behind it."""
    nbytes = path.stat().st_size
    path.unlink()
    with path.open("wb") as file:
        file.truncate(nbytes)


@pytest.mark.case("C1.3")
@pytest.mark.parametrize("damage", BROKEN_STATE)
def test_weights_load_whatever_became_of_the_training_state(
    damage: str, large: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(large, tmp_path / "checkpoint-1")
    BROKEN_STATE[damage](path)
    model = torch.nn.Linear(1024, 1024, bias=False)
    report = mp.load(path, {"model": model})
    assert report.level is mp.Level.WEIGHTS_ONLY
    assert torch.equal(model.weight, opened(large).read("weight"))
    assert torch.equal(opened(path).read_weights()["weight"], model.weight)
    live = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises((DamagedError, NotFoundError)):
        mp.load(path, live, verify=mp.Verify.DIGESTS)


def test_the_training_state_is_read_whatever_became_of_the_weights(copy: Path) -> None:
    for part in copy.glob("model-*.safetensors"):
        part.unlink()
    assert opened(copy).training_state()["progress"]["tokens"] == 30
    live: dict[str, Any] = {"progress": {"tokens": 0}}
    report = mp.load(copy, live)
    assert live["progress"]["tokens"] == 30
    assert report.level is mp.Level.WARM_RESTART
    with pytest.raises(DamagedError, match=r"model-00001-of-.* is missing"):
        mp.load(copy, {"model": training()["model"]})


# Damage.


def verdict(path: Path) -> list[tuple[str, str | None]]:
    """(file, tensor) of each problem; a manifest that is refused is a problem of the manifest."""
    try:
        report = mp.Checkpoint.open(path).verify()
    except CheckpointError as error:
        assert "milepost.json" in str(error)
        return [("milepost.json", None)]
    return [(problem.file, problem.tensor) for problem in report.problems]


@pytest.mark.case("C1.1")
def test_every_flipped_byte_of_every_document_is_found_and_its_file_named(tmp_path: Path) -> None:
    copy, model = tmp_path / "checkpoint-1", torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    mp.save(copy, {"model": model, "optimizer": optimizer, "at": {"x": 1}}, step=1)
    documents = [p for p in copy.rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    assert {p.name for p in documents} >= {"milepost.json", "state.json", "digests.bin"}
    for path in documents:
        name = path.relative_to(copy).as_posix()
        for at in range(path.stat().st_size):
            flip(path, at)
            assert name in {file for file, _ in verdict(copy)}, f"{name} byte {at}"
            flip(path, at)
    assert verdict(copy) == []


@pytest.mark.case("C1.1")
def test_a_flipped_byte_of_a_part_is_traced_to_its_tensor(copy: Path) -> None:
    for path in sorted(copy.rglob("*.safetensors")):
        name = path.relative_to(copy).as_posix()
        header = read_header(path)
        for at in (0, 7, 8, 9, 60, header.data_start - 1):
            flip(path, at)
            assert (name, None) in verdict(copy), f"{name} byte {at}"
            flip(path, at)
        for tensor, entry in header.tensors.items():
            for at in {entry.start, (entry.start + entry.end) // 2, entry.end - 1}:
                flip(path, header.data_start + at)
                assert verdict(copy) == [(name, tensor)]
                flip(path, header.data_start + at)
    assert verdict(copy) == []


def test_a_file_that_only_informs_warns_and_stops_no_load(copy: Path) -> None:
    flip(copy / "trainer_state.json", 5)
    report = opened(copy).verify()
    assert report.ok
    (problem,) = report.problems
    assert (problem.severity, problem.file) == (Severity.WARNING, "trainer_state.json")
    mp.load(copy, training(), verify=mp.Verify.DIGESTS)
    (copy / "trainer_state.json").unlink()
    mp.load(copy, training())


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "training/digests.bin"])
@pytest.mark.parametrize("how", ["gone", "shorter", "longer", "a directory", "a symlink"])
def test_a_file_that_is_not_as_it_was_saved_is_named_before_anything_is_touched(
    name: str, how: str, copy: Path, tmp_path: Path
) -> None:
    path = copy / name
    if how == "shorter":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "longer":
        os.truncate(path, path.stat().st_size + 1)
    else:
        path.rename(tmp_path / "moved")
        if how == "a directory":
            path.mkdir()
        elif how == "a symlink":
            path.symlink_to(tmp_path / "moved")
    live = training(seed=5)
    before = snapshot(live)
    with pytest.raises(DamagedError, match=rf"1 files are not as they were saved: {name}"):
        mp.load(copy, live)
    assert same(snapshot(live), before)
    report = opened(copy).verify()
    assert name in {problem.file for problem in report.problems}
    assert not report.ok


def test_weights_that_were_not_part_of_the_save_are_an_error_and_other_files_a_note(
    copy: Path,
) -> None:
    shutil.copy(copy / "model-00001-of-00003.safetensors", copy / "stranger.safetensors")
    (copy / "notes.txt").touch()
    problems = {p.file: p.severity for p in opened(copy).verify().problems}
    assert problems == {"stranger.safetensors": Severity.ERROR, "notes.txt": Severity.WARNING}


def test_a_checkpoint_that_lies_about_its_digests_is_found(copy: Path) -> None:
    """Records in exchange for those of another file, sealed again."""

    def swap(document: dict[str, Any]) -> None:
        first, second = document["files"][0], document["files"][1]
        first["records"], second["records"] = second["records"], first["records"]

    reseal(copy, swap)
    assert not opened(copy).verify().ok
    reseal(copy, lambda document: document["files"][0].update(records=[2**40, 2**40]))
    assert not opened(copy).verify().ok
    reseal(copy, lambda document: document["files"][0].update(records=[0, 2**62]))
    assert not opened(copy).verify().ok


def test_progress_of_a_verification_counts_every_byte_once(made: Path) -> None:
    seen: list[int] = []
    checkpoint = opened(made)
    report = checkpoint.verify(threads=3, on_bytes=seen.append)
    assert sum(seen) == report.checked_nbytes == checkpoint.manifest.nbytes
