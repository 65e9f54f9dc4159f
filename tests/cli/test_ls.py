"""`milepost ls`: which checkpoints a run holds, which is newest and best, what does not count."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from milepost.checkpointing.lineage import Lineage
from milepost.layouts.trio import TrioContent, write_trio
from tests.cli.conftest import Make, Milepost


def steps(document: dict[str, list[dict[str, int]]]) -> list[int]:
    return [row["step"] for row in document["checkpoints"]]


@pytest.mark.case("V21")
def test_the_newest_is_the_highest_number_not_the_last_in_text_order(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    for step in (1, 2, 9, 10, 100, 9000, 10000):
        make(step)
    found = milepost("ls", tmp_path / "run", "--json").json()
    assert found["newest"] == 10000
    assert steps(found) == [1, 2, 9, 10, 100, 9000, 10000]
    assert [row["step"] for row in found["checkpoints"] if row["newest"]] == [10000]


@pytest.mark.case("V16")
def test_torn_directories_are_listed_with_the_reason_and_never_the_newest(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    make(10)
    for name in ("checkpoint-20", "checkpoint-30"):
        make(int(name[-2:]))
    part = run / "checkpoint-20" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-10])
    (run / "checkpoint-30" / "milepost.json").unlink()
    (run / "checkpoint-40").mkdir()
    (run / ".milepost-staging-x-checkpoint-50").mkdir()

    result = milepost("ls", run)
    found = milepost("ls", run, "--json").json()

    assert result.code == 0
    assert found["newest"] == 10
    assert steps(found) == [10]
    reasons = {torn["name"]: torn["reason"] for torn in found["torn"]}
    assert "model.safetensors has" in reasons["checkpoint-20"]
    assert reasons["checkpoint-40"].startswith("no milepost.json: its save never finished")
    assert set(reasons) == {"checkpoint-20", "checkpoint-30", "checkpoint-40"}
    assert found["unfinished"] == [".milepost-staging-x-checkpoint-50"]
    assert "never chosen and never counted" in result.out


def test_the_best_is_marked_and_nan_is_never_best(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1, loss=2.0, accuracy=0.5)
    make(2, loss=float("nan"), accuracy=0.9)
    make(3, loss=float("-inf"), accuracy=float("inf"))
    make(4, loss=2.5, accuracy=0.7)
    for best, expected in (("loss", 1), ("loss:max", 4), ("accuracy:max", 2)):
        found = milepost("ls", tmp_path / "run", "--best", best, "--json").json()
        assert [row["step"] for row in found["checkpoints"] if row["best"]] == [expected]
    assert found["checkpoints"][1]["metrics"]["loss"] == "nan"


def test_a_metric_that_no_checkpoint_records_is_refused_with_those_there_are(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1, loss=2.0)
    result = milepost("ls", tmp_path / "run", "--best", "los")
    assert result.code == 5
    assert result.out == ""
    assert result.err == (
        f"error: {tmp_path}/run: no checkpoint records a metric 'los'; recorded are: loss\n"
    )


def test_trios_and_pt_files_are_listed_by_name(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    make(1)
    weights = {"w": torch.ones(2)}
    content = TrioContent(model_state=weights, epoch=4, loss=0.25)
    write_trio(run, ["latest", "run.v2"], content)
    torch.save({"model_state_dict": weights, "epoch": 1, "loss": 0.5}, run / "old.pt")
    torch.save({"model_state_dict": weights}, run / "latest.pt")
    (run / "broken.pt").write_bytes(b"")

    found = milepost("ls", run, "--json").json()

    others = {other["name"]: other for other in found["others"]}
    assert sorted(others) == ["broken.pt", "latest", "latest.pt", "old.pt", "run.v2"]
    assert others["run.v2"]["layout"] == "trio"
    assert others["run.v2"]["metrics"]["loss"] == 0.25
    assert others["old.pt"]["epoch"] == 1
    assert "the trio 'latest' has the same name" in others["latest.pt"]["problem"]
    assert others["broken.pt"]["problem"]
    assert "run.v2" in milepost("ls", run).out


@pytest.mark.case("V24")
def test_links_for_people_may_be_wrong_or_circular_and_the_run_may_move(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1, loss=1.0)
    make(2, loss=2.0)
    run = tmp_path / "run"
    os.symlink("checkpoint-1", run / "latest")
    os.symlink("best", run / "best")
    os.symlink("checkpoint-2", run / "checkpoint-7")
    run = run.rename(tmp_path / "moved")

    found = milepost("ls", run, "--json").json()

    assert found["newest"] == 2
    assert steps(found) == [1, 2]
    assert [torn["name"] for torn in found["torn"]] == ["checkpoint-7"]


def test_a_checkpoint_that_a_later_resume_left_behind_is_marked_and_not_newest(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(10)
    make(20)
    make(30)
    make(15, lineage=Lineage(generation=1, branch_step=10))
    found = milepost("ls", tmp_path / "run", "--json").json()
    assert found["newest"] == 15
    assert [row["step"] for row in found["checkpoints"] if row["superseded"]] == [20, 30]
    assert "superseded" in milepost("ls", tmp_path / "run").out


def test_save_seconds_size_and_age_are_given(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    path = make(1, loss=2.0)
    (row,) = milepost("ls", tmp_path / "run", "--json").json()["checkpoints"]
    assert row["nbytes"] == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert row["save_s"] > 0
    assert row["save_nbytes_per_s"] == pytest.approx(row["nbytes"] / row["save_s"])
    assert 0 <= row["age_s"] < 600
    assert sum(row["phases"].values()) == row["save_s"]
    assert 0 < row["phase_nbytes"]["write"] <= row["nbytes"]
    out = milepost("ls", tmp_path / "run").out
    assert re.search(r"checkpoint-1 on rank 0: .*write \d+\.\d+ s \(\d.* KiB, \d.* GiB/s\)", out)


def test_tables_fit_80_columns_with_one_line_a_checkpoint(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    for step in (1, 100000):
        metrics = {"loss": 1.25, "eval/accuracy": 0.5, "perplexity": 9.0, "lr": 1e-4}
        make(step, lineage=Lineage(generation=step // 100000), **metrics)
    out = milepost("ls", tmp_path / "run", "--best", "perplexity").out
    lines = out.split("\n")[2:5]
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].split()[0] == "100000"
    assert "perplexity" in lines[0]
    assert lines[2].split()[-2:] == ["newest,", "best"]


def test_a_run_without_checkpoints_is_an_answer_and_a_missing_one_an_error(
    milepost: Milepost, tmp_path: Path
) -> None:
    empty = milepost("ls", tmp_path)
    assert empty.code == 0
    assert "0 checkpoints" in empty.out
    missing = milepost("ls", tmp_path / "nothing")
    assert missing.code == 3
    assert missing.err == f"error: {tmp_path}/nothing: no such run directory\n"


def test_a_checkpoint_given_as_a_run_is_refused_with_the_right_command(
    make: Make, milepost: Milepost
) -> None:
    path = make(1)
    result = milepost("ls", path)
    assert result.code == 5
    assert f"milepost show {path}" in result.err
