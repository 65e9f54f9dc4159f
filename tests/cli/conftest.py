"""Small runs on disk, and the command line run inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.save import save
from milepost.cli.app import make_app
from milepost.engine.write import Durability, WriteOptions

QUICK = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The document on stdout, which must be strict JSON and nothing else."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


Milepost: TypeAlias = Callable[..., Result]
Make: TypeAlias = Callable[..., Path]


@pytest.fixture
def milepost() -> Milepost:
    """Run `milepost` with these arguments."""
    app = make_app()

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(code=result.exit_code, out=result.stdout, err=result.stderr)

    return run


class Tiny(nn.Module):
    """A model with a tie, a bias and two dtypes."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, hidden)
        self.body = nn.Linear(hidden, hidden).to(torch.bfloat16)
        self.head = nn.Linear(hidden, 16, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Save a checkpoint of a tiny model into `tmp_path/run`, and return its path."""

    def make_checkpoint(
        step: int,
        *,
        run: Path | None = None,
        seed: int = 0,
        hidden: int = 8,
        lineage: Lineage | None = None,
        **metrics: float,
    ) -> Path:
        torch.manual_seed(seed)
        model = Tiny(hidden)
        optimizer = torch.optim.AdamW([model.embed.weight], lr=0.1)
        model.head(model.embed(torch.arange(16))).sum().backward()
        optimizer.step()
        path = (run or tmp_path / "run") / f"checkpoint-{step}"
        save(
            path,
            {"model": model, "optimizer": optimizer, "progress": {"tokens": step}},
            step=step,
            epoch=step / 100,
            metrics=metrics,
            model_config={"hidden": hidden},
            lineage=lineage,
            options=QUICK,
        )
        return path

    return make_checkpoint
