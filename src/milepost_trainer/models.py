"""The model of a run on its mesh, from what the YAML says."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

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


def build_model(
    config: TrainerConfig,
    vocabulary: int,
    *,
    head: Head = Head.LANGUAGE_MODEL,
    role: Role = Role.TRAINED,
) -> ParallelModel:
    """The model on its mesh, from a directory or with random weights. Collective."""
    source: Any = config.base
    if isinstance(source, Path):
        if not (source / "config.json").is_file():
            raise ConfigError(f"model_name_or_path: {source} is no directory with a config.json")
    else:
        source = _random_config(source, vocabulary)
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
            source,
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
            for module in model.modules:
                inner: Any = getattr(module, "module", module)  # of DDP
                inner.set_experts_implementation(kernel)
        return model
    except ValueError as error:
        raise ConfigError(str(error)) from error


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
