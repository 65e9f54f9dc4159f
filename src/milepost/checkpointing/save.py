"""`save`: a state of training becomes a committed checkpoint directory, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from milepost.checkpointing.adapter_save import Adapters
from milepost.checkpointing.capture import State
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.events import OnEvent
from milepost.checkpointing.in_flight import saves, settle_earlier
from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.linking import Unchanged
from milepost.checkpointing.save_prepare import Rng, SaveKeywords, prepare_save
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.sidecars import Documents, Sidecars
from milepost.checkpointing.target import OnExisting
from milepost.checkpointing.world import converse
from milepost.engine.write import WriteOptions
from milepost.format.fingerprint import Stated
from milepost.hf.trainer_state import BestCheckpoint
from milepost.plan.part_names import WeightFiles
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.storage.fileops import PathLike


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
    best: BestCheckpoint | None = None,
    primary: str | None = None,
    rng: Rng = Rng.INCLUDE,
    on_existing: OnExisting = OnExisting.ERROR,
    max_shard_size: int | str = DEFAULT_PART_NBYTES,
    weight_files: WeightFiles = WeightFiles.AUTO,
    fingerprint: Stated = None,
    sidecars: Sidecars | None = None,
    documents: Documents | None = None,
    copies: Copies = Copies.ONE,
    lineage: Lineage | None = None,
    options: WriteOptions | None = None,
    on_event: OnEvent | None = None,
    unchanged: Unchanged = Unchanged.LINK_VERIFIED,
    adapters: Adapters = Adapters.ALONE,
) -> SaveReport:
    """Write `state` as the checkpoint directory `path`, for instance `run/checkpoint-1000`.

    `state` maps keys to models, optimizers, objects with `state_dict`, and plain values. The model
    under `model` (or `primary=`) lies at the root in the layout of Hugging Face; with a
    transformers model and its `processing_class` (tokenizer or processor) the directory is complete
    for `from_pretrained`. Nothing in `state` is changed, cloned or initialised.

    When this returns the checkpoint survives a power cut. When it raises, nothing of it exists and
    every earlier checkpoint is as it was. Collective: every rank of the default process group makes
    the call; each writes what it holds, and one that fails makes all of them raise.

    `metrics` are numbers to choose by (retention); `log_history` and `best` go into
    `trainer_state.json`; `max_shard_size` bounds the tensor bytes of a
    part, as in Hugging Face, and `weight_files` says which parts there are: those of each stage
    when the model is a pipeline. `fingerprint` states fields of the topology that cannot be derived
    from the state, by name. `sidecars` are files beside the weights that these need, by name:
    bytes, or tensors for a `.pt` file; those of rank 0 are written. So are `documents`, further
    files by name that nothing depends on, or in place of one of that name that Milepost makes
    itself (`trainer_state.json`, a card). `on_event` is called with what
    this rank does, a `SaveEvent` at a time, from any thread; see `progress_bar`. Frozen weights,
    16 MiB and more of them, lie in parts of their own; `unchanged` says what becomes of such a part
    when the newest checkpoint of the run, or the one that this one descends from, has its bytes.
    Of a model that carries adapters (those of peft, or of experts that were declared), `adapters`
    says what is written: the adapter alone, or all weights with it folded in.

    Ranks that do not see the directory of `path` send what they hold to ranks that do; rank 0 must
    see it. With `copies=Copies.PER_NODE` each node writes a whole checkpoint to its own disk, under
    a path that may differ in all but the last name. Every copy is complete and durable before the
    first gets its name, that of rank 0 gets it last, and one that cannot have it makes the others
    give theirs back; a machine that dies in that moment leaves some of them. Raises `ExistsError`,
    `InvalidInputError` (a name that states another step, a state that cannot be stored:
    `UnencodableError`), `MismatchError` (ranks disagree), `NoSpaceError`, `StorageError`,
    `RunInUseError`, `RankError` (another rank failed; it is named).
    """
    keywords: SaveKeywords = {
        "epoch": epoch,
        "metrics": metrics,
        "model_config": model_config,
        "processing_class": processing_class,
        "log_history": log_history,
        "best": best,
        "primary": primary,
        "rng": rng,
        "on_existing": on_existing,
        "max_shard_size": max_shard_size,
        "weight_files": weight_files,
        "fingerprint": fingerprint,
        "sidecars": sidecars,
        "documents": documents,
        "copies": copies,
        "lineage": lineage,
        "options": options,
        "on_event": on_event,
        "unchanged": unchanged,
        "adapters": adapters,
    }
    saves.drain()
    with converse() as talk:
        settle_earlier(talk)
        prepared = prepare_save(talk, path, state, step, keywords)
        with prepared.run.events.failing():
            return prepared.finish()
