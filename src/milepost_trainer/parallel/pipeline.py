"""Pipeline parallelism: torch's schedules over the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from milepost_trainer.parallel.collectives import local
from milepost_trainer.parallel.sizes import PipelineSchedule
from milepost_trainer.parallel.stages import STAGES_PER_RANK_INTERLEAVED

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stages_of_rank(place: int, ranks: int, schedule: PipelineSchedule) -> tuple[list[int], int]:
    """The stages that pipeline rank `place` holds, and how many there are in all."""
    per_rank = STAGES_PER_RANK_INTERLEAVED if schedule is PipelineSchedule.INTERLEAVED else 1
    return [place + ranks * turn for turn in range(per_rank)], ranks * per_rank


class Pipeline:
    """Runs batches through all stages of the pipeline; every call is collective over it."""

    def __init__(
        self,
        modules: list[Any],
        stages: list[int],
        count: int,
        mesh: DeviceMesh,
        schedule: PipelineSchedule,
        microbatches: int,
    ) -> None:
        self.modules, self.stages, self.count = modules, stages, count
        self.mesh, self.schedule, self.microbatches = mesh, schedule, microbatches
        self.first, self.last = stages[0] == 0, stages[-1] == count - 1
        self._runs: dict[torch.Size, Any] = {}
        self._loss: Loss | None = None

    def train(self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> list[torch.Tensor]:
        """Forward and backward; the loss of each microbatch, on the last stage's rank only."""
        return self._run(inputs, targets, loss, "step")

    def evaluate(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss
    ) -> list[torch.Tensor]:
        """Forward only; otherwise as `train`."""
        with torch.no_grad():
            return self._run(inputs, targets, loss, "eval")

    def _run(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss, method: str
    ) -> list[torch.Tensor]:
        self._loss = loss
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first else ()
        keywords = {"target": targets, "losses": losses} if self.last else {}
        getattr(self._schedule_of(inputs.shape), method)(*arguments, **keywords)
        return losses

    def _schedule_of(self, shape: torch.Size) -> Any:
        """The schedule for batches `(rows, length)`.

        Shapes are stated, because torch would find them out by running the stages once, which
        draws random numbers that a resumed run has already drawn.
        """
        if shape in self._runs:
            return self._runs[shape]
        rows, length = shape
        if rows % self.microbatches:
            raise ValueError(
                f"{rows} rows of a batch cannot be cut evenly into {self.microbatches} microbatches"
            )
        micro = (rows // self.microbatches, length)
        stages: list[Any] = [
            self._stage(module, stage, micro)
            for module, stage in zip(self.modules, self.stages, strict=True)
        ]
        keywords: dict[str, Any] = {
            "n_microbatches": self.microbatches,
            "loss_fn": self._loss_of,
            "scale_grads": False,
        }
        run: Any
        if self.schedule is PipelineSchedule.INTERLEAVED:
            run = ScheduleInterleaved1F1B(stages, **keywords)
        elif self.schedule is PipelineSchedule.GPIPE:
            run = ScheduleGPipe(stages[0], **keywords)
        else:
            run = Schedule1F1B(stages[0], **keywords)
        self._runs[shape] = run
        return run

    def _stage(self, module: Any, stage: int, micro: tuple[int, int]) -> PipelineStage:
        config = module.config
        hidden = torch.empty(*micro, config.hidden_size, dtype=module.dtype, device="meta")
        first, last = stage == 0, stage == self.count - 1
        logits = torch.empty(*micro, config.vocab_size, dtype=module.dtype, device="meta")
        return PipelineStage(
            module,
            stage,
            self.count,
            next(module.parameters()).device,
            input_args=torch.empty(micro, dtype=torch.long, device="meta")
            if first
            else hidden.requires_grad_(),
            output_args=logits if last else hidden.detach().requires_grad_(),
            group=self.mesh.get_group(),
        )

    def _loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(logits, targets)


def share_tied_gradients(module: Any, group: Any) -> None:
    """Adds up the gradients of an embedding that lies with the first and with the last stage."""
    gradient = module.model.embed_tokens.weight.grad
    dist.all_reduce(local(gradient), group=group)
