"""From where a resumed run builds its model: the base, or the checkpoint itself.

The base stays what the configuration says, whatever is resumed: the frozen reference of preference
training and the check of a prepared data set go on reading it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.adapters.kinds import CheckpointKind, adapter_directory, checkpoint_kind
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import (
    CheckpointIncompleteError,
    InvalidInputError,
    MismatchError,
    NotCommittedError,
)
from milepost.layouts.tensor_set import TensorSet
from milepost.storage.fileops import PathLike

_ABSENT = object()
_SIZES = ("ep_size", "ep_group_size", "expert_tp_size", "cp_size", "tp_size")


class WeightsOrigin(Enum):
    """What a model is built from when a run resumes."""

    BASE = "base"
    """What the configuration names; the load brings in what the checkpoint holds."""
    CHECKPOINT = "checkpoint"
    """The checkpoint itself: the load need not read its weights again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    """The answer of `resolve_resume_weights_source`.

    `path` is what to build the model from: the base as the configuration has it (None for random
    weights), or the directory of the checkpoint. `kind` is that of the checkpoint, None without
    one. `adapter` is the directory of the adapter that the load restores, None without one.
    """

    path: str | Path | None
    origin: WeightsOrigin
    kind: CheckpointKind | None = None
    adapter: Path | None = None


def resolve_resume_weights_source(
    checkpoint: PathLike | None, model_config: Any, parallelism_config: Any
) -> WeightsSource:
    """What to build the model from when a run resumes from `checkpoint`, None for a fresh run.

    `model_config` has `model_name_or_path`; `parallelism_config` has, as far as the run knows them,
    `ep_size` (or `ep_group_size`), `expert_tp_size`, `cp_size`, `tp_size` and `use_grouped_gemm`
    (true where neither says otherwise), each as an attribute or a key. Neither is changed.

    A run that cuts or wraps its model when it is built takes the weights of a full checkpoint at
    that time; one that does neither is built from the base and filled by the load. An adapter, and
    a checkpoint with one folded in, keeps the base. Collective: the coordinator looks at the
    checkpoint, and all ranks get its answer or its error.

    `CheckpointIncompleteError` when the marker names an adapter that is not there,
    `NotCommittedError` when there is nothing that a model can be built from, `NotFoundError` when
    nothing is there, `MismatchError` when ranks ask about different checkpoints.
    """
    base = _field(model_config, "model_name_or_path")
    if base is _ABSENT:
        raise InvalidInputError(
            f"model_config: a {type(model_config).__name__} without model_name_or_path; it names "
            "the base of the run, None for random weights"
        )
    place = None if checkpoint is None else Path(checkpoint)
    with converse() as talk:
        found = []
        with together(talk, "weights source"):
            _agree_on(talk, place)
            if talk.is_coordinator and place is not None:
                kind, adapter = _looked_at(place)
                in_place = _builds_in_place(parallelism_config, model_config)
                origin = origin_of(kind, builds_in_place=in_place)
                found.append(json.dumps([kind.value, origin.value, adapter]).encode())
        if place is None:
            return WeightsSource(path=base, origin=WeightsOrigin.BASE)
        told = talk.broadcast("source", found[0] if talk.is_coordinator else None)
    kind_word, origin_word, adapter = json.loads(told)
    origin = WeightsOrigin(origin_word)
    return WeightsSource(
        path=place if origin is WeightsOrigin.CHECKPOINT else base,
        origin=origin,
        kind=CheckpointKind(kind_word),
        adapter=None if adapter is None else place / adapter,
    )


def _agree_on(talk: Conversation, place: Path | None) -> None:
    own = "no checkpoint" if place is None else place.name
    for rank, other in enumerate(talk.gather("resumed", own.encode())):
        if other.decode() != own:
            raise MismatchError(
                f"rank 0 resumes from {own}, rank {rank} from {other.decode()}; give all ranks the "
                "same checkpoint"
            )


def origin_of(kind: CheckpointKind, *, builds_in_place: bool) -> WeightsOrigin:
    """The decision alone. `builds_in_place`: the run cuts or wraps its model when it is built.

    >>> origin_of(CheckpointKind.FULL, builds_in_place=True)
    <WeightsOrigin.CHECKPOINT: 'checkpoint'>
    >>> origin_of(CheckpointKind.ADAPTER, builds_in_place=True)
    <WeightsOrigin.BASE: 'base'>
    """
    if kind is CheckpointKind.FULL and builds_in_place:
        return WeightsOrigin.CHECKPOINT
    return WeightsOrigin.BASE


def _looked_at(place: Path) -> tuple[CheckpointKind, str | None]:
    """The kind of a checkpoint and where its adapter lies in it; refused when it is neither."""
    kind = checkpoint_kind(place)
    match kind:
        case CheckpointKind.FULL:
            return kind, None
        case CheckpointKind.ADAPTER:
            return kind, ""
        case CheckpointKind.MERGED_ADAPTER:
            directory = adapter_directory(place)
            assert directory is not None, "the marker made it one"
            return kind, directory.relative_to(place).as_posix()
        case CheckpointKind.MERGED_ADAPTER_MISSING:
            raise CheckpointIncompleteError(
                f"{place}: an adapter was folded into its weights, and the unmerged one that its "
                "marker names is not there, so neither can training go on with it nor can the base "
                "be had back; copy the checkpoint again, or resume from an older one",
                path=place,
            )
        case CheckpointKind.INVALID:
            TensorSet(place, "model").require_loadable()
            raise NotCommittedError(
                f"{place}: neither weights of a model nor an adapter, so there is nothing to "
                "resume from; copy the checkpoint again, or name another",
                path=place,
            )


def _builds_in_place(parallelism_config: Any, model_config: Any) -> bool:
    """Whether the run cuts its model over ranks or wraps its experts when it builds it."""
    sizes = [_field(parallelism_config, name) for name in _SIZES]
    if any(isinstance(size, int) and size > 1 for size in sizes):
        return True
    for config in (parallelism_config, model_config):
        grouped = _field(config, "use_grouped_gemm")
        if isinstance(grouped, bool):
            return grouped
    return True


def _field(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, _ABSENT)
    return getattr(config, name, _ABSENT)
