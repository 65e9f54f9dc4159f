"""Every parallelism that torch and transformers offer, behind one `build` and one `train_step`."""

from milepost_trainer.parallel.build import build
from milepost_trainer.parallel.heads import Head, Role
from milepost_trainer.parallel.model import ParallelModel, next_tokens
from milepost_trainer.parallel.sizes import MeshSizes, PipelineSchedule

__all__ = [
    "Head",
    "MeshSizes",
    "ParallelModel",
    "PipelineSchedule",
    "Role",
    "build",
    "next_tokens",
]
