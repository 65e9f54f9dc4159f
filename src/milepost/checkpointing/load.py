"""`load`: fill live state from a checkpoint, in two phases.

Phase 1 checks everything and decodes every tree; after an error live memory is as it was. Phase 2
fills; an error there is raised as `LoadTornError`, and the state must not be used until a load
succeeds.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from milepost.adapters.kinds import checkpoint_kind
from milepost.checkpointing.already_read import require_same_bytes, root_to_leave, stamp_filled
from milepost.checkpointing.capture import State, check_keys
from milepost.checkpointing.config import check_model_config
from milepost.checkpointing.fresh_moments import files_of_optimizers, set_rates, start_afresh
from milepost.checkpointing.in_flight import saves
from milepost.checkpointing.load_fill import FillAll, InFiles, InMemory, Tensors
from milepost.checkpointing.load_plan import plan_load
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Moments, Staging, Weights
from milepost.checkpointing.proof_of_load import proof_of, proven_later, told
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse, drop_exchange_group, exchange_group, host_name
from milepost.engine.proof import Proof
from milepost.engine.read import ReadMode, ReadOptions
from milepost.engine.read_shard import fill_shards
from milepost.engine.read_shared import fill_shards_shared
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    InvalidInputError,
    LoadTornError,
    MismatchError,
    NotFoundError,
    RankError,
    RankTimeoutError,
)
from milepost.format.fingerprint import Stated
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.dcp import DcpCheckpoint
from milepost.layouts.directory import DirectoryCheckpoint, what_still_loads
from milepost.layouts.directory_verify import verify_directory
from milepost.state.other import Kind
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
    WHILE_READING = "while-reading"
    """Tensors are proven as they are read, at little cost, everything else before. Damage in one is
    found when live state is half filled: `LoadTornError`, and an older checkpoint has to be loaded,
    unless `staging=Staging.FULL`.
    Extents of which a rank reads a part only are not proven; the report says how many bytes."""


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
    weights: Weights = Weights.READ,
    model_config: Any = None,
    fingerprint: Stated = None,
    primary: str | None = None,
    verify: Verify = Verify.SIZES,
    rng: RngRestore = RngRestore.NOW,
    staging: Staging = Staging.NONE,
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
    the same objects. A base with fewer tokens than its adapter was saved with gets rows for them.

    Waits for saves that this process has under way. Collective: every rank of the default process
    group makes the call and reads just the bytes that its placements need, whatever topology wrote
    the checkpoint. With `ReadMode.SHARED` in the
    `options` of all ranks, bytes that several need are read by one and sent to the others.

    `weights=Weights.ALREADY_READ` is for a model at the root that was built from this checkpoint:
    its names, shapes and dtypes are compared as ever, and its weights with a sample of the
    checkpoint, but they are not read again. It is refused unless every rank built it from here.
    With `moments=Moments.FRESH_IF_UNUSABLE` the call is made once more without optimizer state when
    it fails with it.

    With `staging=Staging.FULL` everything is read into host memory beside the state, and proven
    there with `Verify.WHILE_READING`, before anything of it is touched on any rank; that needs room
    for one more copy of what this rank holds.

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
        weights=weights,
    )
    request = _Request(path, state, policies, primary, model_config, verify, rng, staging, options)
    saves.drain()  # the newest may be one that is still being written
    report = _load_or_begin_afresh(request)
    for line in report.lines():
        logger.info("%s", line)
    return report


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of a load."""

    path: PathLike
    state: State
    policies: LoadPolicies
    primary: str | None
    model_config: Any
    verify: Verify
    rng: RngRestore
    staging: Staging
    options: ReadOptions | None


def _load_or_begin_afresh(request: _Request) -> LoadReport:
    """Errors are the same on all ranks, and so all of them try the second time, or none."""
    try:
        return _load(request)
    except (NotFoundError, InvalidInputError, RankTimeoutError):
        raise
    except CheckpointError as error:
        if request.policies.moments is not Moments.FRESH_IF_UNUSABLE:
            raise
        policies = replace(
            request.policies, moments=Moments.FRESH, fresh_because=f"as allowed, after {error}"
        )
        try:
            return _load(replace(request, policies=policies))
        except CheckpointError as second:
            if isinstance(error, LoadTornError) and not isinstance(second, LoadTornError):
                raise error from second  # the state is still half loaded
            raise


def _load(request: _Request) -> LoadReport:
    state, policies = request.state, request.policies
    reading = request.options or ReadOptions()
    with converse() as talk:
        with together(talk, "open"):
            checkpoint = _open(talk, request.path)
            _agree_on(talk, checkpoint, reading, request.staging)
            _check_staging(checkpoint, request.staging)
            proof = None
            if request.verify is Verify.WHILE_READING:
                proof = proof_of(checkpoint, reading)
            if request.verify is not Verify.SIZES and talk.is_coordinator:
                _verify(checkpoint, policies, proof)
            config = {}
            if request.model_config is not None:
                config = check_model_config(checkpoint, request.model_config)
            kind, models = checkpoint_kind(checkpoint), _models_of(state)
            root = root_to_leave(talk, checkpoint, kind, models, request.primary, policies)
        with ExitStack() as undo:
            with together(talk, "plan"):
                plan = plan_load(talk, checkpoint, state, policies, request.primary, undo)
                plan.report.config = config
                if root is not None:
                    _leave(plan, root)
            fill_all = _filler(talk, reading, proof)
            tensors: Tensors = InFiles(plan, fill_all)
            if request.staging is Staging.FULL:
                tensors = _read_together(talk, plan, fill_all, reading)
            undo.pop_all()  # all ranks agree; what was made room for is filled now
        _fill_together(talk, plan, tensors, request, reading)
        if proof is not None:
            plan.report.notes += told(proof)
        stamp_filled(checkpoint, kind, models, plan)
        return plan.report


def _read_together(
    talk: Conversation, plan: LoadPlan, fill_all: FillAll, reading: ReadOptions
) -> InMemory:
    """Everything in memory beside the live state, on all ranks; an error has changed nothing."""
    try:
        with together(talk, "read"):
            tensors = InMemory(plan, fill_all)
    except CheckpointError as error:
        _drop_group(talk, reading)
        if isinstance(error, DamagedError):
            text = f"{error}; nothing of the state has changed: load an older checkpoint"
            raise DamagedError(text, path=plan.report.path) from error
        raise
    return tensors


def _fill_together(
    talk: Conversation, plan: LoadPlan, tensors: Tensors, request: _Request, reading: ReadOptions
) -> None:
    try:
        with together(talk, "fill"):
            _fill(plan, request.state, tensors)
            if request.rng is RngRestore.NOW:
                _restore_rng(plan)
    except (RankError, LoadTornError) as error:
        _drop_group(talk, reading)
        if isinstance(error, LoadTornError):
            raise
        raise _torn(plan, error) from error


def _drop_group(talk: Conversation, reading: ReadOptions) -> None:
    """After an error, peers may be anywhere in what they send and receive."""
    if reading.mode is ReadMode.SHARED and talk.world_size > 1:
        drop_exchange_group(exchange_group())


def _models_of(state: State) -> dict[str, Any]:
    return {key: state[key] for key, kind in check_keys(state).items() if kind is Kind.MODEL}


def _leave(plan: LoadPlan, root: str) -> None:
    """The weights of the model at the root are there already; that is proven here."""
    if root not in plan.models:
        raise MismatchError(
            f"{plan.report.path}: weights=Weights.ALREADY_READ is for a checkpoint that lies in a "
            "directory; load this one with weights=Weights.READ"
        )
    load_, stored = plan.models[root]
    count = require_same_bytes(load_, stored, where=f"{plan.report.path}: {root}")
    plan.already_read.add(root)
    plan.report.models[root] = replace(load_.restore.report, filled=0)
    plan.report.notes.append(
        f"{root}: built from this checkpoint, weights not read again; {count} tensors compared"
    )


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


def _check_staging(checkpoint: Checkpoint, staging: Staging) -> None:
    if staging is Staging.FULL and isinstance(checkpoint, DcpCheckpoint):
        raise InvalidInputError(
            f"{checkpoint.path}: staging=Staging.FULL, but a directory of torch's DCP is read "
            "straight into the state; load it with staging=Staging.NONE"
        )


def _agree_on(
    talk: Conversation, checkpoint: Checkpoint, options: ReadOptions, staging: Staging
) -> None:
    """Refuse when ranks look at different checkpoints, or read in different ways."""
    own = f"{checkpoint.path.name} {checkpoint.info.checkpoint_id or ''} {options.mode.value}"
    own += " staged" * (staging is Staging.FULL)
    for rank, other in enumerate(talk.gather("checkpoint", own.encode())):
        if other.decode() != own:
            raise MismatchError(
                f"rank 0 loads {own}, rank {rank} {other.decode()}; give every rank the same path "
                "and the same read mode and staging"
            )


def _verify(checkpoint: Checkpoint, policies: LoadPolicies, proof: Proof | None) -> None:
    threads = ReadOptions().threads
    left_out: set[str] = set()
    if isinstance(checkpoint, DirectoryCheckpoint):
        if policies.moments is Moments.FRESH:
            left_out |= set(files_of_optimizers(checkpoint.manifest))
        if proof is not None:
            left_out |= proven_later(checkpoint)
        report = verify_directory(checkpoint, threads=threads, on_bytes=None, leave_out=left_out)
    else:
        report = checkpoint.verify(threads=threads)
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


def _filler(talk: Conversation, options: ReadOptions, proof: Proof | None) -> FillAll:
    """What fills targets, alone or with the other ranks; collective when it shares."""
    if options.mode is ReadMode.DIRECT or talk.world_size == 1:
        return lambda reads: fill_shards(reads, options, proof)
    group = exchange_group()
    return lambda reads: fill_shards_shared(reads, options, talk=talk, group=group)


def _fill(plan: LoadPlan, state: State, tensors: Tensors) -> None:
    """Phase 2. Whatever goes wrong here leaves live state half filled, and says so."""
    try:
        for key, (load_, _) in plan.models.items():
            if key not in plan.already_read:
                load_.restore.materialise()
        tensors.fill(plan)
        for load_, _ in plan.models.values():
            load_.restore.finish()
        for place, (optimizer, _) in plan.optimizers.items():
            optimizer.apply(partial(tensors.whole, place))
        for fresh in plan.fresh.values():
            start_afresh(fresh)
        for step in plan.others:
            step()
        plan.report.notes += set_rates(state, plan.fresh.values())
    except Exception as error:
        raise _torn(plan, error) from error
