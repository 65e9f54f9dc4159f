"""`milepost-train`, as it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import milepost as mp
from milepost_trainer.__main__ import FAILED, MISUSE
from tests.trainer.yaml_runs import write_text, yaml_of

SCRIPT = Path(sys.executable).with_name("milepost-train")


def train(directory: Path, document: str) -> subprocess.CompletedProcess[str]:
    (directory / "run.yaml").write_text(document)
    return subprocess.run(
        [str(SCRIPT), "run.yaml"],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_one_process_trains_saves_and_goes_on(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    first = train(tmp_path, yaml_of(tmp_path / "run", text, max_steps=2))
    assert first.returncode == 0, first.stderr
    assert sum("loss" in line for line in first.stdout.splitlines()) == 2
    second = train(tmp_path, yaml_of(tmp_path / "run", text, max_steps=4))
    assert second.returncode == 0, second.stderr
    steps = [line for line in second.stdout.splitlines() if line.startswith("step ")]
    assert [line.split("/")[0] for line in steps] == ["step 3", "step 4"]
    newest = mp.newest(tmp_path / "run")
    assert newest is not None and newest.step == 4


@pytest.mark.slow
def test_what_goes_wrong_is_one_line_and_a_code(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    wrong = train(tmp_path, yaml_of(tmp_path / "run", text) + "tp_sise: 2\n")
    assert wrong.returncode == MISUSE
    assert wrong.stderr == (
        "milepost-train: run.yaml: unknown key 'tp_sise'; did you mean tp_size?\n"
    )
    gone = str(tmp_path / "nowhere" / "checkpoint-1")
    failed = train(tmp_path, yaml_of(tmp_path / "run", text, resume_from_checkpoint=gone))
    assert failed.returncode == FAILED
    (line,) = failed.stderr.splitlines()
    assert line.startswith("milepost-train: ") and gone in line
