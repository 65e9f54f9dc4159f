"""`load`: fill live state from a checkpoint, in two phases.

Phase 1 checks everything and decodes every tree, with live memory untouched. Phase 2 fills; an
error there is raised as `LoadTornError`, and the state must not be used until a load succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from milepost.checkpointing.capture import State
from milepost.checkpointing.config import check_model_config
from milepost.checkpointing.in_flight import saves
from milepost.checkpointing.load_model import Fill
from milepost.checkpointing.load_plan import plan_load
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Moments
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse, drop_exchange_group, exchange_group, host_name
from milepost.engine.read import ReadMode, ReadOptions, StoredTensor, read_tensor
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.engine.read_shared import fill_shards_shared
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import (
    DamagedError,
    FormatError,
    LoadTornError,
    MismatchError,
    NotFoundError,
    RankError,
)
from milepost.format.fingerprint import Stated
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint, what_still_loads
from milepost.layouts.tensor_set import TensorSet
from milepost.state.placements import local_part
from milepost.state.policies import (
    BlockPolicy,
    ClassPolicy,
    DtypePolicy,
    Missing,
    ShapePolicy,
    Unexpected,
)
from milepost.storage.fileops import PathLike

logger = logging.getLogger(__name__)


class Verify(Enum):
    """What is proven before live memory is touched."""

    SIZES = "sizes"
    """Presence, sizes and structure of every file."""
    DIGESTS = "digests"
    """The same, and every recorded digest: reads all bytes once more."""


class RngRestore(Enum):
    """When the saved random state is set."""

    NOW = "now"
    """At the end of the load; `report.restore_rng()` sets it again."""
    LATER = "later"
    """Only when `report.restore_rng()` is called."""


def load(
    path: PathLike,
    state: State,
    *,
    missing: Missing = Missing.ERROR,
    unexpected: Unexpected = Unexpected.ERROR,
    dtype: DtypePolicy = DtypePolicy.ERROR,
    shape: ShapePolicy = ShapePolicy.ERROR,
    optimizer_class: ClassPolicy = ClassPolicy.ERROR,
    moments: Moments = Moments.RESTORE,
    blocks: BlockPolicy = BlockPolicy.ERROR,
    model_config: Any = None,
    fingerprint: Stated = None,
    primary: str | None = None,
    verify: Verify = Verify.SIZES,
    rng: RngRestore = RngRestore.NOW,
    device: torch.device | str | None = None,
    options: ReadOptions | None = None,
) -> LoadReport:
    """Fill the objects of `state` in place from the checkpoint at `path`, and say what was done.

    Entries of the checkpoint that `state` does not ask for are not read: with only a model in it,
    not one byte of optimizer state is. Mappings and lists among the values are updated in place.
    With `model_config`, it is compared with the saved one, field by field. `fingerprint` states
    fields of the topology that cannot be derived from `state`; the report names those that differ.

    Tensors of models on the meta device get memory first, for this rank's shard alone: DTensors on
    the device of their mesh, others on `device` (by default that of the meshes, else torch's
    default). Buffers that no checkpoint holds are computed by the model's own init. Parameters stay
    the same objects.

    Waits for saves that this process has under way. Collective: every rank of the default process
    group makes the call and reads just the bytes that its placements need, whatever topology wrote
    the checkpoint. With `ReadMode.SHARED` in the
    `options` of all ranks, bytes that several need are read by one and sent to the others.

    Nothing has changed when this raises anything but `LoadTornError`: `NotFoundError`,
    `DamagedError`, `KeyMismatchError`, `ShapeMismatchError`, `DtypeMismatchError`,
    `ConfigMismatchError`, `InvalidInputError`.
    """
    policies = LoadPolicies(
        missing=missing,
        unexpected=unexpected,
        dtype=dtype,
        shape=shape,
        optimizer_class=optimizer_class,
        moments=moments,
        blocks=blocks,
        device=device,
        fingerprint=fingerprint,
    )
    reading = options or ReadOptions()
    saves.drain()  # the newest may be one that is still being written
    with converse() as talk:
        with together(talk, "open"):
            checkpoint = _open(talk, path)
            _agree_on(talk, checkpoint, reading)
            if verify is Verify.DIGESTS and talk.is_coordinator:
                _verify(checkpoint)
            config = {} if model_config is None else check_model_config(checkpoint, model_config)
        with together(talk, "plan"):
            plan = plan_load(talk, checkpoint, state, policies, primary)
            plan.report.config = config
        fill_all = _filler(talk, reading)
        try:
            with together(talk, "fill"):
                _fill(plan, fill_all)
                if rng is RngRestore.NOW:
                    _restore_rng(plan)
        except (RankError, LoadTornError) as error:
            if reading.mode is ReadMode.SHARED and talk.world_size > 1:
                drop_exchange_group(exchange_group())
            if isinstance(error, LoadTornError):
                raise
            raise _torn(plan, error) from error
    for line in plan.report.lines():
        logger.info("%s", line)
    return plan.report


def _open(talk: Conversation, path: PathLike) -> Checkpoint:
    """The checkpoint; among several ranks, the error says which one does not see it, and where."""
    try:
        return Checkpoint.open(path)
    except NotFoundError as error:
        if talk.world_size == 1:
            raise
        raise type(error)(
            f"{error} (so it is for rank {talk.rank} on {host_name()}; all ranks must see it)",
            path=path,
        ) from error


def _agree_on(talk: Conversation, checkpoint: Checkpoint, options: ReadOptions) -> None:
    """Refuse when ranks look at different checkpoints, or read in different modes."""
    own = f"{checkpoint.path.name} {checkpoint.info.checkpoint_id or ''} {options.mode.value}"
    for rank, other in enumerate(talk.gather("checkpoint", own.encode())):
        if other.decode() != own:
            raise MismatchError(
                f"rank 0 loads {own}, rank {rank} {other.decode()}; give every rank the same path "
                "and the same read mode"
            )


def _verify(checkpoint: Checkpoint) -> None:
    report = checkpoint.verify(threads=ReadOptions().threads)
    if not report.ok:
        errors = [problem.message for problem in report.problems]
        rest = ""
        if isinstance(checkpoint, DirectoryCheckpoint):
            rest = what_still_loads(checkpoint, {problem.file for problem in report.problems})
        raise DamagedError(
            f"{checkpoint.path}: {len(errors)} things are wrong: {'; '.join(errors[:3])}; load an "
            f"older checkpoint{rest}",
            path=checkpoint.path,
        )


def _restore_rng(plan: LoadPlan) -> None:
    try:
        skipped = plan.report.restore_rng()
    except FormatError as error:
        raise _torn(plan, error) from error
    plan.report.notes += [f"random state: {text}" for text in skipped]


def _torn(plan: LoadPlan, error: Exception) -> LoadTornError:
    return LoadTornError(
        f"{plan.report.path}: {error}; the state is half loaded and must not be used until a "
        "load succeeds: load again, or load an older checkpoint",
        path=plan.report.path,
    )


def _filler(talk: Conversation, options: ReadOptions) -> Callable[[list[ShardRead]], None]:
    """What fills targets, alone or with the other ranks; collective when it shares."""
    if options.mode is ReadMode.DIRECT or talk.world_size == 1:
        return lambda reads: fill_shards(reads, options)
    group = exchange_group()
    return lambda reads: fill_shards_shared(reads, options, talk=talk, group=group)


def _fill(plan: LoadPlan, fill_all: Callable[[list[ShardRead]], None]) -> None:
    """Phase 2. Whatever goes wrong here leaves live state half filled, and says so."""
    try:
        for load_, _ in plan.models.values():
            load_.restore.materialise()
        reads = [
            _model_read(stored(fill.name), fill)
            for load_, stored in plan.models.values()
            for fill in load_.fills()
        ]
        for optimizer, tensors in plan.optimizers.values():
            for name, target in optimizer.targets().items():
                reads.append(_shard_read(tensors.stored(name), target))
        fill_all(reads)
        for load_, _ in plan.models.values():
            load_.restore.finish()
        for optimizer, tensors in plan.optimizers.values():
            optimizer.apply(_whole(tensors))
        for step in plan.others:
            step()
    except Exception as error:
        raise _torn(plan, error) from error


def _whole(tensors: TensorSet) -> Callable[[str], torch.Tensor]:
    return lambda name: read_tensor(tensors.stored(name))


def _model_read(stored: StoredTensor, fill: Fill) -> ShardRead:
    if fill.grid is not None and fill.grid != stored.torch_shape():
        stored = replace(stored, shape=fill.grid)
    return ShardRead(stored=stored, held=fill.held, target=fill.target)


def _shard_read(stored: StoredTensor, target: torch.Tensor) -> ShardRead:
    held, local = local_part(target)
    return ShardRead(stored=stored, held=held, target=local)
