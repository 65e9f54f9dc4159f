"""Phase 1 for layouts other than the native one: weights of one model, from any of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from milepost.checkpointing.capture import State
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies
from milepost.checkpointing.report import Level
from milepost.errors import (
    InvalidInputError,
)
from milepost.geometry.placement import boxes_of
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from milepost.state.model_plan import RestorePlan, plan_restore_model
from milepost.state.other import Kind
from milepost.state.placements import local_part
from milepost.state.tensors import same_bits


def plan_foreign(
    checkpoint: Checkpoint,
    state: State,
    kinds: Mapping[str, Kind],
    policies: LoadPolicies,
    plan: LoadPlan,
) -> None:
    """Weights from any layout; the training state of other layouts has calls of its own."""
    others = [key for key, kind in kinds.items() if kind is not Kind.MODEL]
    if others or len(kinds) != 1:
        raise InvalidInputError(
            f"{checkpoint.path}: a {checkpoint.layout.value} checkpoint; load() takes one model "
            f"from it, not {', '.join(kinds)}; use CheckpointManager or load_checkpoint() for its "
            "training state"
        )
    (key,) = kinds
    stored = {name: (t.dtype, t.shape) for name, t in checkpoint.tensors().items()}
    restore = plan_restore_model(
        state[key],
        stored,
        checkpoint.tied,
        missing=policies.missing,
        unexpected=policies.unexpected,
        dtype=policies.dtype,
        shape=policies.shape,
    )
    restore.check_ties(lambda a, b: same_bits(checkpoint.read(a), checkpoint.read(b)))
    plan.report.models[key] = restore.report
    plan.report.level = Level.WEIGHTS_ONLY
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        plan.models[key] = (restore, checkpoint.stored)
        return
    tensors = {name: checkpoint.read(name) for name in restore.targets}
    plan.others.append(lambda: _fill_from_whole(restore, tensors))
    plan.others.append(restore.finish)


def _fill_from_whole(restore: RestorePlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy what this rank holds out of whole tensors."""
    with torch.no_grad():
        for name, live in restore.targets.items():
            for target in live:
                held, local = local_part(target)
                for box, place in boxes_of(held):
                    source = tensors[name][tuple(slice(*span) for span in box)]
                    local[tuple(slice(*span) for span in place)].copy_(source)
