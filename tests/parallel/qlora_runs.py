"""Runs of adapters on a base in 4 or 8 bits: kinds, modes, and what is asked of each pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost_trainer.config import parse_config
from milepost_trainer.lora import quantization
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel.quantized import use_kernels_of_training
from milepost_trainer.training import Run
from tests.trainer.kind_runs import CHECKS, MODES
from tests.trainer.lora_runs import LORA, on_base, token_ids, write_base
from tests.trainer.yaml_runs import contents, run, run_and_kill, write_text, yaml_of
from tests.worlds import run_world

KINDS: dict[str, dict[str, Any]] = {
    "fourbit": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "eightbit": {"load_in_8bit": True},
}
DORA = {f"{kind}-dora": {**keys, "use_dora": True} for kind, keys in KINDS.items()}
CELLS = [(kind, mode, check) for kind in KINDS for mode in MODES for check in CHECKS]


def family_of(mode: str) -> str:
    return "moe-128" if "ep" in mode.split("+") else "llama-128"


def quantized(base: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    """The base as bitsandbytes quantises it, in one process."""
    options: Any = quantization(LoraSettings(**keys), dtype, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)
    use_kernels_of_training(model)  # those for evaluation round the scales to bfloat16
    return model


class Runs:
    """One run of each kind on each mode, made when somebody asks for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = write_text(directory)
        self._made: dict[tuple[str, str, str], Path] = {}

    def base(self, family: str) -> Path:
        place = self.directory / f"base-{family}"
        return place if place.is_dir() else write_base(place, family)

    def changes(self, kind: str, family: str) -> dict[str, Any]:
        """What the YAML of a kind says."""
        keys = {**KINDS, **DORA}[kind]
        return on_base(self.base(family), lora={**LORA, "lora_dropout": 0.0, **keys})

    def of(self, kind: str, mode: str, family: str | None = None) -> Path:
        """The last checkpoint of a run that never stopped."""
        family = family or family_of(mode)
        key = (kind, mode, family)
        if key not in self._made:
            place = self.directory / "-".join(key)
            self._made[key] = run(place, self.text, MODES[mode], **self.changes(kind, family))
            contents(self._made[key])  # intact
        return self._made[key]

    def killed_and_resumed(self, kind: str, mode: str) -> Path:
        """The last checkpoint of a run that was killed after its first."""
        place = self.directory / f"killed-{kind}-{mode}"
        changes = self.changes(kind, family_of(mode))
        run_and_kill(place, self.text, MODES[mode], **changes)
        return run(place, self.text, MODES[mode], **changes)


def _answer(rank: int, world_size: int, document: str) -> tuple[int, torch.Tensor]:
    training = Run(parse_config(document, "run.yaml"))
    with mp.CheckpointManager(training.config.output_dir, resume=mp.Resume.MUST) as manager:
        training.resume(manager)
    model = training.model
    with model.evaluating():
        return model.first_column(token_ids().shape[1]), model.outputs(model.columns(token_ids()))


def answers(output: Path, text: Path, ranks: int, mesh: str, **changes: Any) -> list[Any]:
    """The logits of each rank of a mesh that has resumed, and where its columns begin."""
    return run_world(ranks, _answer, yaml_of(output, text, mesh, **changes))
