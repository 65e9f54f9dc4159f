"""Runs of the trainer with adapters: their bases, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import milepost as mp
from milepost_trainer.tokens import byte_level_tokenizer
from milepost_trainer.training import Run
from tests.trainer.yaml_runs import LLAMA, MOE, WITHOUT_DROPOUT, config_of

BaseOf = Callable[[str], Path]
"""The base of a family, of those in `FAMILIES`."""

ATTENTION = ["q_proj", "v_proj", "o_proj"]
EXPERTS = ["gate_up_proj", "down_proj"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "lora_dropout": 0.1}
EXPERT_LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "expert_projections": EXPERTS}
MIXED: dict[str, Any] = {**EXPERT_LORA, "target_modules": ATTENTION}
WIDE = {**WITHOUT_DROPOUT, "hidden_size": 64, "intermediate_size": 64}  # blocks of 64 weights
WIDER = {"hidden_size": 128, "intermediate_size": 128}  # two such blocks, one for each of two ranks
FAMILIES = {
    "llama": LLAMA,
    "llama-plain": WITHOUT_DROPOUT,
    "llama-wide": WIDE,
    "llama-128": {**WITHOUT_DROPOUT, **WIDER},
    "moe": MOE,
    "moe-128": {**MOE, **WIDER, "head_dim": 32},
}


def write_base(directory: Path, family: str) -> Path:
    """A directory of `from_pretrained` with random weights and a tokenizer of one token a byte."""
    tokenizer = byte_level_tokenizer()
    fields = {**FAMILIES[family], "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        if param.ndim > 1 and "embed" not in name:
            param.data.mul_(8)  # so that what adapters add is more than rounding
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def on_base(base: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a YAML that trains from `base`."""
    return {"model_config": None, "model_name_or_path": str(base), **changes}


def adapter_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that they have on disk, unmerged."""
    beside = checkpoint / "resume_adapter"
    directory = beside if beside.is_dir() else checkpoint
    tensors: dict[str, torch.Tensor] = load_file(directory / "adapter_model.safetensors")
    return tensors


def adapter_config(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return document


def live_logits(output: Path, text: Path, **changes: Any) -> torch.Tensor:
    """What the run's model in one process gives when it has resumed from its newest checkpoint."""
    config = config_of(output, text, **changes)
    training = Run(config)
    with mp.CheckpointManager(config.output_dir, resume=mp.Resume.MUST) as manager:
        training.resume(manager)
    with training.model.evaluating():
        return training.model.outputs(token_ids())


def token_ids() -> torch.Tensor:
    return torch.arange(24).view(2, 12) + 60


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(token_ids()).logits
    return logits
