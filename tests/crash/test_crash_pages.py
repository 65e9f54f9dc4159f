"""A page of zeros in any file, as a power cut leaves them: found, named, and stepped back from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import CheckpointError, CheckpointWarning
from milepost.layouts.checkpoint import Severity
from milepost.layouts.trio import TrioContent, write_trio

PAGE = 4096
INFO = {"trainer_state.json", "config.json"}
"""Files of which nothing is loaded: damage there is a warning."""


def training(seed: int) -> dict[str, Any]:
    """Some pages of weights and of moments, and a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 64)).pow(2).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, in several parts."""
    run = tmp_path_factory.mktemp("made") / "run"
    for step in (1, 2):
        mp.save(run / f"checkpoint-{step}", training(step), step=step, max_shard_size=9000)
    return run


def zeroed(path: Path) -> Iterator[int]:
    """Each page of a file that is not zeros already becomes so, in turn; then it is put back."""
    raw = path.read_bytes()
    for start in range(0, len(raw), PAGE):
        page = raw[start : start + PAGE]
        if page.strip(b"\0"):
            path.write_bytes(raw[:start] + bytes(len(page)) + raw[start + PAGE :])
            yield start
    path.write_bytes(raw)


def blamed(path: Path) -> dict[str, Severity]:
    try:
        return {p.file: p.severity for p in mp.Checkpoint.open(path).verify().problems}
    except CheckpointError as error:
        assert "milepost.json" in str(error)
        return {"milepost.json": Severity.ERROR}


@pytest.mark.case("V17")
def test_a_page_of_zeros_in_any_file_is_found_and_the_file_named(
    made: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(made / "checkpoint-2", tmp_path / "checkpoint-2")
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    count = 0
    for name in files:
        for start in zeroed(path / name):
            found = blamed(path)
            assert name in found, f"{name}: page at {start}"
            wanted = Severity.WARNING if name in INFO else Severity.ERROR
            assert found[name] is wanted, f"{name}: page at {start}"
            count += 1
    assert count > len(files) > 6, "some files have several pages"
    assert blamed(path) == {}


@pytest.mark.case("V17")
def test_a_resume_steps_back_from_a_page_of_zeros_and_says_so(made: Path, tmp_path: Path) -> None:
    kinds = ["model-*.safetensors", "optimizer-*.safetensors", "digests.bin", "state.json"]
    for number, kind in enumerate(kinds):
        run = shutil.copytree(made, tmp_path / str(number))
        (path, *_) = sorted((run / "checkpoint-2").rglob(kind))
        next(zeroed(path))
        live, wanted = training(9), training(1)
        with mp.CheckpointManager(run) as manager:
            with pytest.warns(CheckpointWarning, match="checkpoint-2"):
                report = manager.resume(live)
            assert report is not None and report.step == 1
            assert report.passed_over[0].startswith("checkpoint-2: ")
        for one, other in zip(
            live["model"].parameters(), wanted["model"].parameters(), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.case("V17")
def test_so_it_is_in_the_other_layouts(tmp_path: Path) -> None:
    state = training(3)
    content = TrioContent(
        model_state=dict(state["model"].state_dict()),
        optimizer_state=state["optimizer"].state_dict(),
        epoch=1,
        loss=0.5,
    )
    write_trio(tmp_path, ["latest"], content)
    mp.save_checkpoint(
        tmp_path / "one.pt", state["model"].state_dict(), state["optimizer"].state_dict(), epoch=1
    )
    places = {"latest": sorted(tmp_path.glob("latest.*")), "one.pt": [tmp_path / "one.pt"]}
    for name, files in places.items():
        assert not is_found(tmp_path / name)
        for file in files:
            missed = [start for start in zeroed(file) if not is_found(tmp_path / name)]
            assert missed == [], file


def is_found(path: Path) -> bool:
    try:
        report = mp.Checkpoint.open(path).verify()
    except CheckpointError:
        return True
    return any(problem.severity is Severity.ERROR for problem in report.problems)
