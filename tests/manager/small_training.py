"""A training small enough for a test, whose next step depends on every part of its state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class Training:
    """A dropout network, AdamW, a warm-up schedule; batches and noise from all generators."""

    def __init__(self, *, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.model, self.optimizer, self.scheduler

    def step(self) -> float:
        """One optimizer step; the loss."""
        noise = random.random() + float(np.random.random())
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 4) + noise).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.item())

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def values(self) -> dict[str, torch.Tensor]:
        """A copy of weights and moments by name, for comparison."""
        found = {f"model.{name}": t.clone() for name, t in self.model.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{slot}": t.clone() for slot, t in slots.items()}
        found["lr"] = torch.tensor(self.scheduler.get_last_lr())
        return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of values agree bit by bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def leaves_untouched(training: Training, action: Callable[[], object]) -> bool:
    """Whether `action`, which fails, changed nothing; its error is raised again elsewhere."""
    before = training.values()
    try:
        action()
    except Exception:
        return same(before, training.values())
    raise AssertionError("the action was expected to fail")
