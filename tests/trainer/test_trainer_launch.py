"""The trainer as people start it: torchrun, a SIGKILL, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from milepost_trainer.__main__ import MISUSE
from tests.states import same
from tests.trainer.yaml_runs import KILLED, contents, run, write_text, yaml_of

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def started(document: str, directory: Path, *launcher: str) -> Iterator[subprocess.Popen[str]]:
    """`python [launcher] -m milepost_trainer run.yaml`, gone at the end of the block."""
    (directory / "run.yaml").write_text(document)
    job = subprocess.Popen(
        [sys.executable, *launcher, "-m", "milepost_trainer", "run.yaml"],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        try:
            yield job
        finally:
            kill_all(job.pid)


def kill_all(launcher: int) -> None:
    """SIGKILL for the ranks, which torchrun starts in sessions of their own, and then for it."""
    listings = Path(f"/proc/{launcher}/task").glob("*/children")
    ranks = [int(pid) for listing in listings for pid in listing.read_text().split()]
    for pid in [*ranks, launcher]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_two_processes_under_torchrun_are_killed_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    text = write_text(tmp_path)
    end = run(tmp_path / "whole", text, "dp_shard2")
    document = yaml_of(tmp_path / "run", text, "dp_shard2")
    seen = []
    with started(document, tmp_path, *TORCHRUN) as job:
        assert job.stdout is not None
        for line in job.stdout:
            seen.append(line)
            if line.startswith(f"step {KILLED}/"):
                break
        kill_all(job.pid)
        _, errors = job.communicate(timeout=180)
    assert job.returncode == -signal.SIGKILL, errors
    assert "mesh: dp_shard=2" in "".join(seen) and sum("loss" in line for line in seen) == KILLED
    resumed = run(tmp_path / "run", text, "dp_shard2")
    assert same(contents(resumed), contents(end))


def test_a_yaml_that_cannot_be_run_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    document = yaml_of(tmp_path / "run", write_text(tmp_path)) + "stepz: 3\n"
    with started(document, tmp_path) as job:
        _, errors = job.communicate(timeout=180)
    assert job.returncode == MISUSE
    assert errors == "milepost-train: run.yaml: unknown key 'stepz'\n"
