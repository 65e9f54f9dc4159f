"""Kinds of checkpoints, modes of parallelism, and what is asked of each pair of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost_trainer.parallel import MeshSizes
from tests.trainer import head_runs
from tests.trainer.lora_runs import LORA, MIXED, adapter_of, on_base, write_base
from tests.trainer.task_runs import write_lines, yaml_changes
from tests.trainer.yaml_runs import LLAMA, MOE, SAVED, run, write_text
from tests.worlds import run_world

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
WITH_ADAPTERS = ("adapter", "merged", "embedding", "experts")
CHECKS = ("save", "exact", "reshard", "loads")
REFUSED = "refused"
REFUSED_BY_PEFT = "refused-by-peft"
"""In place of `loads`: adapters of experts, which stock peft would load by half."""
_SIZES = {"ddp": "dp_replicate", "dp_shard": "dp_shard", "tp": "tp", "cp": "cp", "ep": "ep"}


def is_refused(kind: str, mode: str) -> bool:
    """Adapters of experts need whole experts on each rank, which tensor parallelism alone cuts."""
    axes = mode.split("+")
    return kind == "experts" and "tp" in axes and "ep" not in axes


def checks_of(kind: str, mode: str) -> tuple[str, ...]:
    if is_refused(kind, mode):
        return (REFUSED,)
    return (*CHECKS[:3], REFUSED_BY_PEFT if kind == "experts" else CHECKS[3])


CELLS = [(kind, mode, check) for kind in KINDS for mode in MODES for check in checks_of(kind, mode)]


def name_of(kind: str, mode: str, check: str) -> str:
    """What a cell is called in the table of the docs, and its case in the tests."""
    return f"{kind}-{mode}-{check}"


def family_of(kind: str, mode: str) -> str:
    return "moe" if kind == "experts" or "ep" in mode.split("+") else "llama"


def sizes_of(mode: str) -> MeshSizes:
    parts = MODES[mode].split()
    return MeshSizes(**{_SIZES[part.rstrip("0123456789")]: int(part[-1]) for part in parts})


class Runs:
    """One run of each kind on each mode, made when somebody asks for it; and its beginnings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = write_text(directory)
        self._made: dict[tuple[str, str, str], Path] = {}
        self._seen: dict[Path, list[head_runs.Seen]] = {}
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
        assert kind == "reward", kind
        return {**yaml_changes("reward"), **random}

    def samples(self, kind: str) -> Path:
        """The training file of a kind."""
        if kind in ("embedding", "reward"):
            return write_lines(self.directory, kind)
        return self.text

    def of(self, kind: str, mode: str, family: str | None = None) -> Path:
        """The directory of a run that never stopped, with the checkpoints of two steps."""
        family = family or family_of(kind, mode)
        key = (kind, mode, family)
        if key not in self._made:
            place = self.directory / "-".join(key)
            if kind in head_runs.HEADS:
                place.mkdir()
                sizes, moe = sizes_of(mode), "qwen3-moe" if family == "moe" else family
                arguments = (kind, sizes, moe, place)
                self._seen[place] = run_world(sizes.world_size, head_runs.train, *arguments)
            else:
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

    def seen(self, kind: str, mode: str) -> list[head_runs.Seen]:
        """What each rank saw of a run of `head_runs`."""
        return self._seen[self.of(kind, mode)]

    def resumed(self, kind: str, mode: str, on: str) -> list[tuple[str, head_runs.Seen]]:
        """The same from the first save on, on another mode."""
        sizes, place = sizes_of(on), self.of(kind, mode)
        family = "qwen3-moe" if family_of(kind, mode) == "moe" else "llama"
        return run_world(sizes.world_size, head_runs.take_over, kind, sizes, family, place)


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
