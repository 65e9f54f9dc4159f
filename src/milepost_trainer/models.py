"""The model of a run on its mesh, from what the YAML says."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

import milepost as mp
from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.lora import adapter, quantization
from milepost_trainer.parallel import (
    Head,
    MeshSizes,
    ParallelModel,
    PipelineSchedule,
    Role,
    build,
)
from milepost_trainer.sinks import policy_of, prepare_sinks

_OF_THE_HEAD = ("architectures", "id2label", "label2id", "pad_token_id")
"""What a task sets in a configuration; the load compares heads by their tensors."""
_OF_THE_FILE = ("dtype", "transformers_version", "_name_or_path")

logger = logging.getLogger(__name__)


def checkpoint_to_build_from(
    config: TrainerConfig, vocabulary: int, checkpoint: Path | None
) -> Path | None:
    """`checkpoint`, where a run that resumes from it builds its model from it; None for the base.

    It is what `milepost.resolve_resume_weights_source` says, unless a model made so would not be
    the one that the YAML describes: then that one is built, and the load says what does not fit.
    Collective, with the errors of that function.
    """
    source = mp.resolve_resume_weights_source(checkpoint, config, config)
    if checkpoint is None:
        return None
    if source.origin is mp.WeightsOrigin.BASE:
        logger.info("the model is built from the base, and %s is read into it", checkpoint)
        return None
    if not _has_config(checkpoint, _base_of(config, vocabulary)):
        logger.info("the model is built from the base: %s has another config.json", checkpoint)
        return None
    logger.info("the model is built from %s", checkpoint)
    return checkpoint


def build_model(
    config: TrainerConfig,
    vocabulary: int,
    *,
    head: Head = Head.LANGUAGE_MODEL,
    role: Role = Role.TRAINED,
    checkpoint: Path | None = None,
) -> ParallelModel:
    """The model on its mesh, from a directory or with random weights. Collective.

    With `checkpoint` its weights are those that this one holds; it goes on to be named after the
    base.
    """
    base = _base_of(config, vocabulary)
    try:
        sizes = MeshSizes(
            dp_replicate=config.dp_replicate_size,
            dp_shard=config.dp_shard_size,
            cp=config.cp_size,
            tp=config.tp_size,
            ep=config.ep_size,
            etp=config.expert_tp_size,
            pp=config.pipeline_parallel_size,
        )
        sizes.check_world(dist.get_world_size() if dist.is_initialized() else 1)
        dtype, device = getattr(torch, config.dtype), _device()
        model = build(
            base if checkpoint is None else checkpoint,
            sizes,
            seed=config.seed,
            schedule=PipelineSchedule(config.pipeline_schedule),
            microbatches=config.microbatches_per_step,
            dtype=dtype,
            device=device,
            head=head,
            labels=config.num_labels or 1,
            role=role,
            adapt=_adapt(config, sizes, role),
            quantization=None if config.lora is None else quantization(config.lora, dtype, device),
        )
        if config.use_grouped_gemm is not None and config.ep_size * config.expert_tp_size == 1:
            kernel = "grouped_mm" if config.use_grouped_gemm else "eager"
            for module in _unwrapped(model):
                module.set_experts_implementation(kernel)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if checkpoint is not None:
        mp.stamp_weights_source(model.model, checkpoint)
        for module in _unwrapped(model):  # saves look there for a card, and the checkpoint may go
            module.name_or_path = str(base) if isinstance(base, Path) else ""
            module.config.name_or_path = module.name_or_path
    return model


def _unwrapped(model: ParallelModel) -> list[Any]:
    return [getattr(module, "module", module) for module in model.modules]  # of DDP


def _base_of(config: TrainerConfig, vocabulary: int) -> Any:
    """What the YAML says of the model: the path of a directory, or a configuration."""
    base = config.base
    if not isinstance(base, Path):
        return _random_config(base, vocabulary)
    if not (base / "config.json").is_file():
        raise ConfigError(f"model_name_or_path: {base} is no directory with a config.json")
    return base


def _has_config(checkpoint: Path, base: Any) -> bool:
    """Whether a model that is built from `checkpoint` is the one that the run would build."""
    if not (checkpoint / "config.json").is_file():
        return False
    wanted = base if isinstance(base, PreTrainedConfig) else AutoConfig.from_pretrained(base)
    saved = AutoConfig.from_pretrained(checkpoint)
    asked, found = (each._attn_implementation for each in (wanted, saved))
    return asked == found and _fields_of(wanted) == _fields_of(saved)


def _fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that make a model, as a file has them."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {k: v for k, v in fields.items() if k not in (*_OF_THE_HEAD, *_OF_THE_FILE)}


def _adapt(
    config: TrainerConfig, sizes: MeshSizes, role: Role
) -> Callable[[nn.Module], None] | None:
    """What is done with the whole model before it is cut; a frozen base gets no adapters."""
    settings = config.lora if role is Role.TRAINED else None
    put = None if settings is None else adapter(settings, sizes, config.seed)
    asked = config.reset_sinks or config.sinks is not None
    if put is None and not asked:
        return None

    def adapt(model: nn.Module) -> None:
        if put is not None:
            put(model)
        if asked:
            prepare_sinks(model, policy_of(config))

    return adapt


def _device() -> torch.device:
    """A GPU of this machine for each of its ranks, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _random_config(fields: dict[str, Any], vocabulary: int) -> Any:
    fields = {"vocab_size": vocabulary, **fields}
    if fields["vocab_size"] < vocabulary:
        raise ConfigError(
            f"model_config.vocab_size: {fields['vocab_size']} is less than the {vocabulary} tokens "
            "of the byte-level tokenizer; leave it out, or make it larger"
        )
    model_type = fields.pop("model_type")
    try:
        default = AutoConfig.for_model(model_type)
        known = {*default.to_dict(), *default.attribute_map, "attn_implementation"}
        for name in fields.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:  # others may be known to the model alone, such as head_dim of qwen3_moe
                raise ConfigError(
                    f"model_config: {model_type} has no field {name!r}; did you mean {near[0]}?"
                )
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model_config: {error}") from error
