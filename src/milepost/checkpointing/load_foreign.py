"""Phase 1 for layouts other than the native one: weights of one model, from any of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from milepost.checkpointing.adapter_load import plan_adapter, stored_adapter
from milepost.checkpointing.adapter_save import carries_adapter
from milepost.checkpointing.capture import State
from milepost.checkpointing.legacy_shards import legacy_shards
from milepost.checkpointing.load_model import ModelLoad, copy_part, plan_model
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies
from milepost.checkpointing.report import Level
from milepost.engine.read import read_tensor
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from milepost.layouts.tensor_set import TensorSet
from milepost.state.other import Kind


def plan_foreign(
    talk: Conversation,
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
            f"training state{legacy_shards(checkpoint.path)}"
        )
    (key,) = kinds
    saved = stored_adapter(checkpoint)
    if saved is not None and (
        not TensorSet(checkpoint.path, "model").exists() or carries_adapter(talk, key, state[key])
    ):
        load = plan_adapter(talk, key, state[key], saved, policies, plan.undo)
        load.check_ties(lambda name: read_tensor(saved.stored(name)))
        plan.models[key] = (load, saved.stored)
        plan.report.models[key] = load.restore.report
        plan.report.notes += [] if load.note is None else [f"{key}: {load.note}"]
        plan.report.level = Level.WEIGHTS_ONLY
        return
    stored = {name: (t.dtype, t.shape) for name, t in checkpoint.tensors().items()}
    load = plan_model(talk, key, state[key], stored, checkpoint.tied, policies)
    load.check_ties(checkpoint.read)
    plan.report.models[key] = load.restore.report
    plan.report.notes += [] if load.note is None else [f"{key}: {load.note}"]
    plan.report.level = Level.WEIGHTS_ONLY
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        plan.models[key] = (load, checkpoint.stored)
        return
    tensors = {name: checkpoint.read(name) for name in load.stored_names()}
    plan.others.append(lambda: _fill_from_whole(load, tensors))
    plan.others.append(load.restore.finish)


def _fill_from_whole(load: ModelLoad, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy what this rank holds out of whole tensors."""
    load.restore.materialise()
    for fill in load.fills():
        copy_part(fill, tensors[fill.name])
