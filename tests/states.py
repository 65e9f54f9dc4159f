"""Small training states for tests, and their comparison bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class TinyLM(nn.Module):
    """An embedding, layers with dropout and a norm, and a head tied to the embedding."""

    def __init__(self, width: int = 8, *, vocabulary: int = 11, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def training(seed: int = 0, *, steps: int = 0, tied: bool = True) -> dict[str, Any]:
    """A model with AdamW, a schedule and a plain dict, after a few steps."""
    torch.manual_seed(seed)
    model = TinyLM(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": {"tokens": 0, "seen": [], "mask": torch.zeros(3)},
    }
    train(state, steps)
    return state


def train(state: Mapping[str, Any], steps: int) -> list[float]:
    """Steps on random ids, dropout included; the losses."""
    losses = []
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(steps):
        ids = torch.randint(0, 11, (3, 5))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        state["scheduler"].step()
        model.seen += 1
        state["progress"]["tokens"] += ids.numel()
        state["progress"]["seen"].append(int(ids[0, 0]))
        state["progress"]["mask"] += 1
        losses.append(loss.item())
    return losses


def snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of what each entry says its state is."""
    return {
        key: copy.deepcopy(value.state_dict() if hasattr(value, "state_dict") else value)
        for key, value in state.items()
    }


def same(first: Any, second: Any) -> bool:
    """Whether two nested states are equal in type, structure and every bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(
            second
        )  # fmt: skip
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(same, first, second))
        )
    if isinstance(first, float) and first != first:
        return isinstance(second, float) and second != second
    return type(first) is type(second) and bool(first == second)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values in row-major order."""
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def flip(path: Any, at: int, bit: int = 1) -> None:
    """Flip one bit of one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))
