"""What a checkpoint of a Hugging Face Trainer holds, taken from the live trainer."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.errors import InvalidInputError
from milepost.hf.trainer_state import encode_trainer_state
from milepost.integrations.transformers_resume import TRAINER_STATE, saved_arguments
from milepost.manager.retention import finite_metric
from milepost.state.other import restore_value
from milepost.state.tree_blob import pack_tree, unpack_tree

logger = logging.getLogger(__name__)

ARGUMENTS = "training_args.json"
PROGRESS = "progress"
# What trainers add up between two logs: their own loss, TRL's metrics and count of tokens, the
# components of a loss of sentence-transformers.
_SUMS = ("_metrics", "_stored_metrics", "_total_train_tokens", "accum_loss_components")
# Arguments that say where and when a run runs, not what it computes.
_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "resume_from_checkpoint"})


def require_supported(trainer: Any) -> None:
    """`InvalidInputError` for engines whose state is not held by torch's own objects."""
    engines = {
        "DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "FSDP of torch_xla": getattr(trainer, "is_fsdp_xla_enabled", False),
    }
    for name, is_used in engines.items():
        if is_used:
            raise InvalidInputError(
                f"{type(trainer).__name__}: {name} keeps parameters and moments in objects of its "
                "own, which Milepost does not save; use FSDP, DDP or a DistributedConfig, or the "
                "Trainer without MilepostTrainerMixin"
            )


def training_state(trainer: Any, models: Mapping[str, Any]) -> dict[str, Any]:
    """Live objects by key: the models, optimizer, scheduler and, where there is one, scaler."""
    state = {**models, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    scaler = getattr(trainer.accelerator, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


def progress_of(trainer: Any) -> list[dict[str, Any]]:
    """What each rank has added up since the last log, in order of rank; collective.

    It differs between ranks, and all of them keep all of it, so that another number of ranks can
    tell that it is not theirs.
    """
    own = {
        "loss": trainer._tr_loss.detach().cpu(),
        "last_logged": trainer._globalstep_last_logged,
        "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
    }
    with converse() as talk, together(talk, "progress"):
        rows = talk.gather("sums", pack_tree(_plain(own), key=PROGRESS))
        every = pack_tree(list(rows), key=PROGRESS) if talk.is_coordinator else None
        told = talk.broadcast("every", every)
    return [unpack_tree(row, where=PROGRESS) for row in unpack_tree(told, where=PROGRESS)]


def _plain(value: Any) -> Any:
    """Containers of other classes (a `defaultdict`) as plain ones, tensors on the CPU."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def restore_progress(trainer: Any, saved: list[dict[str, Any]]) -> None:
    """Go on with the sums of the run that saved, if it had as many ranks."""
    args = trainer.args
    if len(saved) != args.world_size:
        logger.info(
            "%d ranks saved, %d go on: what is averaged for the next log begins anew",
            len(saved),
            args.world_size,
        )
        return
    own = saved[args.process_index]
    trainer._tr_loss.copy_(own["loss"])
    trainer._globalstep_last_logged = own["last_logged"]
    # The loss of the steps before is part of the next log, and not of what this call reports.
    trainer._total_loss_scalar -= sum(float(each["loss"]) for each in saved) / len(saved)
    for name, value in own["sums"].items():
        if hasattr(trainer, name):
            setattr(trainer, name, restore_value(getattr(trainer, name), value))


def documents_of(trainer: Any) -> tuple[dict[str, bytes], list[str]]:
    """`trainer_state.json` and the training arguments, and notes."""
    state, notes = encode_trainer_state(dataclasses.asdict(trainer.state))
    return {TRAINER_STATE: state, ARGUMENTS: arguments_json(trainer.args)}, notes


def arguments_json(args: Any) -> bytes:
    """Training arguments as JSON, secrets masked; a value that JSON has no form for as its text."""
    plain = json.loads(json.dumps(args.to_dict(), default=str), parse_constant=str)
    return (json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def log_other_arguments(args: Any, checkpoint: Path) -> None:
    """Log which arguments are not those of the run that saved; some come from the checkpoint."""
    saved = saved_arguments(checkpoint, ARGUMENTS)
    now = json.loads(arguments_json(args))
    for name in sorted(saved.keys() & now.keys() - _PLACES):
        if saved[name] != now[name]:
            logger.info(
                "%s: saved with %s=%r, resumed with %r",
                checkpoint,
                name,
                saved[name],
                now[name],
            )


def metrics_of(state: Any) -> dict[str, float]:
    """What was logged at the present step, as numbers to choose checkpoints by."""
    found: dict[str, float] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            for name, value in entry.items():
                number = finite_metric(value)
                if number is not None and name not in ("step", "epoch"):
                    found[name] = number
    return found


def export_callbacks(trainer: Any) -> None:
    """Write the present state of stateful callbacks and of the control into the Trainer's state."""
    from transformers.trainer_callback import ExportableState, TrainerState

    live = [*trainer.callback_handler.callbacks, trainer.control]
    exported = TrainerState(stateful_callbacks=[c for c in live if isinstance(c, ExportableState)])
    trainer.state.stateful_callbacks = exported.stateful_callbacks
