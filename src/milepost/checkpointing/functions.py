"""`save_checkpoint` and `load_checkpoint`: one `.pt` with metadata; back from any layout.

`load_full_state_dict` is the weights of the latter alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost._warn import warn_user
from milepost.errors import (
    CheckpointWarning,
    DamagedError,
    InconsistentError,
    ReplacedError,
    UnsafePickleError,
)
from milepost.format.tree import decode
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.payload import Dialect, Payload
from milepost.layouts.single_file import RESERVED_KEYS, SingleFileCheckpoint, write_single_file
from milepost.layouts.trio import TrioCheckpoint, find_trio
from milepost.storage.fileops import PathLike

if TYPE_CHECKING:
    import torch

LOAD_ATTEMPTS = 5
# Files of these dialects are current: nothing to convert.
_CURRENT = (Dialect.MODERN_LLM, Dialect.STATE_DICT, Dialect.TRIO)
_OTHER_STATES = ("scheduler_state", "scaler_state", "extra_state")


def save_checkpoint(
    path: PathLike,
    model_state: Mapping[str, Any],
    optimizer_state: Any = None,
    **metadata: Any,
) -> None:
    """Save weights, an optimizer's state if given, and other keywords as metadata, in one `.pt`.

    Parents are created. The file appears complete or not at all, and is durable when this returns;
    an older file or three-file checkpoint of the same name is replaced. `_orig_mod.` is taken off
    the names of a compiled model. What could not be loaded back safely (a `Path`, an object of a
    class of yours, numpy values) is refused before anything is written: `UnencodableError` names
    its key. Metadata cannot be called `optimizer`, `metadata`, or like a parameter.

    >>> save_checkpoint("run/step_1000.pt", model.state_dict(), step=1000)  # doctest: +SKIP
    """
    write_single_file(path, model_state, optimizer_state, metadata)


def load_checkpoint(path: PathLike, *, allow: Collection[str] = ()) -> dict[str, Any]:
    """What lies at `path`, on the CPU: a `.pt`, the stem or any file of a trio, or a directory.

    The result has `model_state`, `optimizer` when one was saved, `metadata`, and each entry of the
    metadata once more at the top. Scheduler, scaler and extra state are there as
    `scheduler_state`, `scaler_state` and `extra_state` when they were saved. A recorded model
    configuration is also found as `config`. Tied weights are one tensor. Of a directory,
    `optimizer` is there only as far as it is the state dict of a torch optimizer; what else its
    training state holds is under `training_state`, as `Checkpoint.training_state` gives it.

    Bytes are checked where digests or checksums are recorded: `DamagedError` when they are wrong.
    Without a usable `extra_state.pt`, a trio still gives weights and metadata, with one
    `CheckpointWarning`. A legacy file gives a `DeprecationWarning` that says how to convert it.
    `NotFoundError` when nothing is there. `allow` names classes (`module.name`) whose instances
    may stand in a `.pt`; they are read as dicts of their attributes, and never imported.
    """
    place = Path(path)
    for attempt in range(LOAD_ATTEMPTS):
        checkpoint = _open(place, allow)
        try:
            return _loaded(checkpoint)
        except ReplacedError:
            if attempt == LOAD_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def load_full_state_dict(path: PathLike) -> dict[str, torch.Tensor]:
    """The weights of the whole model at `path`, by their names on disk, on the CPU.

    It does not matter on how many ranks, and in which mode, they were saved. Tied names map to one
    tensor. Nothing of the training state is read. Slices of experts (`save_sharded_ep`) are no
    model: they are refused, and `milepost merge-ep-shards` makes one of them. What is loaded and
    raised otherwise is as `Checkpoint.open(path).read_weights()` says.

    >>> model.load_state_dict(load_full_state_dict("run/checkpoint-1000"))  # doctest: +SKIP
    """
    return Checkpoint.open(path).read_weights()


def _open(path: Path, allow: Collection[str]) -> Checkpoint:
    if allow and path.is_file() and find_trio(path) is None:
        return SingleFileCheckpoint(path, allow=allow)
    return Checkpoint.open(path)


def _loaded(checkpoint: Checkpoint) -> dict[str, Any]:
    match checkpoint:
        case TrioCheckpoint():
            return _as_mapping(_trio_payload(checkpoint))
        case SingleFileCheckpoint():
            if checkpoint.dialect not in _CURRENT:
                warn_legacy(checkpoint.path, checkpoint.dialect)
            payload = checkpoint.payload()
            _warn_conflicts(checkpoint.path, payload)
            return _as_mapping(payload)
        case _:
            return _from_directory(checkpoint)


def warn_legacy(path: Path, dialect: Dialect) -> None:
    """Tell the user's line that a file of an old layout was loaded, and what converts it."""
    warn_user(
        f"{path}: a checkpoint in the legacy layout {dialect}; convert it with: "
        f"llm-migrate-ckpt {path}",
        DeprecationWarning,
    )


def _warn_conflicts(path: Path, payload: Payload) -> None:
    if payload.conflicts:
        key, (top, nested) = next(iter(payload.conflicts.items()))
        warn_user(
            f"{path}: {key} is {top!r:.50} at the top and {nested!r:.50} in metadata, which is "
            f"used ({len(payload.conflicts)} such keys); it was edited after it was saved",
            CheckpointWarning,
        )


def _trio_payload(checkpoint: TrioCheckpoint) -> Payload:
    try:
        return checkpoint.payload()
    except (InconsistentError, ReplacedError):
        raise
    except (DamagedError, UnsafePickleError) as error:
        payload = checkpoint.weights_payload()
        warn_user(
            f"{checkpoint.documents.file(checkpoint.names.extra_state)}: not usable, so only "
            f"weights and metadata were loaded ({error})",
            CheckpointWarning,
        )
        return payload


def _as_mapping(payload: Payload) -> dict[str, Any]:
    metadata = dict(payload.metadata)
    result: dict[str, Any] = {"model_state": payload.model_state}
    if payload.optimizer_state is not None:
        result["optimizer"] = payload.optimizer_state
    result["metadata"] = metadata
    for name in _OTHER_STATES:
        if getattr(payload, name) is not None:
            result[name] = getattr(payload, name)
    if payload.model_config is not None:
        metadata.setdefault("config", payload.model_config)
    if payload.step is not None:
        metadata.setdefault("step", payload.step)
    return result | {key: value for key, value in metadata.items() if key not in RESERVED_KEYS}


def _from_directory(checkpoint: Checkpoint) -> dict[str, Any]:
    info = checkpoint.info
    recorded = {
        "step": info.step,
        "epoch": info.epoch,
        "loss": info.loss,
        "best_loss": info.best_loss,
        "created": info.created,
        "metrics": dict(info.metrics) or None,
        "config": _config(checkpoint),
        "checkpoint_id": info.checkpoint_id,
    }
    metadata = {key: value for key, value in recorded.items() if value is not None}
    result: dict[str, Any] = {"model_state": checkpoint.read_weights()}
    state = _training_state(checkpoint)
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and "param_groups" in optimizer:
        result["optimizer"] = state.pop("optimizer")
    if state:
        result["training_state"] = state
    result["metadata"] = metadata
    return metadata | result


def _config(checkpoint: Checkpoint) -> Any:
    config = checkpoint.info.model_config
    if config is None or not isinstance(checkpoint, DirectoryCheckpoint):
        return config
    return decode(config, None, where=f"{checkpoint.path}: model_config")


def _training_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The training state by key; an optimizer as the state dict that torch's own classes take.

    Where it is damaged, a warning says so and the weights are given alone.
    """
    try:
        state = dict(checkpoint.training_state())
    except DamagedError as error:
        warn_user(
            f"{checkpoint.path}: the training state is not usable, so only weights and metadata "
            f"were loaded ({error})",
            CheckpointWarning,
        )
        return {}
    if isinstance(checkpoint, DirectoryCheckpoint):
        from milepost.checkpointing.optimizer_dict import torch_state_dict
        from milepost.state.optimizer_record import OptimizerRecord

        for key, entry in checkpoint.manifest.state.items():
            if entry.kind == "optimizer" and key in state:
                tree = {name: value for name, value in state[key].items() if name != "tensors"}
                record = OptimizerRecord.from_tree(tree, where=f"{checkpoint.path}: {key}")
                state[key] = torch_state_dict(record, state[key]["tensors"])
    return state
