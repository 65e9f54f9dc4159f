"""`save`: a state of training becomes a committed checkpoint directory, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.checkpointing.agree import mesh_of
from milepost.checkpointing.capture import State, add_rng, capture
from milepost.checkpointing.config import as_mapping
from milepost.checkpointing.numbers import plain_epoch, plain_metrics
from milepost.checkpointing.provenance import exactness, provenance, writer
from milepost.checkpointing.save_run import Lineage, SaveReport, SaveRun
from milepost.checkpointing.target import (
    OnExisting,
    check_step,
)
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.engine.write import WriteOptions
from milepost.format.manifest import (
    Manifest,
    encode_manifest,
)
from milepost.format.tree import encode
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.storage.fileops import PathLike


class Rng(Enum):
    """Whether the random state of python, numpy, torch and devices is part of it."""

    INCLUDE = "include"
    LEAVE_OUT = "leave-out"


def save(
    path: PathLike,
    state: State,
    *,
    step: int,
    epoch: float | None = None,
    metrics: Mapping[str, float] | None = None,
    model_config: Any = None,
    processing_class: Any = None,
    log_history: Sequence[Mapping[str, Any]] = (),
    primary: str | None = None,
    rng: Rng = Rng.INCLUDE,
    on_existing: OnExisting = OnExisting.ERROR,
    max_shard_size: int | str = DEFAULT_PART_NBYTES,
    lineage: Lineage | None = None,
    options: WriteOptions | None = None,
) -> SaveReport:
    """Write `state` as the checkpoint directory `path`, for instance `run/checkpoint-1000`.

    `state` maps keys to models, optimizers, objects with `state_dict`, and plain values. The model
    under `model` (or `primary=`) lies at the root in the layout of Hugging Face; with a
    transformers model and its `processing_class` (tokenizer or processor) the directory is complete
    for `from_pretrained`. Nothing in `state` is changed, cloned or initialised.

    When this returns the checkpoint survives a power cut. When it raises, nothing of it exists and
    every earlier checkpoint is as it was. Collective: every rank of the default process group makes
    the call; each writes what it holds, and one that fails makes all of them raise.

    `metrics` are numbers to choose by (retention); `max_shard_size` bounds the tensor bytes of a
    part, as in Hugging Face. Raises `ExistsError`, `InvalidInputError` (a name that states another
    step, a state that cannot be stored: `UnencodableError`), `MismatchError` (ranks disagree),
    `NoSpaceError`, `StorageError`, `RunInUseError`, `RankError` (another rank failed; it is named).
    """
    target = Path(path)
    step = check_step(target, step)
    with converse() as talk:
        save_ = SaveRun(talk, target, step, options or WriteOptions())
        begin = save_.begin(on_existing, lineage)
        if begin["kept"]:
            return save_.kept(begin)
        with together(talk, "capture"), save_.phase("capture"):
            captured = capture(state, primary=primary)
            if rng is Rng.INCLUDE:
                add_rng(captured)
        with together(talk, "plan"), save_.phase("plan"):
            plan, inventory = save_.plan(captured, state, max_shard_size)
            manifest, own = None, []
            if talk.is_coordinator:
                manifest = Manifest(
                    checkpoint_id=begin["checkpoint_id"],
                    parent_id=begin["parent_id"],
                    generation=begin["generation"],
                    branch_step=begin["branch_step"],
                    step=step,
                    epoch=plain_epoch(epoch),
                    created=begin["created"],
                    metrics=plain_metrics(metrics or {}),
                    writer=writer(),
                    mesh=mesh_of(captured, inventory, talk.world_size),
                    model_config=_encoded(model_config),
                    provenance=provenance(),
                    exactness=exactness(state),
                )
                own = save_.side_files(
                    captured, inventory, state, processing_class, manifest, log_history
                )
                encode_manifest(manifest)  # what it cannot hold is refused before a file exists
        return save_.run(plan, own, manifest, begin)


def _encoded(model_config: Any) -> Any:
    if model_config is None:
        return None
    return encode(as_mapping(model_config), key="model_config")
