"""Small models with adapters on every mode of parallelism, and what each rank sees of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from milepost_trainer.lora import adapter
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel import build
from tests.trainer.modes import Batches, Mode, config_of, whole

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["gate_up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": LINEARS, "r": 4, "lora_alpha": 8},
    "dora": {"target_modules": LINEARS, "r": 4, "lora_alpha": 8, "use_dora": True},
    "dora-everywhere": {
        "target_modules": [*LINEARS, "embed_tokens", "lm_head"],
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "use_rslora": True,
    },
    "patterns": {
        "target_modules": [*ATTENTION, "embed_tokens"],
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 2},
        "modules_to_save": ["lm_head"],
    },
    "experts": {"expert_projections": EXPERTS, "r": 4, "lora_alpha": 8},
    "mixed": {"target_modules": ATTENTION, "expert_projections": EXPERTS, "r": 4, "lora_alpha": 8},
    "parameters": {
        "target_modules": ATTENTION,
        "target_parameters": EXPERTS,
        "r": 4,
        "lora_alpha": 8,
    },
}


@dataclass(frozen=True, slots=True)
class Seen:
    """Losses and gradient norms of all steps, trained values at the end, and what was frozen."""

    losses: list[float]
    norms: list[float]
    trained: dict[str, torch.Tensor]
    untouched: bool


def settings_of(kind: str, **changes: Any) -> LoraSettings:
    return LoraSettings(**{**KINDS[kind], **changes})


def train(rank: int, world_size: int, mode: Mode, kind: str, dtype: torch.dtype) -> Seen:
    """Four steps of plain descent; second factors begin with values, so that all of them move."""
    put = adapter(settings_of(kind), mode.sizes, seed=0)

    def adapt(model: nn.Module) -> None:
        put(model)
        generator = torch.Generator().manual_seed(5)
        for name, param in model.named_parameters():
            if param.requires_grad and ("lora_B" in name or "embedding_B" in name):
                values = torch.randn(param.shape, generator=generator) * 0.2
                param.data.copy_(values)

    held = build(
        config_of(mode.family), mode.sizes, schedule=mode.schedule, adapt=adapt, dtype=dtype
    )
    frozen = {n: whole(p) for n, p in held.named_parameters() if not p.requires_grad}
    learning = {n: p for n, p in held.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(learning.values(), lr=0.3)
    batches = Batches(held.data_rank, held.data_world)
    losses, norms = [], []
    for _ in range(4):
        losses.append(held.train_step(batches.next()))
        norms.append(held.clip_grad_norm_(1e9))
        optimizer.step()
        optimizer.zero_grad()
    after = {n: whole(p) for n, p in held.named_parameters()}
    same = all(torch.equal(after[n], value) for n, value in frozen.items())
    return Seen(losses, norms, {n: after[n] for n in learning}, same and bool(frozen))
