"""Pipelines of stages: what each begins with, skips, results that do not belong any more."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import DigestMismatchError, InvalidInputError, MismatchError, NotFoundError
from tests.manager.small_training import Training
from tests.worlds import run_outcomes, run_world

SKIP, AGAIN = mp.OnStage.SKIP, mp.OnStage.AGAIN
BEGIN, RESUME, REUSE = mp.StageAction.BEGIN, mp.StageAction.RESUME, mp.StageAction.REUSE


def train(start: mp.StageStart, *steps: int, seed: int = 0) -> Training:
    """Train in the stage's run, from the result of the stage before."""
    training = Training(seed=seed)
    if start.weights is not None and start.action is BEGIN:
        mp.load(start.weights, {"model": training.model})
    with mp.CheckpointManager(start.directory, resume=start.resume) as manager:
        manager.resume(training.state)
        for step in steps:
            training.step()
            manager.save(step, training.state, metrics={"loss": 1 / step})
    return training


def run_stage(
    pipeline: mp.StagePipeline, stage: str, *steps: int, **options: Any
) -> mp.StageResult:
    train(pipeline.enter(stage, **options), *steps, seed=len(stage))
    return pipeline.finish(stage)


@pytest.fixture
def pipeline(tmp_path: Path) -> mp.StagePipeline:
    """With `pretrain` done, in two steps."""
    made = mp.StagePipeline(tmp_path / "mine")
    run_stage(made, "pretrain", 1, 2)
    return made


# ---- what the second document's pipeline does


@pytest.mark.case("D8")
def test_each_stage_begins_with_the_result_of_the_one_before(pipeline: mp.StagePipeline) -> None:
    start = pipeline.enter("sft")
    pretrained = pipeline.result("pretrain")
    assert pretrained is not None
    assert (start.action, start.weights) == (BEGIN, pretrained.path)
    assert start.directory == pipeline.directory / "sft"
    train(start, 1)
    tuned = pipeline.finish("sft", metrics={"eval_loss": 0.5})
    assert tuned.metrics == {"loss": 1.0, "eval_loss": 0.5}
    assert pipeline.enter("dpo").weights == tuned.path
    assert pipeline.enter("verifier").weights is None


@pytest.mark.case("D8")
def test_a_finished_stage_is_reused_and_not_trained_again(pipeline: mp.StagePipeline) -> None:
    start = pipeline.enter("pretrain")
    assert (start.action, start.result) == (REUSE, pipeline.result("pretrain"))


@pytest.mark.case("D8")
def test_a_stage_waits_for_the_one_before(tmp_path: Path) -> None:
    pipeline = mp.StagePipeline(tmp_path)
    with pytest.raises(InvalidInputError, match="sft begins with the result of pretrain"):
        pipeline.enter("sft")
    with pytest.raises(InvalidInputError, match="no stage 'rlhf' in this pipeline; it has"):
        pipeline.enter("rlhf")


@pytest.mark.case("D8")
def test_a_skip_takes_the_named_checkpoint_then_the_recorded_one_else_it_is_refused(
    tmp_path: Path, pipeline: mp.StagePipeline
) -> None:
    other = mp.StagePipeline(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="no result, and there is no stage before it"):
        other.enter("pretrain", policy=SKIP)
    theirs = pipeline.result("pretrain")
    assert theirs is not None
    named = other.enter("pretrain", policy=SKIP, checkpoint=theirs.path)
    assert named.action is mp.StageAction.SKIP
    assert named.result is not None and named.result.checkpoint_id == theirs.checkpoint_id
    recorded = other.enter("pretrain", policy=SKIP)
    assert recorded.result == named.result
    assert other.enter("sft").weights == theirs.path
    with pytest.raises(InvalidInputError, match=r"pass policy=OnStage\.SKIP too"):
        other.enter("sft", checkpoint=theirs.path)


@pytest.mark.case("D8")
def test_a_stage_that_is_skipped_hands_on_the_result_before_it_under_its_own_name(
    pipeline: mp.StagePipeline,
) -> None:
    start = pipeline.enter("sft", policy=SKIP)
    assert start.result is not None and start.result.stage == "pretrain"
    assert pipeline.enter("dpo").weights == start.result.path
    record = json.loads((pipeline.directory / "milepost-stages.json").read_bytes())
    assert record["stages"]["sft"]["checkpoint"] is None  # no alias of another stage's


@pytest.mark.case("D8")
def test_the_newest_checkpoint_of_a_stage_is_found_by_its_manifest(
    pipeline: mp.StagePipeline,
) -> None:
    assert pipeline.newest("dpo") is None
    train(pipeline.enter("sft"), 9, 10)
    assert pipeline.newest("sft") == pipeline.directory / "sft" / "checkpoint-10"
    pipeline.finish("sft", pipeline.directory / "sft" / "checkpoint-9")
    assert pipeline.newest("sft") == pipeline.directory / "sft" / "checkpoint-9"


@pytest.mark.case("D8")
def test_a_model_is_loaded_by_stage(pipeline: mp.StagePipeline) -> None:
    training, expected = Training(seed=5), Training(seed=6)
    report = pipeline.load("pretrain", {"model": training.model})
    assert report.step == 2
    mp.load(pipeline.directory / "pretrain" / "checkpoint-2", {"model": expected.model})
    for mine, theirs in zip(training.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(NotFoundError, match="sft has no result yet; those that have one: pretrain"):
        pipeline.load("sft", {"model": training.model})


# ---- lineage


@pytest.mark.case("E12")
def test_every_stage_knows_its_parent_by_id_and_digest(pipeline: mp.StagePipeline) -> None:
    run_stage(pipeline, "sft", 1)
    run_stage(pipeline, "dpo", 1)
    chain = pipeline.lineage("dpo")
    assert [result.stage for result in chain] == ["pretrain", "sft", "dpo"]
    record = json.loads((pipeline.directory / "milepost-stages.json").read_bytes())
    assert record["stages"]["pretrain"]["parent"] is None
    for before, after in pairwise(chain):
        assert record["stages"][after.stage]["parent"] == {
            "stage": before.stage,
            "checkpoint_id": before.checkpoint_id,
            "weights_digest": before.weights_digest,
        }


@pytest.mark.case("E12")
def test_paths_are_relative_so_the_whole_can_be_moved(
    tmp_path: Path, pipeline: mp.StagePipeline
) -> None:
    run_stage(pipeline, "sft", 1)
    text = (pipeline.directory / "milepost-stages.json").read_text()
    assert str(tmp_path) not in text
    pipeline.directory.rename(tmp_path / "moved")
    moved = mp.StagePipeline(tmp_path / "moved")
    result = moved.result("sft")
    assert result is not None and result.path == tmp_path / "moved" / "sft" / "checkpoint-1"
    assert moved.enter("sft").action is REUSE


@pytest.mark.case("E12")
def test_a_stage_goes_on_where_it_was_left(pipeline: mp.StagePipeline) -> None:
    whole = mp.StagePipeline(pipeline.directory.parent / "whole")
    run_stage(whole, "pretrain", 1, 2)
    expected = train(whole.enter("sft"), 1, 2, 3, 4, seed=3)
    train(pipeline.enter("sft"), 1, 2, seed=3)
    start = pipeline.enter("sft")
    assert (start.action, start.resume) == (RESUME, mp.Resume.MUST)
    found = train(start, 3, 4, seed=9)
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.case("E12")
def test_a_result_made_from_an_older_parent_is_stale(pipeline: mp.StagePipeline) -> None:
    run_stage(pipeline, "sft", 1)
    run_stage(pipeline, "pretrain", 1, 2, policy=AGAIN)
    with pytest.raises(MismatchError, match="stage sft is stale: it began with checkpoint"):
        pipeline.enter("sft")
    start = pipeline.enter("sft", stale=mp.OnStale.AGAIN)
    assert (start.action, start.resume) == (BEGIN, mp.Resume.NEVER)
    assert "now there is checkpoint" in start.stale[0]


@pytest.mark.case("E12")
def test_a_stage_that_was_left_is_stale_when_its_parent_changed(pipeline: mp.StagePipeline) -> None:
    train(pipeline.enter("sft"), 1)
    run_stage(pipeline, "pretrain", 1, policy=AGAIN)
    with pytest.raises(MismatchError, match="stage sft is stale"):
        pipeline.enter("sft")


@pytest.mark.case("E12")
def test_other_settings_make_a_result_stale_and_are_named(tmp_path: Path) -> None:
    pipeline = mp.StagePipeline(tmp_path)
    settings = {"lr": 0.1, "data": ["a", "b"]}
    run_stage(pipeline, "pretrain", 1, settings=settings)
    assert pipeline.enter("pretrain", settings=settings).action is REUSE
    with pytest.raises(MismatchError, match=r"stale: lr was 0\.1, is 0\.2"):
        pipeline.enter("pretrain", settings={**settings, "lr": 0.2})


@pytest.mark.case("E12")
@pytest.mark.parametrize("how", ["gone", "torn", "another"])
def test_a_result_that_is_not_there_any_more_is_stale(
    tmp_path: Path, pipeline: mp.StagePipeline, how: str
) -> None:
    path = pipeline.directory / "pretrain" / "checkpoint-2"
    if how == "gone":
        shutil.rmtree(path)
    elif how == "torn":
        (path / "model.safetensors").unlink()
    else:
        training = Training(seed=77)
        mp.save(path, training.state, step=2, on_existing=mp.OnExisting.REPLACE)
    expected = "not the result that stage pretrain ended with" if how == "another" else "is gone"
    with pytest.raises(MismatchError, match=expected):
        pipeline.enter("pretrain")
    with pytest.raises((MismatchError, NotFoundError), match=expected):
        pipeline.enter("sft")
    start = pipeline.enter("pretrain", stale=mp.OnStale.AGAIN)
    assert start.action is BEGIN and start.stale


@pytest.mark.case("E12")
def test_checkpoints_that_no_stage_began_are_not_taken_for_its_own(tmp_path: Path) -> None:
    pipeline = mp.StagePipeline(tmp_path)
    mp.save(tmp_path / "pretrain" / "checkpoint-1", Training().state, step=1)
    with pytest.raises(InvalidInputError, match="a training that was not entered"):
        pipeline.enter("pretrain")
    with pytest.raises(InvalidInputError, match="was not entered"):
        pipeline.finish("pretrain")
    assert pipeline.enter("pretrain", policy=AGAIN).resume is mp.Resume.NEVER


@pytest.mark.case("E12")
def test_a_record_that_was_changed_by_hand_is_refused(pipeline: mp.StagePipeline) -> None:
    record = pipeline.directory / "milepost-stages.json"
    record.write_text(record.read_text().replace("pretrain/checkpoint-2", "pretrain/checkpoint-1"))
    with pytest.raises(DigestMismatchError):
        pipeline.enter("sft")


def test_stages_have_to_make_sense() -> None:
    with pytest.raises(InvalidInputError, match="no stage before it"):
        mp.StagePipeline("x", [mp.Stage("b", after="a"), mp.Stage("a")])
    with pytest.raises(InvalidInputError, match="a word of its own"):
        mp.StagePipeline("x", [mp.Stage("a"), mp.Stage("a")])
    with pytest.raises(InvalidInputError, match="a word of its own"):
        mp.StagePipeline("x", [mp.Stage("../a")])


def test_settings_that_do_not_come_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="settings: "):
        mp.StagePipeline(tmp_path).enter("pretrain", settings={"lr": float("nan")})


# ---- on two ranks


def pass_through(rank: int, world_size: int, directory: Path) -> Any:
    pipeline = mp.StagePipeline(directory)
    start = pipeline.enter("pretrain")
    training = Training(seed=rank)
    model = torch.nn.parallel.DistributedDataParallel(training.model)
    with mp.CheckpointManager(start.directory, resume=start.resume) as manager:
        manager.resume({"model": model})
        manager.save(1, {"model": model})
    result = pipeline.finish("pretrain")
    return str(result.path), str(pipeline.enter("sft").weights)


def test_all_ranks_get_the_same_answers(tmp_path: Path) -> None:
    path = str(tmp_path / "pretrain" / "checkpoint-1")
    assert run_world(2, pass_through, tmp_path) == [(path, path)] * 2


def enter_only(rank: int, world_size: int, directory: Path) -> None:
    mp.StagePipeline(directory).enter("sft")


def test_all_ranks_get_the_same_error(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, enter_only, tmp_path)
    assert [outcome.error_class for outcome in outcomes] == ["InvalidInputError"] * 2
