"""Loads whose model may hold weights of the checkpoint already: told by its id, proven by bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import torch

from milepost.adapters.kinds import CheckpointKind
from milepost.checkpointing.capture import primary_key
from milepost.checkpointing.load_model import Fill, ModelLoad
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Weights
from milepost.checkpointing.weights_stamp import WeightsStamp, put_stamp, stamp_of
from milepost.engine.read import ReadOptions, StoredTensor
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError, MismatchError
from milepost.geometry.placement import IndexSet
from milepost.layouts.checkpoint import Checkpoint
from milepost.state.mismatch import first_few
from milepost.state.other import Kind
from milepost.state.policies import Missing
from milepost.state.tensors import same_bits

SAMPLE_ELEMENTS = 64
"""So many elements at the beginning of each tensor are compared with the checkpoint."""
_LORA = re.compile(r"(?:^|\.)lora_[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """What one rank says of its model."""

    key: str
    stamp: dict[str, Any] | None
    has_adapter: bool

    def known(self) -> WeightsStamp | None:
        return None if self.stamp is None else WeightsStamp(**self.stamp)


def root_to_leave(
    talk: Conversation,
    checkpoint: Checkpoint,
    kind: CheckpointKind,
    models: Mapping[str, Any],
    primary: str | None,
    policies: LoadPolicies,
) -> str | None:
    """The key of the model whose weights are not read again; None when all are. Collective.

    `kind` is that of the checkpoint.
    With `Weights.ALREADY_READ` the model at the root must have been built from this checkpoint.
    Where an adapter was folded into its weights, a model that has the adapter must not have been:
    it would count twice. And weights of a whole model are nothing to have an adapter from. What is
    not so raises `MismatchError` on all ranks.
    """
    is_left = policies.weights is Weights.ALREADY_READ
    root = primary_key(dict.fromkeys(models, Kind.MODEL), primary)
    if root is None:
        if is_left:
            raise InvalidInputError("weights=Weights.ALREADY_READ, and the state has no model")
        return None
    stamp = stamp_of(models[root])
    built = _Built(
        key=root,
        stamp=None if stamp is None else asdict(stamp),
        has_adapter=_has_adapter(models[root]),
    )
    told = talk.gather("built", msgspec.json.encode(built))
    ranks = [msgspec.json.decode(raw, type=_Built) for raw in told]  # empty but at the coordinator
    if is_left and talk.is_coordinator:
        _refuse_different(ranks, checkpoint)
    for rank, each in enumerate(ranks):
        where = f"{root} (on rank {rank})" if len(ranks) > 1 else root
        _refuse_wrong(each, where, checkpoint, kind, policies)
    is_adapter = kind is CheckpointKind.ADAPTER
    if is_adapter or (kind is CheckpointKind.MERGED_ADAPTER and built.has_adapter):
        return None  # the base stays, the adapter is read
    return root if is_left else None


def _refuse_different(ranks: list[_Built], checkpoint: Checkpoint) -> None:
    first = ranks[0].known()
    for rank, built in enumerate(ranks):
        other = built.known()
        if _identity(other) != _identity(first):
            raise MismatchError(
                f"{checkpoint.path}: rank 0 built its model from {_shown(first)}, rank {rank} from "
                f"{_shown(other)}; build all ranks' models from the same checkpoint, or load with "
                "weights=Weights.READ"
            )


def _refuse_wrong(
    built: _Built, where: str, checkpoint: Checkpoint, kind: CheckpointKind, policies: LoadPolicies
) -> None:
    stamp = built.known()
    is_built_from_it = _is_from(stamp, checkpoint)
    if kind is CheckpointKind.MERGED_ADAPTER and built.has_adapter:
        if is_built_from_it:
            raise MismatchError(
                f"{checkpoint.path}: {where} has an adapter and was built from the merged weights "
                "of this checkpoint, which contain it already; with the adapter it would count "
                "twice: build the model from the base, model_name_or_path"
            )
        return
    if kind in (CheckpointKind.ADAPTER, CheckpointKind.MERGED_ADAPTER_MISSING):
        return  # what is missing is named when the adapter is looked for
    if built.has_adapter and policies.missing is Missing.ERROR and not _holds_adapter(checkpoint):
        raise MismatchError(
            f"{checkpoint.path}: {where} has an adapter and the checkpoint holds none, only the "
            "weights of a whole model; if the adapter was merged into them it cannot be had back: "
            "resume from a checkpoint that has it, or train without an adapter"
        )
    if policies.weights is Weights.ALREADY_READ and not is_built_from_it:
        raise MismatchError(
            f"{checkpoint.path}: weights=Weights.ALREADY_READ, but {where} was built from "
            f"{_shown(stamp)}, so training would go on from weights that are not those of the "
            "checkpoint; build the model from it (milepost.resolve_resume_weights_source says "
            "from what), tell where its weights came from (milepost.stamp_weights_source), or "
            "load with weights=Weights.READ"
        )


def _holds_adapter(checkpoint: Checkpoint) -> bool:
    return any(_LORA.search(name) for name in checkpoint.tensors())


def _is_from(stamp: WeightsStamp | None, checkpoint: Checkpoint) -> bool:
    """By id; a directory without one is known by its place alone."""
    if stamp is None:
        return False
    if checkpoint.info.checkpoint_id is not None:
        return stamp.checkpoint_id == checkpoint.info.checkpoint_id
    return stamp.checkpoint_id is None and stamp.place == os.path.realpath(checkpoint.path)


def _identity(stamp: WeightsStamp | None) -> str | None:
    return None if stamp is None else stamp.checkpoint_id or stamp.place or ""


def _shown(stamp: WeightsStamp | None) -> str:
    return "something that nobody recorded" if stamp is None else str(stamp)


def _has_adapter(model: Any) -> bool:
    """Whether parameters of an adapter that can be folded into weights are in the model."""
    parts = model if isinstance(model, list | tuple) else [model]
    return any(_LORA.search(name) for part in parts for name, _ in part.named_parameters())


def require_same_bytes(
    load: ModelLoad, stored: Callable[[str], StoredTensor], *, where: str
) -> int:
    """Refuse a model whose tensors do not begin as the checkpoint's do: it was changed since.

    A few elements of each tensor that this rank holds are read; a stored dtype that differs is
    rounded to the live one before. Returns how many tensors were compared.
    """
    on_meta = [
        name
        for name, targets in load.restore.targets.items()
        if any(target.device.type == "meta" for target in targets)
    ]
    if on_meta:
        raise MismatchError(
            f"{where}: weights=Weights.ALREADY_READ, but {len(on_meta)} of its tensors are on the "
            f"meta device and have no values: {first_few(on_meta)}; load with weights=Weights.READ"
        )
    own = sorted(load.restore.leaves.indirect)
    if own:
        raise MismatchError(
            f"{where}: weights=Weights.ALREADY_READ, but modules give and take {first_few(own)} in "
            "a way of their own, so they cannot be compared; load with weights=Weights.READ"
        )
    samples = [_sample(stored(fill.name), fill) for fill in load.fills()]
    fill_shards([read for read, _ in samples], ReadOptions())
    changed = [read.stored.name for read, live in samples if not same_bits(read.target, live)]
    if changed:
        raise MismatchError(
            f"{where}: weights=Weights.ALREADY_READ, but {len(set(changed))} of its tensors are "
            f"not those of the checkpoint: {first_few(list(dict.fromkeys(changed)))}; the model "
            "was changed after it was built, or its weights were never read: load with "
            "weights=Weights.READ"
        )
    return len(samples)


def _sample(stored: StoredTensor, fill: Fill) -> tuple[ShardRead, torch.Tensor]:
    """A read of the first elements, and what the live tensor has in their place."""
    if fill.grid is not None and fill.grid != stored.torch_shape():
        stored = replace(stored, shape=fill.grid)
    held, left = [], SAMPLE_ELEMENTS
    for spans in reversed(fill.held):
        first = spans[0] if spans else (0, 0)
        length = min(first[1] - first[0], max(left, 1))
        held.append(((first[0], first[0] + length),) if length else ())
        left = left // max(length, 1)
    kept: IndexSet = tuple(reversed(held))
    shape = tuple(sum(last - first for first, last in spans) for spans in kept)
    live = fill.target.detach()[tuple(slice(0, length) for length in shape)].cpu()
    return ShardRead(stored=stored, held=kept, target=torch.empty_like(live)), live


def stamp_filled(
    checkpoint: Checkpoint, kind: CheckpointKind, models: Mapping[str, Any], plan: LoadPlan
) -> None:
    """Record where models got all of their weights from."""
    if kind in (CheckpointKind.ADAPTER, CheckpointKind.INVALID):
        return
    stamp = WeightsStamp(
        checkpoint_id=checkpoint.info.checkpoint_id, place=os.path.realpath(checkpoint.path)
    )
    for key, report in plan.report.models.items():
        if not (report.missing or report.skipped or _has_adapter(models[key])):
            put_stamp(models[key], stamp)
