"""Models with heads that no task of the trainer has, trained on every mesh: a classifier of three
labels, and a language model with a value head beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import milepost as mp
from milepost_trainer.parallel import Head, MeshSizes, ParallelModel, build
from tests.trainer.modes import VOCABULARY, Batches, Training, config_of

LABELS = 3
SAVED, END = 3, 6
HEADS = {"classifier": Head.SCORE, "value": Head.LANGUAGE_MODEL}
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw: losses after the first save, values there and at the end."""

    losses: list[float]
    saved: Values
    end: Values


@dataclass(slots=True)
class HeadTraining(Training):
    """Steps with the loss of a head: everything else is as in `modes`."""

    kind: str = "classifier"

    def one_step(self) -> float:
        ids = self.held.columns(self.batches.next()["input_ids"])
        loss = _LOSSES[self.kind](self.held.outputs(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.norms.append(self.held.clip_grad_norm_(0.5))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(self.held.sum_over_data(loss)) / self.held.data_world


def begin(kind: str, sizes: MeshSizes, family: str) -> HeadTraining:
    held: ParallelModel = build(config_of(family), sizes, head=HEADS[kind], adapt=_PUT[kind])
    optimizer = torch.optim.AdamW(held.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    batches = Batches(held.data_rank, held.data_world)
    return HeadTraining(held, optimizer, scheduler, batches, kind=kind)


def train(rank: int, world: int, kind: str, sizes: MeshSizes, family: str, run: Path) -> Seen:
    """Six steps, saved in the middle and at the end."""
    training = begin(kind, sizes, family)
    training.steps(SAVED)
    mp.save(run / f"checkpoint-{SAVED}", training.state(), step=SAVED)
    saved = training.values()
    losses = training.steps(END - SAVED)
    mp.save(run / f"checkpoint-{END}", training.state(), step=END)
    return Seen(losses, saved, training.values())


def take_over(
    rank: int, world: int, kind: str, sizes: MeshSizes, family: str, run: Path
) -> tuple[str, Seen]:
    """The level of a resume from the first save, and the same as `train` from there on."""
    training = begin(kind, sizes, family)
    report = mp.load(run / f"checkpoint-{SAVED}", training.state())
    saved = training.values()
    losses = training.steps(END - SAVED)
    return report.level.value, Seen(losses, saved, training.values())


def _put_classifier(model: Any) -> None:
    """Three labels in place of one; transformers keeps such a head as `score`."""
    model.config.num_labels = model.num_labels = LABELS
    model.score = _linear(model.config.hidden_size, LABELS)


def _put_value_head(model: Any) -> None:
    model.v_head = _linear(model.config.hidden_size, 1)
    model.forward = _WithValues(model)


def _linear(inner: int, outer: int) -> nn.Linear:
    made = nn.Linear(inner, outer, bias=False)
    nn.init.normal_(made.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return made


class _WithValues:
    """Replaces `forward` of a language model: its logits, and the value as one column more."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
        hidden = self.model.model(**inputs)[0]
        return (torch.cat((self.model.lm_head(hidden), self.model.v_head(hidden)), dim=-1),)


def _classified(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten() % LABELS)


def _valued(outputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits, values = outputs[..., :-1].flatten(0, 1), outputs[..., -1]
    wanted = ids.float() / VOCABULARY
    return nn.functional.cross_entropy(logits, ids.flatten()) + (values - wanted).square().mean()


_PUT: dict[str, Callable[[nn.Module], None]] = {
    "classifier": _put_classifier,
    "value": _put_value_head,
}
_LOSSES = {"classifier": _classified, "value": _valued}
