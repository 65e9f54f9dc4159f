"""Makes the golden checkpoint directory of the version that is written now.

Run it only when the format has a new version: a directory that is here stands for those that exist
in the world, and is never made again.
    python tests/golden/make_directory.py
"""

from __future__ import annotations

import platform
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import milepost as mp
from milepost.format.manifest import FORMAT_VERSION

HERE = Path(__file__).parent
NAME = f"directory_v{FORMAT_VERSION.removesuffix('.0')}"
STEP = 7


class Tiny(nn.Module):
    """An embedding, a layer and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        logits: Tensor = self.head(hidden + self.layer(hidden.bfloat16()).float())
        return logits


def state(*, trained: bool) -> dict[str, Any]:
    """All kinds of entries; with `trained`, after three steps on fixed gradients."""
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel()).view_as(parameter)
            parameter.copy_(values + 100 * number if trained else torch.zeros_like(values))
    for _ in range(3 if trained else 0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        scheduler.step()
    progress: dict[str, Any] = {"tokens": 0}
    if trained:
        progress = {
            "tokens": 12345,
            "nested": (1, [2.5, None, True], {3: "three"}),
            "bytes": b"\x00\xff",
            "inf": float("inf"),
            "dtype": torch.bfloat16,
            "mask": torch.tensor([[True, False], [False, True]]),
            "array": np.arange(3, dtype=np.int16),
        }
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


if __name__ == "__main__":
    target = HERE / NAME
    if target.exists():
        sys.exit(f"{target} exists and is not made again")
    sys.orig_argv = ["python", "tests/golden/make_directory.py"]
    platform.node = lambda: "golden"
    seed()
    made = HERE / f"checkpoint-{STEP}"
    mp.save(
        made,
        state(trained=True),
        step=STEP,
        epoch=1.5,
        metrics={"loss": 0.25, "ppl": float("inf")},
        model_config={"hidden_size": 4, "vocab_size": 5},
        max_shard_size=64,
    )
    made.rename(target)
    (HERE / ".milepost.lock").unlink()
    shutil.rmtree(HERE / "_incomplete_checkpoints", ignore_errors=True)
