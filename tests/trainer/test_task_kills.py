"""Tasks with adapters, and preferences beside sinks, killed in the middle on every kind of mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost_trainer.config import parse_config
from milepost_trainer.parallel import ParallelModel
from milepost_trainer.sinks import NEUTRAL_SINK
from milepost_trainer.tasks import ReferenceTask
from milepost_trainer.training import Run
from tests.marks import slow
from tests.parallel.models import whole
from tests.states import same
from tests.trainer.lora_runs import LORA, BaseOf, adapter_of, on_base
from tests.trainer.task_runs import (
    REFERENCED,
    TASKS,
    history,
    kill_task,
    run_task,
    yaml_changes,
)
from tests.trainer.test_sinks import GPT_OSS
from tests.trainer.yaml_runs import SAVED, contents, ranks_of, yaml_of
from tests.worlds import run_world

MESHES = ("ddp2", "dp_shard2", "tp2", "cp2", "dp_shard2 ep2", "dp_shard2 tp2")
QUICK = {("kto", "dp_shard2"), ("classification", "tp2")}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has after a resume, whole: the weights of the policy and of the reference."""

    policy: Weights
    reference: Weights


def held_by_ranks(output: Path, lines: Path, task: str, mesh: str, **changes: Any) -> list[Held]:
    document = yaml_of(output, lines, mesh, **{**yaml_changes(task), **changes})
    return run_world(ranks_of(mesh), _held, document)


def _held(rank: int, world_size: int, document: str) -> Held:
    config = parse_config(document, "run.yaml")
    run = Run(config)
    with mp.CheckpointManager(config.output_dir, resume=mp.Resume.MUST) as manager:
        assert run.resume(manager) == SAVED
    assert isinstance(run.task, ReferenceTask)
    reference = run.task.reference._model
    assert reference is not None
    return Held(_weights(run.model), _weights(reference))


def _weights(model: ParallelModel) -> Weights:
    return {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("task", "mesh"),
    [
        (task, mesh) if (task, mesh) in QUICK else slow(task, mesh)
        for task in TASKS
        for mesh in MESHES
    ],
)
def test_a_task_with_adapters_that_is_killed_ends_like_one_that_never_stopped(
    task: str,
    mesh: str,
    base_of: BaseOf,
    samples: dict[str, Path],
    tmp_path: Path,
) -> None:
    base = base_of("moe" if "ep" in mesh else "llama")
    changes = on_base(base, lora=LORA)
    end = run_task(tmp_path / "whole", samples[task], task, mesh, **changes)
    kill_task(tmp_path / "killed", samples[task], task, mesh, **changes)
    if task in REFERENCED:
        stock = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
        for held in held_by_ranks(tmp_path / "killed", samples[task], task, mesh, **changes):
            assert held.reference.keys() == stock.keys()
            assert all(torch.equal(held.reference[name], value) for name, value in stock.items())
    resumed = run_task(tmp_path / "killed", samples[task], task, mesh, **changes)
    assert history(resumed) == history(end)  # losses, rewards, whatever else a task measures
    assert same(contents(resumed), contents(end))
    assert same(adapter_of(resumed), adapter_of(end))
    first = adapter_of(end.with_name(f"checkpoint-{SAVED}"))
    assert not any(torch.equal(first[name], value) for name, value in adapter_of(end).items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard2", "dp_shard2 ep2"])
@pytest.mark.parametrize(
    "changes",
    [{"reset_sinks": True}, {"reset_sinks": True, "lora": LORA}, {"sinks": "live"}],
    ids="-".join,
)
def test_dpo_beside_sinks_that_is_killed_ends_like_one_that_never_stopped(
    changes: dict[str, Any], mesh: str, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes = {"model_config": GPT_OSS, **changes}
    end = run_task(tmp_path / "whole", samples["dpo"], "dpo", mesh, **changes)
    kill_task(tmp_path / "killed", samples["dpo"], "dpo", mesh, **changes)
    for held in held_by_ranks(tmp_path / "killed", samples["dpo"], "dpo", mesh, **changes):
        sinks = [name for name in held.reference if name.endswith("sinks")]
        assert len(sinks) == 2
        assert all(torch.equal(held.policy[name], held.reference[name]) for name in sinks)
        for name in sinks:
            assert ("reset_sinks" in changes) == bool((held.reference[name] == NEUTRAL_SINK).all())
    resumed = run_task(tmp_path / "killed", samples["dpo"], "dpo", mesh, **changes)
    assert history(resumed) == history(end)
    assert same(contents(resumed), contents(end))
    first, *others = (entry for entry in history(end) if "learning_rate" in entry)
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)  # a policy is its base still
    assert all(abs(entry["rewards/chosen"]) > 1e-6 for entry in others)
