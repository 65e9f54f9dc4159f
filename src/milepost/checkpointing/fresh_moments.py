"""A warm restart: weights and schedule of a checkpoint, an optimizer that has seen no step."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from milepost.format.manifest import Manifest
from milepost.state.optimizer import inner_optimizers


def start_afresh(optimizer: Optimizer) -> None:
    """Take the state and the gradients from an optimizer; its groups keep their settings."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def set_rates(schedulers: Mapping[str, Any], fresh: Collection[Optimizer]) -> list[str]:
    """Give groups of `fresh` optimizers the learning rate that their schedule stands at.

    With their state it would have come from the checkpoint. Notes of groups that no rate fits.
    """
    notes: list[str] = []
    for key, scheduler in schedulers.items():
        if not isinstance(scheduler, LRScheduler):
            continue
        optimizer = next(iter(inner_optimizers(scheduler.optimizer).values()), None)
        if not any(optimizer is each for each in fresh):
            continue
        rates, groups = scheduler.get_last_lr(), scheduler.optimizer.param_groups
        if len(rates) != len(groups):
            notes.append(
                f"{key}: stands at {len(rates)} learning rates, its optimizer has {len(groups)} "
                "groups, which keep theirs until the next step of the schedule"
            )
            continue
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = float(rate)
    return notes


def files_of_optimizers(manifest: Manifest) -> frozenset[str]:
    """The files of a checkpoint that hold nothing but optimizer state."""
    stems = [
        entry.stem
        for entry in manifest.state.values()
        if entry.kind == "optimizer" and entry.stem is not None
    ]
    if not stems:
        return frozenset()
    either = "|".join(re.escape(stem) for stem in stems)
    part = re.compile(rf"training/(?:{either})(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
    return frozenset(entry.name for entry in manifest.files if part.fullmatch(entry.name))
