"""What a load was asked to do, and what its first phase found to be done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.optim import Optimizer

from milepost.checkpointing.load_model import ModelLoad
from milepost.checkpointing.report import LoadReport
from milepost.engine.read import StoredTensor
from milepost.format.fingerprint import Stated
from milepost.layouts.tensor_set import TensorSet
from milepost.state.optimizer_plan import OptimizerPlan
from milepost.state.policies import (
    BlockPolicy,
    ClassPolicy,
    DtypePolicy,
    Missing,
    ShapePolicy,
    Unexpected,
)


class Moments(Enum):
    """What happens to optimizer state."""

    RESTORE = "restore"
    FRESH = "fresh"
    """A warm restart: weights and schedule are restored, the optimizer's state is cleared."""
    FRESH_IF_UNUSABLE = "fresh-if-unusable"
    """Restored where it can be, else a warm restart; `LoadReport.fresh_moments` says why."""


class Weights(Enum):
    """What happens to the weights of the model at the root."""

    READ = "read"
    ALREADY_READ = "already-read"
    """The model was built from this checkpoint: that is proven, and they are not read again."""


class Staging(Enum):
    """Where tensors are read to."""

    NONE = "none"
    """Straight into the live ones. An error on the way leaves them half filled: `LoadTornError`."""
    FULL = "full"
    """Into host memory beside the live ones, which are filled when all ranks have everything:
    damage, and files that cannot be read, leave every rank as it was. Costs one more copy of the
    state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicies:
    """What to do where checkpoint and state differ; the default is always to refuse."""

    missing: Missing = Missing.ERROR
    unexpected: Unexpected = Unexpected.ERROR
    dtype: DtypePolicy = DtypePolicy.ERROR
    shape: ShapePolicy = ShapePolicy.ERROR
    optimizer_class: ClassPolicy = ClassPolicy.ERROR
    moments: Moments = Moments.RESTORE
    fresh_because: str = "as asked"
    blocks: BlockPolicy = BlockPolicy.ERROR
    device: torch.device | str | None = None
    fingerprint: Stated = None
    weights: Weights = Weights.READ


@dataclass(slots=True, kw_only=True)
class LoadPlan:
    """Phase 1's result: all that phase 2 needs, decoded and checked.

    `fresh` are optimizers that start afresh, by place, `already_read` keys of models whose weights
    are left as they are. `undo` takes back what was changed to make room, should phase 2 not come.
    """

    report: LoadReport
    undo: ExitStack
    models: dict[str, tuple[ModelLoad, Callable[[str], StoredTensor]]] = field(default_factory=dict)
    optimizers: dict[str, tuple[OptimizerPlan, TensorSet]] = field(default_factory=dict)
    fresh: dict[str, Optimizer] = field(default_factory=dict)
    already_read: set[str] = field(default_factory=set)
    others: list[Callable[[], None]] = field(default_factory=list)
