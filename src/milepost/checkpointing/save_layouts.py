"""`save` for weight files that are named otherwise: pipeline stages, and experts of each rank."""

from __future__ import annotations

import logging
from typing import Any

from milepost.checkpointing.capture import State, check_keys, primary_key
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.ep_sharded import MergeOnSave, validate_ep_sharded_save
from milepost.checkpointing.save import save
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.errors import InvalidInputError
from milepost.format.fingerprint import Stated
from milepost.plan.part_names import WeightFiles
from milepost.storage.fileops import PathLike

logger = logging.getLogger(__name__)


def save_pp_checkpoint(path: PathLike, state: State, *, step: int, **options: Any) -> SaveReport:
    """Write `state`, whose model is a pipeline, with the parts of each stage in files of their own.

    `model-pp<stage>-of-<stages>-<part>.safetensors` holds complete tensors under the names of the
    whole model, split at `max_shard_size`; `model-wrapper-<part>.safetensors` what no stage owns. A
    pair that is tied across stages is written once. One index names all of them, so
    `from_pretrained` loads the directory as it is. `options` are those of `save`, which does the
    same by itself for a model that it recognises as a pipeline; here a model that is not divided is
    one stage. Collective; raises what `save` raises.
    """
    return save(path, state, step=step, weight_files=WeightFiles.STAGES, **options)


def save_sharded_ep(
    path: PathLike,
    state: State,
    *,
    step: int,
    primary: str | None = None,
    fingerprint: Stated = None,
    merge: MergeOnSave = MergeOnSave.NO,
    copies: Copies = Copies.ONE,
    **options: Any,
) -> SaveReport:
    """Write `state` with one file of weights for each rank: its own experts, as they are in memory.

    `model-<rank>-of-<ranks>.safetensors`, counted from 0, holds the slice of that rank of each
    expert tensor as `<name>.shard_<rank>`; that of rank 0 holds every other tensor, whole. The
    index has `metadata.format: ep_sharded`: no reader takes it for a model, and
    `milepost merge-ep-shards` makes one of it. `max_shard_size` does not apply. `options` are those
    of `save`, and so is everything else: digests, manifest, one atomic publish.

    Collective; `InvalidInputError` on all ranks for what `validate_ep_sharded_save` refuses.
    """
    with converse() as talk, together(talk, "validate"):
        key = primary_key(check_keys(state), primary)
        if key is None:
            raise InvalidInputError("save_sharded_ep: the state holds no model")
        validate_ep_sharded_save(
            state[key],
            world_size=talk.world_size,
            fingerprint=fingerprint,
            merge=merge,
            copies=copies,
        )
    logger.info("one file for each rank is written: max_shard_size does not apply to them")
    return save(
        path,
        state,
        step=step,
        primary=primary,
        fingerprint=fingerprint,
        weight_files=WeightFiles.RANKS,
        **options,
    )
