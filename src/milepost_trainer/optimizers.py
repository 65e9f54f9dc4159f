"""Optimizers and learning rates by their names in the YAML."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from milepost_trainer.config import ConfigError, TrainerConfig

NOT_FOR_MUON = ("embed", "lm_head", "wte", "wpe")


def build_optimizers(
    config: TrainerConfig, named: list[tuple[str, nn.Parameter]]
) -> dict[str, Optimizer]:
    """By key of the state: one optimizer, or Muon for matrices and AdamW for what is left."""
    trained = [(name, param) for name, param in named if param.requires_grad]
    lr, decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case "adamw":
            return {"optimizer": torch.optim.AdamW(_groups(trained, decay), lr=lr)}
        case "sgd":
            groups = _groups(trained, decay)
            return {"optimizer": torch.optim.SGD(groups, lr=lr, momentum=config.momentum)}
        case "adafactor":
            _refuse_sharded(trained)
            return {"optimizer": torch.optim.Adafactor(_groups(trained, decay), lr=lr)}
        case "muon":
            matrices = [pair for pair in trained if _is_hidden_matrix(*pair)]
            others = [pair for pair in trained if not _is_hidden_matrix(*pair)]
            muon = torch.optim.Muon(
                _groups(matrices, decay), lr=lr, weight_decay=decay, momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
            return {
                "optimizer": muon,
                "optimizer_adamw": torch.optim.AdamW(_groups(others, decay), lr=lr),
            }


def build_schedulers(
    config: TrainerConfig, optimizers: dict[str, Optimizer]
) -> dict[str, LambdaLR]:
    """One for each optimizer, under `scheduler` in place of `optimizer` in its key."""
    factor = learning_rate_factor(config)
    return {
        key.replace("optimizer", "scheduler"): LambdaLR(optimizer, factor)
        for key, optimizer in optimizers.items()
    }


def learning_rate_factor(config: TrainerConfig) -> Callable[[int], float]:
    """What the learning rate is multiplied by after a number of steps: 0 to 1 in the warm-up, then
    1 or, at `max_steps`, down to 0."""
    warmup = config.warmup_steps
    rest = max(config.max_steps - warmup, 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min((step - warmup) / rest, 1.0)
        match config.lr_scheduler_type:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - done
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def _groups(pairs: list[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms do not."""
    matrices = [param for _, param in pairs if param.ndim > 1]
    vectors = [param for _, param in pairs if param.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2 and not any(word in name for word in NOT_FOR_MUON)


def _refuse_sharded(pairs: list[tuple[str, nn.Parameter]]) -> None:
    for name, param in pairs:
        if isinstance(param, DTensor):
            raise ConfigError(
                f"optimizer: adafactor of torch takes whole tensors only, and {name} is sharded; "
                "use adamw, sgd or muon, or only dp_replicate_size"
            )
