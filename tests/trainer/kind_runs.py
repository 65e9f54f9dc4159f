"""Kinds of checkpoints, modes of parallelism, and what is asked of each pair of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from tests.trainer.lora_runs import LORA, MIXED, adapter_of, on_base, write_base
from tests.trainer.task_runs import TASKS, write_lines, yaml_changes
from tests.trainer.yaml_runs import LLAMA, MOE, SAVED, run, write_text

MODES = {
    "one": "",
    "ddp": "ddp2",
    "fsdp2": "dp_shard2",
    "tp": "tp2",
    "ep": "dp_shard2 ep2",
    "cp": "cp2",
    "fsdp2+tp": "dp_shard2 tp2",
    "fsdp2+ep": "dp_shard4 ep2",
    "fsdp2+cp": "dp_shard2 cp2",
    "tp+ep": "tp2 ep2",
    "tp+cp": "cp2 tp2",
    "ep+cp": "cp2 ep2",
}
KINDS = {
    "full": mp.CheckpointKind.FULL,
    "adapter": mp.CheckpointKind.ADAPTER,
    "merged": mp.CheckpointKind.MERGED_ADAPTER,
    "embedding": mp.CheckpointKind.MERGED_ADAPTER,
    "reward": mp.CheckpointKind.FULL,
    "classifier": mp.CheckpointKind.FULL,
    "value": mp.CheckpointKind.FULL,
    "experts": mp.CheckpointKind.ADAPTER,
}
HEADS = {"reward": "reward", "classifier": "classification", "value": "value"}
"""Kinds of models with a head, and their tasks."""
WITH_ADAPTERS = ("adapter", "merged", "embedding", "experts")
CHECKS = ("save", "exact", "reshard", "loads")
REFUSED_BY_PEFT = "refused-by-peft"
"""In place of `loads`: adapters of experts, which stock peft would load by half."""


def checks_of(kind: str) -> tuple[str, ...]:
    return (*CHECKS[:3], REFUSED_BY_PEFT if kind == "experts" else CHECKS[3])


CELLS = [(kind, mode, check) for kind in KINDS for mode in MODES for check in checks_of(kind)]


def name_of(kind: str, mode: str, check: str) -> str:
    """What a cell is called in the table of the docs, and its case in the tests."""
    return f"{kind}-{mode}-{check}"


def family_of(kind: str, mode: str) -> str:
    return "moe" if kind == "experts" or "ep" in mode.split("+") else "llama"


class Runs:
    """One run of each kind on each mode, made when somebody asks for it; and its beginnings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = write_text(directory)
        self._made: dict[tuple[str, str, str], Path] = {}
        self._copies = 0

    def base(self, family: str) -> Path:
        place = self.directory / f"base-{family}"
        return place if place.is_dir() else write_base(place, family)

    def changes(self, kind: str, family: str) -> dict[str, Any]:
        """What the YAML of a kind says."""
        random = {"model_config": MOE if family == "moe" else LLAMA}
        based = on_base(self.base(family), lora=LORA)
        match kind:
            case "full":
                return random
            case "adapter":
                return based
            case "merged":
                return {**based, "merge_expert_lora_on_save": True}
            case "embedding":
                return {**yaml_changes("embedding"), **based}
            case "experts":
                return {**based, "lora": MIXED}
        return {**yaml_changes(HEADS[kind]), **random}

    def samples(self, kind: str) -> Path:
        """The training file of a kind."""
        task = HEADS.get(kind, kind)
        return write_lines(self.directory, task) if task in TASKS else self.text

    def of(self, kind: str, mode: str, family: str | None = None) -> Path:
        """The directory of a run that never stopped, with the checkpoints of two steps."""
        family = family or family_of(kind, mode)
        key = (kind, mode, family)
        if key not in self._made:
            place = self.directory / "-".join(key)
            self.train(place, kind, mode, family)
            self._made[key] = place
        return self._made[key]

    def train(self, place: Path, kind: str, mode: str, family: str) -> Path:
        """A run of the trainer to its end, from what `place` holds; its last checkpoint."""
        return run(place, self.samples(kind), MODES[mode], **self.changes(kind, family))

    def begun(self, kind: str, mode: str) -> Path:
        """A copy of a run that has come as far as its first save."""
        self._copies += 1
        place = self.directory / f"begun-{self._copies}"
        name = f"checkpoint-{SAVED}"
        shutil.copytree(self.of(kind, mode) / name, place / name)
        return place


def shapes_of(checkpoint: Path, kind: str) -> dict[str, tuple[int, ...]]:
    """Of all tensors that a checkpoint has of its model, by the names that they have on disk."""
    found: dict[str, torch.Tensor] = {}
    if kind in ("adapter", "experts"):
        found |= adapter_of(checkpoint)
    else:
        found |= mp.Checkpoint.open(checkpoint).read_weights()
    if kind in ("merged", "embedding"):
        found |= {f"resume_adapter/{name}": t for name, t in adapter_of(checkpoint).items()}
    return {name: tuple(tensor.shape) for name, tensor in found.items()}
