"""Builds a model on a mesh: by transformers' `DistributedConfig` where that covers the mesh, and
from torch's and our own pieces where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig

from milepost_trainer.parallel import ulysses
from milepost_trainer.parallel.dora import dequantize_for_norms
from milepost_trainer.parallel.experts import apply_expert_parallel, expert_modules
from milepost_trainer.parallel.heads import Head, Role, layers_of, load_whole, whole_model
from milepost_trainer.parallel.meshes import Meshes, make_meshes
from milepost_trainer.parallel.model import ParallelModel
from milepost_trainer.parallel.pipeline import Pipeline, stages_of_rank
from milepost_trainer.parallel.quantized import lay_out_quantized, use_kernels_of_training
from milepost_trainer.parallel.sizes import MeshSizes, PipelineSchedule
from milepost_trainer.parallel.stages import cut_stage
from milepost_trainer.parallel.tensor import apply_tensor_parallel

Source: TypeAlias = Any
"""A transformers configuration, or the path of a Hugging Face directory."""


def build(
    source: Source,
    sizes: MeshSizes,
    *,
    seed: int = 0,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    microbatches: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    attention: str | None = None,
    head: Head = Head.LANGUAGE_MODEL,
    labels: int = 1,
    role: Role = Role.TRAINED,
    adapt: Callable[[nn.Module], None] | None = None,
    quantization: dict[str, Any] | None = None,
) -> ParallelModel:
    """A model on the mesh `sizes`; every rank calls it with the same arguments.

    `source` is a transformers configuration (values drawn from `seed`, the same on any mesh) or the
    path of a Hugging Face directory. `microbatches` (only with pp > 1) must divide the rows of a
    rank's batch; the default is two for each pipeline rank. `attention` is transformers'
    `attn_implementation`; `labels` are those of a classifier. A `FROZEN` model has no gradients and
    no dropout. `adapt` is called with the whole model before it is cut, to put adapters on it.
    `quantization` has the keywords of `from_pretrained` for weights kept in a few bits. Needs the
    default process group unless `sizes` is one process. Raises `ValueError` when model and mesh do
    not fit.
    """
    sizes.check_world(dist.get_world_size() if dist.is_initialized() else 1)
    device = device or torch.device("cpu")
    if sizes.cp > 1:
        attention = ulysses.NAME
    native = (
        head is Head.LANGUAGE_MODEL
        and adapt is None
        and quantization is None
        and _native(source, sizes)
    )
    model: Any
    if native:
        model = _distributed(source, sizes, seed, dtype, device, attention)
    else:
        model = whole_model(source, head, seed, dtype, attention, quantization, labels)
        if quantization is None:
            model.to(device)
        else:  # it lies where its keywords say
            use_kernels_of_training(model)
    if adapt is not None:
        adapt(model)
    model.train(role is Role.TRAINED)
    if role is Role.FROZEN:
        model.requires_grad_(False)
    if not native and sizes.ep * sizes.etp > 1 and not any(True for _ in expert_modules(model)):
        raise ValueError(f"{type(model).__name__} has no fused experts: use ep=1 and etp=1")
    if quantization is not None:
        if sizes.world_size > sizes.dp_replicate:
            lay_out_quantized(model)
        dequantize_for_norms(model)
    if native or sizes.world_size == 1:
        built = ParallelModel([model], sizes)
    elif sizes.world_size == sizes.dp_replicate:
        alone = model if role is Role.FROZEN else DistributedDataParallel(model)
        built = ParallelModel([alone], sizes)
    else:
        count = microbatches or 2 * sizes.pp
        built = _from_pieces(model, sizes, make_meshes(sizes, device.type), schedule, count)
    built.seed_random(seed)
    return built


def _native(source: Source, sizes: MeshSizes) -> bool:
    """Whether transformers does all of it: FSDP2, HSDP, TP, EP and their pairs.

    Models with tied embeddings are built from pieces, which shard the pair once and keep it tied.
    """
    if sizes.pp * sizes.cp * sizes.etp > 1 or sizes.dp_shard * sizes.tp == 1:
        return False
    config = source
    if not isinstance(source, PreTrainedConfig):
        config = AutoConfig.from_pretrained(source)
    return not config.tie_word_embeddings and (sizes.ep == 1 or sizes.ep % sizes.tp == 0)


def _distributed(
    source: Source,
    sizes: MeshSizes,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
) -> Any:
    """The model by `DistributedConfig`; from a path, each rank reads only its own shards."""
    settings = DistributedConfig(
        dp_replicate_size=sizes.dp_replicate,
        fsdp_size=sizes.dp_shard,
        tp_size=sizes.tp,
        ep_size=sizes.ep,
    )
    if not isinstance(source, PreTrainedConfig):
        return load_whole(
            AutoModelForCausalLM,
            source,
            Head.LANGUAGE_MODEL,
            dtype=dtype,
            attn_implementation=attention,
            distributed_config=settings,
        )
    model = whole_model(source, Head.LANGUAGE_MODEL, seed, dtype, attention).to(device)
    settings, _, meshes = type(model).prepare_distribute_model(settings)
    return type(model).maybe_distribute_model(model, settings, meshes)


def _from_pieces(
    whole: Any, sizes: MeshSizes, meshes: Meshes, schedule: PipelineSchedule, microbatches: int
) -> ParallelModel:
    pp_mesh = meshes.dense["pp"]
    if sizes.pp == 1:
        return ParallelModel([_parallelize(whole, sizes, meshes)], sizes, meshes=meshes)
    stages, count = stages_of_rank(pp_mesh.get_local_rank(), sizes.pp, schedule)
    modules = [_parallelize(cut_stage(whole, stage, count), sizes, meshes) for stage in stages]
    pipeline = Pipeline(modules, stages, count, pp_mesh, schedule, microbatches)
    tied = _tied_group(sizes) if whole.config.tie_word_embeddings else None
    if not (pipeline.first or pipeline.last):
        tied = None
    return ParallelModel(modules, sizes, meshes=meshes, pipeline=pipeline, tied_group=tied)


def _parallelize(model: Any, sizes: MeshSizes, meshes: Meshes) -> nn.Module:
    """Cuts a model or a stage over every axis but the pipeline's; experts first, then the rest."""
    if sizes.cp > 1:
        ulysses.use_ulysses(model, meshes.dense["cp"].get_group(), tp=sizes.tp)
    if sizes.tp > 1:
        plan = dict(model.tp_plan or {})
        if not plan:
            raise ValueError(f"{type(model).__name__} has no tensor-parallel plan: use tp=1")
        if meshes.expert is not None:  # expert parallelism has the experts
            plan = {name: style for name, style in plan.items() if ".experts" not in name}
        apply_tensor_parallel(model, meshes.dense["tp"], plan)
    sharded = sizes.data_world * sizes.cp > 1
    if meshes.expert is not None:
        apply_expert_parallel(model, meshes.expert["ep", "etp"], meshes.dense["tp"])
        if sharded or sizes.efsdp > 1:
            for _, experts in expert_modules(model):
                _shard_experts(experts, sizes, meshes)
    if sharded:
        for layer in layers_of(model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=meshes.fully_shard)
        fully_shard(model, mesh=meshes.fully_shard)
    return model  # type: ignore[no-any-return]


def _shard_experts(experts: Any, sizes: MeshSizes, meshes: Meshes) -> None:
    """FSDP2 over the ranks with the same experts.

    An expert has seen the tokens of all ranks of its group, so its gradient is averaged over as
    many ranks as that of any other parameter, not over the few that share it. gloo sums only, so
    torch must divide by itself.
    """
    fully_shard(experts, mesh=meshes.fully_shard_experts)
    experts.set_gradient_divide_factor(float(sizes.data_world * sizes.cp))
    if sizes.efsdp > 1:
        experts.set_force_sum_reduction_for_comms(True)


def _tied_group(sizes: MeshSizes) -> Any:
    """The group of this rank that holds a tied pair, first and last stage; all ranks make all."""
    per_stage = sizes.world_size // sizes.pp
    mine = None
    for place in range(per_stage):
        ranks = [place, place + (sizes.pp - 1) * per_stage]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
