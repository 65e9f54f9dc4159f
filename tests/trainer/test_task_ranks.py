"""The loss of a task is the same number however its model and its data are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from milepost_trainer.config import parse_config
from milepost_trainer.training import Run
from tests.marks import slow
from tests.trainer.task_runs import BERT, TASKS, write_lines, yaml_changes
from tests.trainer.yaml_runs import MOE, WITHOUT_DROPOUT, ranks_of, yaml_of
from tests.worlds import run_world

STEPS = 3
Measured = dict[str, list[dict[str, float]]]


def steps_of(document: str) -> list[dict[str, float]]:
    """What each step measures, the norm of its gradients, and an evaluation after the last one."""
    run = Run(parse_config(document, "run.yaml"))
    run.task.prepare(run.splits, None)
    measured = []
    for _ in range(STEPS):
        metrics = run.task.train_step(run.batches.next())
        norm = run.model.clip_grad_norm_(1.0)
        for optimizer in run.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        measured.append({**metrics, "norm": norm})
    return [*measured, run.evaluate()]


def all_steps(rank: int, world_size: int, documents: dict[str, str]) -> Measured:
    return {name: steps_of(document) for name, document in documents.items()}


def documents(directory: Path, mesh: str, tasks: tuple[str, ...], **changes: Any) -> dict[str, str]:
    found = {}
    for task in tasks:
        lines = write_lines(directory, task)
        evaluated = {"eval_files": [str(write_lines(directory, task, begin=30, count=9))]}
        yaml = {**yaml_changes(task), "model_config": WITHOUT_DROPOUT, **evaluated, **changes}
        found[task] = yaml_of(directory / "run", lines, mesh, **yaml)
    return found


def compare(directory: Path, mesh: str, tasks: tuple[str, ...], **changes: Any) -> None:
    alone = {
        name: steps_of(document)
        for name, document in documents(directory, "", tasks, **changes).items()
    }
    ranks = run_world(ranks_of(mesh), all_steps, documents(directory, mesh, tasks, **changes))
    for found in ranks:
        assert found == ranks[0]
        for task in tasks:
            for mine, one in zip(found[task], alone[task], strict=True):
                assert mine == pytest.approx(one, rel=2e-4, abs=1e-5), task


@pytest.mark.parametrize(
    "mesh",
    [
        *("dp_shard2", "tp2", "cp2"),
        *map(slow, ("ddp2", "dp_shard2 tp2", "dp_shard2 cp2", "ddp2 dp_shard2", "cp2 tp2")),
    ],
)
def test_every_task_has_on_a_mesh_the_numbers_of_one_process(mesh: str, tmp_path: Path) -> None:
    compare(tmp_path, mesh, TASKS)


@pytest.mark.parametrize(
    ("mesh", "tasks"),
    [
        ("dp_shard2 ep2", ("dpo",)),
        slow("dp_shard2 ep2", ("kto", "sdpg", "reward", "classification", "value", "embedding")),
        slow("tp2 ep2", ("dpo", "reward", "classification", "value")),
        slow("cp2 ep2", ("dpo", "embedding")),
        slow("dp_shard4 ep2", ("dpo", "reward")),
    ],
)
def test_experts_that_are_spread_give_the_numbers_of_one_process(
    mesh: str, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    compare(tmp_path, mesh, tasks, model_config=MOE)


@pytest.mark.parametrize("mesh", ["dp_shard2", slow("ddp2")])
def test_an_encoder_has_the_numbers_of_one_process(mesh: str, tmp_path: Path) -> None:
    compare(tmp_path, mesh, ("embedding",), model_config=BERT)


@pytest.mark.parametrize("mesh", ["dp_shard2", slow("cp2"), slow("dp_shard2 tp2")])
def test_scores_that_were_computed_before_are_those_of_the_live_base(
    mesh: str, tmp_path: Path
) -> None:
    tasks = ("dpo", "kto", "sdpg")
    live = {name: steps_of(document) for name, document in documents(tmp_path, "", tasks).items()}
    made = documents(tmp_path, mesh, tasks, precompute_reference_logps=True)
    for found in run_world(ranks_of(mesh), all_steps, made):
        for task in tasks:
            for mine, one in zip(found[task], live[task], strict=True):
                assert mine == pytest.approx(one, rel=2e-4, abs=1e-5), task


def test_packed_rows_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    compare(tmp_path, "tp2", ("sft",), packing=True, global_batch_size=2)
