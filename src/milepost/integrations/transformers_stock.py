"""Checkpoints that the stock Trainer wrote: read safely, into models that may be sharded now."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from milepost._warn import warn_user
from milepost.checkpointing.load import load
from milepost.checkpointing.load_model import Fill, copy_part
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.errors import CheckpointWarning
from milepost.integrations.transformers_models import is_embedding_model, trained_modules
from milepost.layouts.huggingface import huggingface_stem
from milepost.layouts.torch_archive import TorchArchive
from milepost.manager.trio_optimizer import plan_optimizer
from milepost.state.placements import local_part
from milepost.state.tensors import stored_shape

logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
_SHARDED = ("pytorch_model_fsdp*", "optimizer_0")


def is_sharded_by_accelerate(checkpoint: str) -> bool:
    """Whether accelerate wrote model and optimizer as its FSDP does, which it reads back itself."""
    return any(any(Path(checkpoint).glob(pattern)) for pattern in _SHARDED)


def has_plain_weights(trainer: Any, checkpoint: Path) -> bool:
    """Whether the weights of the model lie in safetensors files, and no adapter's do."""
    return huggingface_stem(checkpoint) == "model" and not is_embedding_model(trainer.model)


def load_weights(trainer: Any, checkpoint: Path) -> None:
    """Fill the model, each rank what it holds. Collective."""
    load(checkpoint, {"model": trainer.model})


def load_training_state(trainer: Any, checkpoint: Path) -> None:
    """Fill optimizer, scheduler and scaler from the stock files. Collective.

    All files are read, by Milepost's own reader that executes nothing, before anything is filled.
    `MismatchError` when groups or shapes differ, `UnsafePickleError` for a file that holds more
    than plain data.
    """
    with converse() as talk, together(talk, "stock"):
        saved = {name: _read(checkpoint / name) for name in (OPTIMIZER, SCHEDULER, SCALER)}
        scaler = getattr(trainer.accelerator, "scaler", None)
        wanted = [OPTIMIZER, SCHEDULER] if scaler is None else [OPTIMIZER, SCHEDULER, SCALER]
        absent = [name for name in wanted if saved[name] is None]
        if absent:
            warn_user(
                f"{checkpoint}: holds no {', '.join(absent)}; what lies there starts anew",
                CheckpointWarning,
            )
        if saved[OPTIMIZER] is not None:
            _fill_optimizer(trainer, saved[OPTIMIZER], checkpoint / OPTIMIZER)
        if saved[SCHEDULER] is not None:
            trainer.lr_scheduler.load_state_dict(saved[SCHEDULER])
        if saved[SCALER] is not None and scaler is not None:
            scaler.load_state_dict(saved[SCALER])
    logger.info("%s: resumed from a checkpoint of the stock Trainer", checkpoint)


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    with TorchArchive.open(path) as archive:
        return archive.materialise(archive.tree)


def _fill_optimizer(trainer: Any, state: Any, where: Path) -> None:
    """Moments by the position of their parameters, cut as the parameters are held."""
    modules = trained_modules(trainer)
    shapes = {name: stored_shape(param) for name, param in modules.named_parameters()}
    plan, tensors = plan_optimizer(
        trainer.optimizer, modules, state, None, None, shapes, where=str(where)
    )
    for name, target in plan.targets().items():
        held, local = local_part(target)
        copy_part(Fill(name, None, held, local), tensors[name])
    plan.apply()
