"""Every mode of parallelism, a small model of a family on it, and the same run in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from milepost_trainer.parallel import MeshSizes, ParallelModel, PipelineSchedule, build

VOCABULARY, ROWS, LENGTH = 64, 16, 8
DROPOUT = 0.2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def config_of(family: str) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**_COMMON, intermediate_size=48)
    if family == "llama-tied":
        return LlamaConfig(**{**_COMMON, "tie_word_embeddings": True}, intermediate_size=48)
    if family == "qwen3-moe":
        return Qwen3MoeConfig(
            **_COMMON,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=2,
        )
    if family == "mixtral":
        return MixtralConfig(
            **_COMMON, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2
        )
    assert family == "gpt-oss", family
    return GptOssConfig(
        **_COMMON,
        intermediate_size=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        attn_implementation="eager",
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """A family on a mesh; `name` is what the tests are called."""

    name: str
    family: str
    sizes: MeshSizes
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B

    def __str__(self) -> str:
        return f"{self.name}-{self.family}"


def mode(
    name: str,
    family: str = "llama",
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    **sizes: int,
) -> Mode:
    return Mode(name, family, MeshSizes(**sizes), schedule)


GPIPE, INTERLEAVED = PipelineSchedule.GPIPE, PipelineSchedule.INTERLEAVED
MOE = "qwen3-moe"

DENSE_MODES = [
    mode("DDP", dp_replicate=2),
    mode("FSDP2", dp_shard=4),
    mode("HSDP", dp_replicate=2, dp_shard=2),
    mode("TP", tp=2),
    mode("FSDP2+TP", dp_shard=2, tp=2),
    mode("HSDP+TP", dp_replicate=2, dp_shard=2, tp=2),
    mode("DDP+TP", dp_replicate=2, tp=2),
    mode("CP", cp=2),
    mode("FSDP2+CP", dp_shard=2, cp=2),
    mode("HSDP+CP", dp_replicate=2, dp_shard=2, cp=2),
    mode("TP+CP", cp=2, tp=2),
    mode("PP-gpipe", schedule=GPIPE, pp=2),
    mode("PP-1f1b", pp=4),
    mode("PP-interleaved", schedule=INTERLEAVED, pp=2),
    mode("PP+FSDP2", pp=2, dp_shard=2),
    mode("PP+TP", pp=2, tp=2),
    mode("PP+CP", pp=2, cp=2),
    mode("PP+FSDP2+TP", pp=2, dp_shard=2, tp=2),
]
TIED_MODES = [
    mode("FSDP2", "llama-tied", dp_shard=2),
    mode("FSDP2+TP", "llama-tied", dp_shard=2, tp=2),
    mode("PP", "llama-tied", pp=2),
    mode("PP+FSDP2", "llama-tied", pp=2, dp_shard=2),
]
EXPERT_MODES = [
    mode("EP", MOE, dp_shard=2, ep=2),
    mode("EP+FSDP2", MOE, dp_shard=4, ep=2),
    mode("EP+TP", MOE, dp_shard=2, tp=2, ep=4),
    mode("EP=TP", MOE, tp=2, ep=2),
    mode("EP+CP", MOE, cp=2, ep=2),
    mode("EP-groups", MOE, dp_shard=8, ep=2),
    mode("ETP", MOE, dp_shard=2, etp=2),
    mode("ETP+TP", MOE, tp=2, etp=2),
    mode("EP+ETP", MOE, dp_shard=4, ep=2, etp=2),
    mode("EP+ETP+FSDP2", MOE, dp_shard=8, ep=2, etp=2),
    mode("HSDP+EP+CP", MOE, dp_replicate=2, cp=2, ep=2),
    mode("HSDP+EP", MOE, dp_replicate=2, dp_shard=2, ep=2),
    mode("FSDP2+TP", MOE, dp_shard=2, tp=2),
    mode("PP+EP", MOE, pp=2, dp_shard=2, ep=2),
    mode("PP+TP", MOE, pp=2, tp=2),
    mode("PP+EP+ETP", MOE, pp=2, dp_shard=4, ep=2, etp=2),
    mode("PP-interleaved+EP", MOE, schedule=INTERLEAVED, pp=2, dp_shard=2, ep=2),
]
MIXTRAL_MODES = [
    mode("EP+FSDP2", "mixtral", dp_shard=4, ep=2),
    mode("TP", "mixtral", tp=2),
    mode("ETP", "mixtral", dp_shard=2, etp=2),
    mode("PP+EP", "mixtral", pp=2, dp_shard=2, ep=2),
]
GPT_OSS_MODES = [
    mode("FSDP2", "gpt-oss", dp_shard=2),
    mode("EP", "gpt-oss", dp_shard=2, ep=2),
    mode("EP+FSDP2", "gpt-oss", dp_shard=4, ep=2),
    mode("CP", "gpt-oss", cp=2),
    mode("FSDP2+CP", "gpt-oss", dp_shard=2, cp=2),
    mode("EP+CP", "gpt-oss", cp=2, ep=2),
    mode("ETP", "gpt-oss", dp_shard=2, etp=2),
    mode("EP+ETP", "gpt-oss", dp_shard=4, ep=2, etp=2),
    mode("ETP+FSDP2", "gpt-oss", dp_shard=4, etp=2),
    mode("ETP+CP", "gpt-oss", cp=2, etp=2),
    mode("PP+EP", "gpt-oss", pp=2, dp_shard=2, ep=2),
    mode("PP+CP", "gpt-oss", pp=2, cp=2),
]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step, rows that count on from anywhere; some tokens have no label."""
    generator = torch.Generator().manual_seed(step)
    begin = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    tokens = (begin + torch.arange(LENGTH)) % VOCABULARY
    labels = tokens.clone()
    labels[:, : 1 + step % 3] = -100
    return {"input_ids": tokens, "labels": labels}


@dataclass(slots=True)
class Batches:
    """The slice of each global batch that a data rank reads, and how far it has come."""

    rank: int
    world: int
    step: int = 0

    def next(self) -> dict[str, torch.Tensor]:
        self.step += 1
        return self.slice_of(self.step)

    def slice_of(self, step: int) -> dict[str, torch.Tensor]:
        rows = slice(self.rank * ROWS // self.world, (self.rank + 1) * ROWS // self.world)
        return {name: tensor[rows] for name, tensor in batch_of(step).items()}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@dataclass(slots=True)
class Training:
    """A model on a mesh in training, and all that a resume must bring back."""

    held: ParallelModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    norms: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.held.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.batches,
        }

    def steps(self, count: int) -> list[float]:
        return [self.one_step() for _ in range(count)]

    def one_step(self) -> float:
        loss = self.held.train_step(self.batches.next())
        self.norms.append(self.held.clip_grad_norm_(0.5))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def set_dropout(self, probability: float) -> None:
        for module in self.held.modules:
            for part in module.modules():
                if hasattr(part, "attention_dropout"):
                    part.attention_dropout = probability  # type: ignore[assignment]

    def values(self) -> dict[str, torch.Tensor]:
        """Every weight and moment that this rank has a part of, whole, by torch's own gather."""
        found = {}
        for name, param in self.held.named_parameters():
            found[name] = whole(param)
            for slot, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}.{slot}"] = whole(value)
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global values of a tensor that every rank of its mesh calls this for."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh, local = tensor.device_mesh, tensor.to_local()
    if mesh.mesh_dim_names == ("efsdp", "ep", "etp"):
        # Torch cannot gather what is cut three times: the FSDP shards first, then the rest.
        pieces = [torch.empty_like(local) for _ in range(mesh["efsdp"].size())]
        dist.all_gather(pieces, local.contiguous(), group=mesh["efsdp"].get_group())
        tensor = DTensor.from_local(
            torch.cat(pieces), mesh["ep", "etp"], tensor.placements[1:], run_check=False
        )
    return tensor.full_tensor().detach().clone()


def start(held: Mode, *, seed: int = 0) -> Training:
    built = build(config_of(held.family), held.sizes, seed=seed, schedule=held.schedule)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    batches = Batches(built.data_rank, built.data_world)
    return Training(built, optimizer, scheduler, batches)


def alone(family: str) -> Mode:
    return Mode("one", family, MeshSizes())
