"""Every parallelism that torch and transformers offer, behind one `build` and one `train_step`."""

from milepost_trainer.parallel.build import build
from milepost_trainer.parallel.model import ParallelModel
from milepost_trainer.parallel.sizes import MeshSizes, PipelineSchedule

__all__ = ["MeshSizes", "ParallelModel", "PipelineSchedule", "build"]
