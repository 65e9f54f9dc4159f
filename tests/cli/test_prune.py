"""`milepost prune`, `pin`, `unpin`: what goes, and what never does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from milepost.checkpointing.lineage import Lineage
from milepost.layouts.run import list_run
from milepost.storage import fileops
from tests.cli.conftest import Make, Milepost


def steps(run: Path) -> list[int]:
    return [entry.step for entry in list_run(run).committed]


def snapshot(run: Path) -> dict[str, int]:
    return {str(p.relative_to(run)): p.lstat().st_mtime_ns for p in run.rglob("*")}


def test_any_policy_keeps_and_the_report_says_which(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step, loss in ((1, 9.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0), (6, 5.0)):
        make(step, loss=loss)
    keep = ("--keep", "last:2", "--keep", "best:1:loss:min", "--keep", "every:4")
    result = milepost("prune", run, *keep, "--json")
    assert result.code == 0
    found = result.json()
    assert [row["step"] for row in found["removed"]] == [1, 3]
    assert found["kept"]["2"] == ["best:1:loss:min"]
    assert found["kept"]["6"] == ["newest", "last:2"]
    assert found["nbytes"] == sum(row["nbytes"] for row in found["removed"]) > 0
    assert steps(run) == [2, 4, 5, 6]
    assert [p.name for p in run.iterdir() if p.name.startswith(".milepost-aside")] == []


def test_a_dry_run_says_the_same_and_changes_nothing(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        make(step)
    before = snapshot(run)
    result = milepost("prune", run, "--keep", "last:1", "--dry-run")
    assert result.code == 0
    assert "would remove 2 of 3 checkpoints" in result.out
    assert "nothing was changed" in result.out
    assert snapshot(run) == before
    planned = milepost("prune", run, "--keep", "last:1", "--dry-run", "--json").json()
    done = milepost("prune", run, "--keep", "last:1", "--json").json()
    assert planned["removed"] == done["removed"]
    assert steps(run) == [3]


@pytest.mark.case("V21")
@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("last:-1", [1, 2, 9, 10, 100, 9000, 10000]),
        ("all", [1, 2, 9, 10, 100, 9000, 10000]),
        ("last:1", [10000]),
        ("last:3", [100, 9000, 10000]),
    ],
)
def test_limits_mean_what_they_say(
    make: Make, milepost: Milepost, tmp_path: Path, policy: str, left: list[int]
) -> None:
    for step in (1, 2, 9, 10, 100, 9000, 10000):
        make(step)
    assert milepost("prune", tmp_path / "run", "--keep", policy).code == 0
    assert steps(tmp_path / "run") == left


@pytest.mark.case("V21")
def test_a_limit_of_0_is_refused_and_nothing_goes(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1)
    make(2)
    result = milepost("prune", tmp_path / "run", "--keep", "last:0")
    assert result.code == 5
    assert "would delete every checkpoint" in result.err
    assert steps(tmp_path / "run") == [1, 2]


@pytest.mark.case("V22")
@pytest.mark.parametrize("best", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2])
def test_neither_the_best_nor_the_newest_goes(
    make: Make, milepost: Milepost, tmp_path: Path, best: int, limit: int
) -> None:
    for step in (1, 2, 3):
        make(step, loss=0.5 if step == best else 1.0)
    keep = ("--keep", f"last:{limit}", "--keep", "best:1:loss")
    assert milepost("prune", tmp_path / "run", *keep).code == 0
    assert {3, best} <= set(steps(tmp_path / "run"))


@pytest.mark.case("V22")
def test_what_is_torn_or_foreign_is_neither_counted_nor_removed(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        make(step)
    (run / "checkpoint-4" / "training" / "state.json").unlink()
    (run / "checkpoint-1000").mkdir()
    (run / "checkpoint-1000" / "pytorch_model.bin").write_bytes(b"x")
    assert milepost("prune", run, "--keep", "last:2").code == 0
    assert steps(run) == [2, 3]
    assert (run / "checkpoint-4" / "model.safetensors").exists()
    assert (run / "checkpoint-1000" / "pytorch_model.bin").exists()


def test_pinned_checkpoints_stay_until_unpinned(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        make(step)
    assert milepost("pin", run, 1, 2).out == "pinned: 1, 2\n"
    assert milepost("unpin", run, 2, "--json").json()["pinned"] == [1]
    assert [r["pinned"] for r in milepost("ls", run, "--json").json()["checkpoints"]] == [
        True,
        False,
        False,
    ]
    found = milepost("prune", run, "--keep", "last:1", "--json").json()
    assert found["kept"]["1"] == ["pinned"]
    assert steps(run) == [1, 3]
    assert milepost("unpin", run, 1).out == "pinned: none\n"
    assert milepost("prune", run, "--keep", "last:1").code == 0
    assert steps(run) == [3]


def test_a_step_that_is_not_there_cannot_be_pinned(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1)
    result = milepost("pin", tmp_path / "run", 7)
    assert result.code == 3
    assert "no committed checkpoint of step 7; it holds 1" in result.err


def test_pins_that_cannot_be_read_stop_the_removal(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1)
    make(2)
    (tmp_path / "run" / "milepost-pins.json").write_text('{"steps": [1')
    result = milepost("prune", tmp_path / "run", "--keep", "last:1")
    assert result.code == 4
    assert steps(tmp_path / "run") == [1, 2]


def test_superseded_checkpoints_neither_count_nor_go_unless_asked(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    make(10)
    make(20)
    make(30)
    make(15, lineage=Lineage(generation=1, branch_step=10))
    found = milepost("prune", run, "--keep", "last:2", "--json").json()
    assert found["removed"] == []
    assert found["kept"]["30"] == ["superseded, not asked for"]
    milepost("pin", run, 30)
    assert milepost("prune", run, "--keep", "last:2", "--superseded").code == 0
    assert sorted(steps(run)) == [10, 15, 30]


def test_a_mistyped_metric_is_refused_before_anything_goes(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1, loss=1.0)
    make(2, loss=2.0)
    result = milepost("prune", tmp_path / "run", "--keep", "last:1", "--keep", "best:1:los")
    assert result.code == 5
    assert "recorded are: loss; nothing was removed" in result.err
    assert steps(tmp_path / "run") == [1, 2]


def test_a_run_that_another_process_writes_into_is_left_alone(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    make(1)
    make(2)
    script = (
        "import sys; from pathlib import Path; from milepost.storage.lease import RunLease\n"
        "with RunLease.of(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        result = milepost("prune", run, "--keep", "last:1")
        other.communicate()
    assert result.code == 7
    assert f"process {other.pid}" in result.err
    assert steps(run) == [1, 2]


def test_a_removal_that_fails_says_how_far_it_came(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        make(step)

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "rename" and "checkpoint-2 " in target:
            raise OSError(5, "Input/output error", target)
        return function(*arguments)

    with fileops.hooked(hook):
        result = milepost("prune", tmp_path / "run", "--keep", "last:1")
    assert result.code == 6
    assert "1 of 2 checkpoints were removed" in result.err
    assert steps(tmp_path / "run") == [2, 3]
