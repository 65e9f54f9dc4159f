"""The examples run as their readers run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.checkpointing import load_checkpoint
from tests.states import same

EXAMPLES = Path(__file__).parent.parent / "examples"


def train_decoder(run: Path, *, steps: int) -> str:
    """What `examples/train_decoder.py` prints; it saves every other step and keeps two."""
    options = {"--run": run, "--steps": steps, "--save-every": 2, "--keep-last": 2}
    arguments = [str(word) for option in options.items() for word in option]
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_decoder.py"), *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=run.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout


def test_the_decoder_resumes_and_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    first = train_decoder(run, steps=5)
    assert "starting with new weights" in first
    assert load_checkpoint(run / "latest_checkpoint.pt")["step"] == 4
    assert load_checkpoint(run / "decoder_final.pt")["step"] == 5

    second = train_decoder(run, steps=8)
    assert "resumed from latest_checkpoint.pt: 4 steps done" in second
    assert "step 4:" not in second and "step 6:" in second
    assert "deleted step_2.pt" in second and "deleted step_4.pt" in second
    assert {path.name for path in run.iterdir()} == {
        "best.pt",
        "decoder_final.pt",
        "latest_checkpoint.pt",
        "step_6.pt",
        "step_8.pt",
    }

    train_decoder(whole, steps=8)
    final = load_checkpoint(run / "decoder_final.pt")
    assert final["final"] is True and final["step"] == 8
    for name in ("decoder_final.pt", "best.pt", "latest_checkpoint.pt", "step_8.pt"):
        assert same(load_checkpoint(run / name), load_checkpoint(whole / name))
    best = load_checkpoint(run / "best.pt")
    assert best["val_loss"] == best["best_loss"] == final["best_loss"]


@pytest.mark.slow
def test_the_second_act_moves_a_run_over_three_meshes_and_recites() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_meshes.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Beautiful is better than ugly." in done.stdout
