"""Small runs of the trainer for tests: their YAML, worlds that run them, and what they leave."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import yaml

import milepost as mp
from milepost_trainer.config import TrainerConfig, parse_config
from milepost_trainer.training import Run, train
from tests.parallel.models import whole
from tests.worlds import run_outcomes, run_world

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
WITHOUT_DROPOUT: dict[str, Any] = {**LLAMA, "attention_dropout": 0.0}
MOE: dict[str, Any] = {
    **WITHOUT_DROPOUT,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 8,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
KEYS = {
    "dp_shard": "dp_shard_size",
    "ddp": "dp_replicate_size",
    "tp": "tp_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "pp": "pipeline_parallel_size",
}
SAVED, KILLED, END = 3, 4, 6


def write_text(directory: Path) -> Path:
    """A training file of some hundred rows."""
    path = directory / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, they say.\n" for n in range(120)))
    return path


def yaml_of(output: Path, text: Path, mesh: str = "", **changes: Any) -> str:
    """The YAML of a run in `output`; `mesh` is such as `dp_shard2 tp2`."""
    sizes = {KEYS[part.rstrip("0123456789")]: int(part[-1]) for part in mesh.split()}
    document = {
        "model_config": LLAMA,
        "train_files": [str(text)],
        "max_seq_length": 16,
        "global_batch_size": 4,
        "max_steps": END,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "save_steps": SAVED,
        "logging_steps": 1,
        "output_dir": str(output),
        "resume_from_checkpoint": True,
    }
    return yaml.safe_dump({**document, **sizes, **changes}, sort_keys=False)


def config_of(output: Path, text: Path, mesh: str = "", **changes: Any) -> TrainerConfig:
    """The same, parsed."""
    return parse_config(yaml_of(output, text, mesh, **changes), "run.yaml")


def ranks_of(mesh: str) -> int:
    """The processes of a mesh; experts take none of their own."""
    size = 1
    for part in mesh.split():
        size *= 1 if part.startswith("ep") else int(part[-1])
    return size


class _Kill(logging.Handler):
    """SIGKILL when the log says that a step is done."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._line = f"step {step}/"

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._line):
            os.kill(os.getpid(), signal.SIGKILL)


def _train(rank: int, world_size: int, document: str, kill_after: int | None) -> None:
    if kill_after is not None:
        logger = logging.getLogger("milepost_trainer")
        logger.setLevel(logging.INFO)
        logger.addHandler(_Kill(kill_after))
    train(parse_config(document, "run.yaml"))


def run(output: Path, text: Path, mesh: str = "", **changes: Any) -> Path:
    """Train to the end in a world of the mesh's size; the last checkpoint."""
    document = yaml_of(output, text, mesh, **changes)
    run_world(ranks_of(mesh), _train, document, None)
    return output / f"checkpoint-{changes.get('max_steps', END)}"


def run_and_kill(output: Path, text: Path, mesh: str = "", **changes: Any) -> None:
    """The same, with a SIGKILL to every rank after the step that follows the save."""
    document = yaml_of(output, text, mesh, **changes)
    outcomes = run_outcomes(ranks_of(mesh), _train, document, KILLED)
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes), outcomes
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]


def contents(checkpoint: Path) -> dict[str, Any]:
    """Everything of a checkpoint that training goes on from, and the history of the losses."""
    opened = mp.Checkpoint.open(checkpoint)
    assert opened.verify().problems == ()
    return {
        "weights": opened.read_weights(),
        "state": opened.training_state(),
        "losses": losses(checkpoint),
    }


def losses(checkpoint: Path) -> list[float]:
    """The loss of each step, from the history in the checkpoint."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "learning_rate" in entry]


def _look(rank: int, world_size: int, document: str) -> dict[str, Any]:
    config = parse_config(document, "run.yaml")
    training = Run(config)
    with mp.CheckpointManager(config.output_dir, resume=mp.Resume.MUST) as manager:
        step = training.resume(manager)
        report = manager.load_report
    assert report is not None
    weights = {name: whole(param) for name, param in training.model.named_parameters()}
    moments = {
        f"{name}.{slot}": whole(value)
        for name, param in training.model.named_parameters()
        for optimizer in training.optimizers.values()
        for slot, value in optimizer.state.get(param, {}).items()
    }
    return {
        "step": step,
        "level": report.level.value,
        "weights": weights,
        "moments": moments,
        "consumed": training.batches.consumed,
        "biases": None if training.balancing is None else dict(training.balancing.biases),
        "notes": report.lines(),
    }


def look(output: Path, text: Path, mesh: str = "", **changes: Any) -> list[dict[str, Any]]:
    """What each rank of a mesh holds when it has resumed from the newest checkpoint."""
    return run_world(ranks_of(mesh), _look, yaml_of(output, text, mesh, **changes))
