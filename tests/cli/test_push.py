"""`milepost push`: the command as people run it, against a small Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import milepost as mp
from tests.hf.conftest import make_model
from tests.tools.hub_server import serving

REPO = "someone/small-model"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama")
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    path = tmp_path_factory.mktemp("run") / "checkpoint-3"
    mp.save(path, state, step=3)
    return path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
    return subprocess.run(
        [sys.executable, "-m", "milepost", "push", *arguments],
        env=os.environ | values | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_push_uploads_to_the_hub_of_the_environment_and_says_so(
    checkpoint: Path, tmp_path: Path
) -> None:
    with serving() as hub:
        done = run(str(checkpoint), REPO, "--json", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
        files = hub.repos[REPO].files
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {file["name"] for file in document["files"]} == set(files)
    assert document["published"] is True and document["commit"]
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_dry_run_prints_names_and_sizes(checkpoint: Path) -> None:
    done = run(str(checkpoint), REPO, "--dry-run", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout and "optimizer" not in done.stdout
    assert "would publish 5 files" in done.stdout and REPO in done.stdout


def test_a_hub_that_refuses_ends_with_one_line_and_the_code_for_refusals(
    checkpoint: Path, tmp_path: Path
) -> None:
    with serving() as hub:
        hub.busy[("POST", "/repos/create")] = [403]
        done = run(str(checkpoint), REPO, "--endpoint", hub.url, HF_HOME=str(tmp_path))
    assert done.returncode == 5
    assert done.stderr.count("error: ") == 1 and "could not create the repository" in done.stderr
