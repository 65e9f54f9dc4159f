"""The examples run as their readers run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.checkpointing import load_checkpoint
from milepost.layouts.checkpoint import Checkpoint
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


def accelerate_loop(run: Path, *, steps: int, processes: int) -> dict[int, float]:
    """The loss of each step that `examples/accelerate_loop.py` printed."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = ["--output-dir", str(run), "--steps", str(steps), "--save-every", "5"]
    printed = subprocess.run(
        [*launch, str(EXAMPLES / "accelerate_loop.py"), *options],
        check=True,
        capture_output=True,
        text=True,
        cwd=run.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_accelerate_loop_goes_on_as_one_that_never_stopped(
    processes: int, tmp_path: Path
) -> None:
    """Stopped within an epoch after a save, and after steps that no save holds."""
    whole = accelerate_loop(tmp_path / "whole", steps=20, processes=processes)
    first = accelerate_loop(tmp_path / "cut", steps=8, processes=processes)
    second = accelerate_loop(tmp_path / "cut", steps=20, processes=processes)
    assert list(first) == list(range(1, 9)) and list(second) == list(range(6, 21))
    assert {**first, **second} == whole
    ends = [Checkpoint.open(tmp_path / run / "checkpoint-20") for run in ("whole", "cut")]
    assert same(dict(ends[0].read_weights()), dict(ends[1].read_weights()))
    assert same(dict(ends[0].training_state()), dict(ends[1].training_state()))


def hf_trainer(run: Path, *, kill_at: int = 0) -> str:
    """What `examples/hf_trainer.py` prints in 20 steps, or until it is killed."""
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "hf_trainer.py"),
            *("--run", str(run), "--steps", "20", "--kill-at", str(kill_at)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=run.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == (1 if kill_at else 0), done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_hugging_face_trainer_goes_on_as_one_that_was_never_killed(tmp_path: Path) -> None:
    whole = hf_trainer(tmp_path / "whole")
    hf_trainer(tmp_path / "run", kill_at=13)
    second = hf_trainer(tmp_path / "run")
    assert "going on from checkpoint-10" in second
    assert second.splitlines()[-1] == whole.splitlines()[-1]
    assert whole.splitlines()[-1].startswith("weights ")


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
