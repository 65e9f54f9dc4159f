"""`load`: fill live state from a checkpoint, in two phases.

Phase 1 checks everything and decodes every tree, with live memory untouched. Phase 2 fills; an
error there is raised as `LoadTornError`, and the state must not be used until a load succeeds.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

import torch

from milepost.checkpointing.capture import State
from milepost.checkpointing.config import check_model_config
from milepost.checkpointing.load_plan import plan_load
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Moments
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse
from milepost.engine.read import ReadOptions, StoredTensor
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import DamagedError, FormatError, LoadTornError, MismatchError, RankError
from milepost.layouts.checkpoint import Checkpoint
from milepost.state.placements import local_part
from milepost.state.policies import ClassPolicy, DtypePolicy, Missing, ShapePolicy, Unexpected
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
    model_config: Any = None,
    primary: str | None = None,
    verify: Verify = Verify.SIZES,
    rng: RngRestore = RngRestore.NOW,
    options: ReadOptions | None = None,
) -> LoadReport:
    """Fill the objects of `state` in place from the checkpoint at `path`, and say what was done.

    Entries of the checkpoint that `state` does not ask for are not read: with only a model in it,
    not one byte of optimizer state is. Mappings and lists among the values are updated in place.
    With `model_config`, it is compared with the saved one, field by field.

    Collective: every rank of the default process group makes the call and reads just the bytes that
    its placements need, whatever topology wrote the checkpoint.

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
    )
    with converse() as talk:
        with together(talk, "open"):
            checkpoint = Checkpoint.open(path)
            _agree_on(talk, checkpoint)
            if verify is Verify.DIGESTS and talk.is_coordinator:
                _verify(checkpoint)
            config = {} if model_config is None else check_model_config(checkpoint, model_config)
        with together(talk, "plan"):
            plan = plan_load(talk, checkpoint, state, policies, primary)
            plan.report.config = config
        try:
            with together(talk, "fill"):
                _fill(plan, options or ReadOptions())
                if rng is RngRestore.NOW:
                    _restore_rng(plan)
        except RankError as error:
            raise _torn(plan, error) from error
    for line in plan.report.lines():
        logger.info("%s", line)
    return plan.report


def _agree_on(talk: Conversation, checkpoint: Checkpoint) -> None:
    """Refuse when ranks look at different checkpoints."""
    own = f"{checkpoint.path.name} {checkpoint.info.checkpoint_id or ''}".strip()
    for rank, other in enumerate(talk.gather("checkpoint", own.encode())):
        if other.decode() != own:
            raise MismatchError(
                f"rank 0 loads {own}, rank {rank} {other.decode()}; give every rank the same path"
            )


def _verify(checkpoint: Checkpoint) -> None:
    report = checkpoint.verify(threads=ReadOptions().threads)
    if not report.ok:
        errors = [problem.message for problem in report.problems]
        raise DamagedError(
            f"{checkpoint.path}: {len(errors)} things are wrong: {'; '.join(errors[:3])}; load an "
            "older checkpoint",
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


def _fill(plan: LoadPlan, options: ReadOptions) -> None:
    """Phase 2. Whatever goes wrong here leaves live state half filled, and says so."""
    try:
        reads = [
            _shard_read(stored(name), target)
            for restore, stored in plan.models.values()
            for name, targets in restore.targets.items()
            for target in targets
        ]
        for optimizer, tensors in plan.optimizers.values():
            for name, target in optimizer.targets().items():
                reads.append(_shard_read(tensors.stored(name), target))
        fill_shards(reads, options)
        for restore, _ in plan.models.values():
            restore.finish()
        for optimizer, _ in plan.optimizers.values():
            optimizer.apply()
        for step in plan.others:
            step()
    except Exception as error:
        raise _torn(plan, error) from error


def _shard_read(stored: StoredTensor, target: torch.Tensor) -> ShardRead:
    held, local = local_part(target)
    return ShardRead(stored=stored, held=held, target=local)
