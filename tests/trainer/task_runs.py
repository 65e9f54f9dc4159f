"""Small runs of every task: their data, their YAML, and what they leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from milepost_trainer.config import TrainerConfig
from milepost_trainer.training import train
from tests.trainer.yaml_runs import (
    END,
    LLAMA,
    MOE,
    WITHOUT_DROPOUT,
    config_of,
    run,
    run_and_kill,
)

TASKS = ("sft", "dpo", "kto", "sdpg", "reward", "classification", "value", "embedding")
REFERENCED = ("dpo", "kto", "sdpg")
COUNT = 12
LABELS = 3
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def line_of(task: str, n: int) -> dict[str, Any]:
    """Sample n of a task, no two alike, answers of different lengths."""
    prompt, right, wrong = f"{n}+{n}=", f"{2 * n}", f"{2 * n + 1}" + "?" * (n % 3)
    match task:
        case "sft":
            return {"prompt": prompt, "completion": right}
        case "dpo":
            return {"prompt": prompt, "chosen": right, "rejected": wrong}
        case "kto":
            return {"prompt": prompt, "completion": (right, wrong)[n % 2], "label": n % 2 == 0}
        case "sdpg":
            return {"prompt": prompt, "completion": right, "teacher_prompt": f"({right}) {prompt}"}
        case "reward":
            return {"prompt": prompt, "chosen": right, "rejected": wrong}
        case "classification":
            return {"text": prompt + right, "label": n % LABELS}
        case "value":
            good = n % 2 == 0
            return {"prompt": prompt, "completion": right if good else wrong, "value": float(good)}
    return {"anchor": prompt, "positive": f"twice {n}" + "!" * (n % 3)}


def write_lines(directory: Path, task: str, *, begin: int = 0, count: int = COUNT) -> Path:
    """A `.jsonl` of the samples from `begin` on."""
    path = directory / f"{task}-{begin}-{count}.jsonl"
    lines = (json.dumps(line_of(task, n)) for n in range(begin, begin + count))
    path.write_text("\n".join(lines) + "\n")
    return path


def yaml_changes(task: str, *, dropout: bool = True, moe: bool = False) -> dict[str, Any]:
    """What the YAML of a run of `task` says beside that of `yaml_runs`."""
    model = MOE if moe else LLAMA if dropout else WITHOUT_DROPOUT
    own = {"num_labels": LABELS} if task == "classification" else {}
    return {
        "task": task,
        "model_config": model,
        "max_seq_length": 24,
        "learning_rate": 0.003,
        **own,
    }


def task_config(
    output: Path, lines: Path, task: str, mesh: str = "", **changes: Any
) -> TrainerConfig:
    return config_of(output, lines, mesh, **{**yaml_changes(task), **changes})


def different(model: torch.nn.Module, by: float = 0.05) -> None:
    """Moves every weight, so that a policy is no longer its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(by * torch.randn(param.shape, generator=generator))


def run_task(output: Path, lines: Path, task: str, mesh: str = "", **changes: Any) -> Path:
    """Train to the end in a world of the mesh's size; the last checkpoint."""
    return run(output, lines, mesh, **{**yaml_changes(task), **changes})


def kill_task(output: Path, lines: Path, task: str, mesh: str = "", **changes: Any) -> None:
    """The same, with a SIGKILL to every rank after the step that follows the save."""
    run_and_kill(output, lines, mesh, **{**yaml_changes(task), **changes})


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """Everything that was logged up to a checkpoint: losses, rewards, evaluations."""
    document = json.loads((checkpoint / "trainer_state.json").read_text())
    entries: list[dict[str, Any]] = document["log_history"]
    return entries


def stopped(output: Path, lines: Path, task: str, **changes: Any) -> None:
    """A run that has come as far as its first save: a whole one, of which the rest is gone."""
    train(task_config(output, lines, task, **changes))
    forget_the_end(output, END)


def forget_the_end(output: Path, step: int) -> None:
    """Removes the last checkpoint of a run, that of `step`."""
    shutil.rmtree(output / f"checkpoint-{step}")
    for link in ("latest", "best"):
        (output / link).unlink(missing_ok=True)
