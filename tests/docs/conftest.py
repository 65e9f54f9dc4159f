"""A small run as Milepost writes it, and hands to change it like a stranger would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.format import selfdigest
from milepost.layouts.trio import TrioContent, write_trio
from milepost.storage import fileops

Change: TypeAlias = Callable[[dict[str, Any]], None]
Edit: TypeAlias = Callable[[Path, Change], None]
Save: TypeAlias = Callable[..., Path]
Operations: TypeAlias = Callable[[Callable[[], object]], list[tuple[str, str]]]


class Decoder(nn.Module):
    """Two tied names, a layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))  # type: ignore[no-any-return]


@pytest.fixture
def state() -> dict[str, Any]:
    """Model, optimizer and scheduler after one step, and a plain value."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    scheduler.step()
    progress = {"seen": (1, 2), "best": float("inf")}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def save(run: Path, state: dict[str, Any]) -> Save:
    """Saves the state as one step of the run; keywords go to `milepost.save`."""

    def save_step(step: int, **keywords: Any) -> Path:
        return mp.save(run / f"checkpoint-{step}", state, step=step, **keywords).path

    return save_step


@pytest.fixture
def saved(save: Save) -> Path:
    """A committed checkpoint of step 3."""
    return save(3)


@pytest.fixture
def edit() -> Edit:
    """Changes a sealed document and seals it again; the path is that of the document."""

    def change_document(path: Path, change: Change) -> None:
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(selfdigest.seal(document))

    return change_document


@pytest.fixture
def trio(tmp_path: Path, state: dict[str, Any]) -> Path:
    """A trio; the path is its directory and stem."""
    content = TrioContent(
        model_state=state["model"].state_dict(),
        optimizer_state=state["optimizer"].state_dict(),
        epoch=2,
        loss=float("nan"),
    )
    write_trio(tmp_path, ["latest"], content)
    return tmp_path / "latest"


@pytest.fixture
def operations() -> Operations:
    """Gives the file operations of a call, in order: kind and target."""

    def operations_of(act: Callable[[], object]) -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []

        def record(kind: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
            seen.append((kind, target))
            return function(*arguments)

        with fileops.hooked(record):
            act()
        return seen

    return operations_of
