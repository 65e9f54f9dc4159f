"""What a world of ranks does with a mode, once to leave checkpoints and once to take them over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from tests.trainer.modes import DROPOUT, Mode, Training, start


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps at which a run saves without dropout, turns dropout on, saves with it, and ends."""

    plain: int
    dropout: int
    masked: int
    end: int


BRIEF = Steps(plain=3, dropout=6, masked=7, end=9)
FULL = Steps(plain=5, dropout=10, masked=15, end=20)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank saw: losses and gradient norms of all steps, the loss of an evaluation at the
    plain save, and values there and at the end."""

    steps: Steps
    losses: list[float]
    norms: list[float]
    evaluated: float
    plain: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


def train(rank: int, world_size: int, mode: Mode, run: Path, steps: Steps) -> None:
    """Trains to the end and saves twice on the way."""
    training = start(mode)
    losses = training.steps(steps.plain)
    mp.save(run / f"checkpoint-{steps.plain}", training.state(), step=steps.plain)
    plain = training.values()
    evaluated = training.held.evaluate(training.batches.slice_of(0))
    losses += training.steps(steps.dropout - steps.plain)
    training.set_dropout(DROPOUT)
    losses += training.steps(steps.masked - steps.dropout)
    mp.save(run / f"checkpoint-{steps.masked}", training.state(), step=steps.masked)
    losses += training.steps(steps.end - steps.masked)
    seen = Trained(steps, losses, training.norms, evaluated, plain, training.values())
    torch.save(seen, run / f"rank-{rank}.pt")


def trained(run: Path, rank: int = 0) -> Trained:
    found: Trained = torch.load(run / f"rank-{rank}.pt", weights_only=False)
    return found


def plain_checkpoint(run: Path) -> Path:
    return run / f"checkpoint-{trained(run).steps.plain}"


def everything(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the whole model at the plain save, from all pipeline stages."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(run.glob("rank-*.pt")):
        found |= torch.load(file, weights_only=False).plain
    return found


def take_over(rank: int, world_size: int, mode: Mode, own: Path | None, others: list[Path]) -> None:
    """Resumes on `mode` from its own run, bit for bit, and from runs of other shapes, one after the
    other into one model and optimizer: each load leaves nothing of what was there."""
    if own is not None:
        resume_exactly(rank, mode, own)
    training = start(mode, seed=7)
    for run in others:
        resume_resharded(training, run)


def resume_exactly(rank: int, mode: Mode, run: Path) -> None:
    before = trained(run, rank)
    steps = before.steps
    training = start(mode, seed=7)
    training.set_dropout(DROPOUT)
    report = mp.load(run / f"checkpoint-{steps.masked}", training.state())
    assert report.level.value == "exact", report.lines()
    assert training.steps(steps.end - steps.masked) == before.losses[steps.masked :]
    assert_equal(training.values(), before.end)


def resume_resharded(training: Training, run: Path) -> None:
    report = mp.load(plain_checkpoint(run), training.state())
    # Ranks that shard alike hold alike, whatever they share otherwise: FSDP2 and FSDP2+CP.
    assert report.level.value in ("resharded", "exact-state"), (str(run), report.lines())
    assert_equal(training.values(), everything(run))
    before = trained(run)
    assert_close(training.steps(1), before.losses[before.steps.plain :][:1])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A rank of a pipeline finds some of the names only."""
    assert found.keys() <= expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(found: list[float], expected: list[float], within: float = 2e-5) -> None:
    """Equal but for the order of additions."""
    pairs: Any = list(zip(found, expected, strict=True))
    assert all(abs(a - b) <= within for a, b in pairs), pairs
