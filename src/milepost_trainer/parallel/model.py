"""A model on a mesh, and one training step on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from milepost_trainer.parallel import gradients
from milepost_trainer.parallel.meshes import Meshes
from milepost_trainer.parallel.pipeline import Pipeline, share_tied_gradients
from milepost_trainer.parallel.sizes import MeshSizes
from milepost_trainer.parallel.ulysses import slice_of_sequence

IGNORED = -100
_SEED_STRIDE = 1_000_003


class ParallelModel:
    """What `build` returns: the part of a model that this rank holds, ready to train.

    A batch is a dict of tensors `(rows, length)`: `input_ids`, and `labels` as transformers takes
    them (not shifted; -100 where there is no loss). Attention is causal over the row: pad on the
    right. Ranks with the same `data_rank` must pass the same batch: context-, tensor- and
    pipeline-parallel ranks take their share of it themselves.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        sizes: MeshSizes,
        *,
        meshes: Meshes | None = None,
        pipeline: Pipeline | None = None,
        tied_group: Any = None,
    ) -> None:
        self.modules = modules
        self.sizes = sizes
        self.meshes = meshes
        self._pipeline, self._tied_group = pipeline, tied_group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.data_rank = sizes.data_rank(self.rank)
        self.data_world = sizes.data_world
        self.is_last_stage = pipeline is None or pipeline.last

    @property
    def model(self) -> nn.Module | list[nn.Module]:
        """For Milepost's state under "model": a module, or this rank's stages in order."""
        return self.modules[0] if len(self.modules) == 1 else self.modules

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under their names in the whole model, each once."""
        for module in self.modules:
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            yield from inner.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank, each once, in the order of `named_parameters`."""
        return (param for _, param in self.named_parameters())

    def seed_random(self, seed: int) -> None:
        """Seeds torch so that dropout differs between ranks that hold different activations.

        `build` has called it. Ranks of one tensor-parallel group draw the same numbers, because
        what is not cut between them must stay equal.
        """
        torch.manual_seed(seed * _SEED_STRIDE + self.rank // self.sizes.tp + 1)

    def train_step(self, batch: dict[str, torch.Tensor]) -> float:
        """Forward and backward of this rank's batch of one optimizer step; a collective call.

        Gradients are added up over all ranks, for the mean loss over all tokens of the global
        batch that have a label. Returns that mean, the same on every rank.
        """
        loss = self._loss_of(batch, self._train)
        if self._tied_group is not None:
            share_tied_gradients(self.modules[-1 if self.is_last_stage else 0], self._tied_group)
        return loss

    def evaluate(self, batch: dict[str, torch.Tensor]) -> float:
        """The mean loss of a batch, without dropout and gradients; otherwise as `train_step`."""
        self._train_mode(False)
        try:
            return self._loss_of(batch, self._evaluate)
        finally:
            self._train_mode(True)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Collective. Returns the norm before, the same on every rank.
        """
        ranks = self.sizes.world_size // self.sizes.pp
        counted = list(self.parameters())
        if self._tied_group is not None and self.is_last_stage:
            tied = self.modules[-1].model.embed_tokens.weight  # type: ignore[union-attr]
            counted = [param for param in counted if param is not tied]
        square = gradients.local_square_sum(counted, ranks)
        norm = gradients.global_norm(square, self.device)
        if norm > max_norm:
            gradients.scale(self.parameters(), max_norm / (norm + 1e-6))
        return norm

    def _loss_of(
        self,
        batch: dict[str, torch.Tensor],
        run: Callable[[torch.Tensor, torch.Tensor, float], list[torch.Tensor]],
    ) -> float:
        inputs, targets = self._share(batch)
        # Every label is seen by the tensor- and pipeline-parallel ranks of its slice.
        seen_by = self.sizes.tp * self.sizes.pp
        tokens = max(self._sum(float((targets != IGNORED).sum())) / seen_by, 1.0)
        losses = run(inputs, targets, tokens)
        part = sum(float(loss.detach()) for loss in losses) if self.is_last_stage else 0.0
        copies = self.sizes.tp * self._averaged_over
        return self._sum(part) / copies

    @property
    def _averaged_over(self) -> int:
        """Ranks over which FSDP2 and DDP average gradients that should be added up."""
        return self.sizes.data_world * self.sizes.cp

    def _share(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and next-token targets of the columns that this rank holds."""
        inputs, labels = (batch[key].to(self.device) for key in ("input_ids", "labels"))
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if self.sizes.cp > 1:
            place = self.sizes.coordinates(self.rank)["cp"]
            inputs = slice_of_sequence(inputs, self.sizes.cp, place)
            targets = slice_of_sequence(targets, self.sizes.cp, place)
            for module in self.modules:
                module.position_offset = place * inputs.shape[1]  # type: ignore[assignment]
        return inputs, targets

    def _train(
        self, inputs: torch.Tensor, targets: torch.Tensor, tokens: float
    ) -> list[torch.Tensor]:
        loss = self._scaled_loss(tokens)
        if self._pipeline is not None:
            return self._pipeline.train(inputs, targets, loss)
        value = loss(self._logits(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return [value]

    def _evaluate(
        self, inputs: torch.Tensor, targets: torch.Tensor, tokens: float
    ) -> list[torch.Tensor]:
        loss = self._scaled_loss(tokens)
        if self._pipeline is not None:
            return self._pipeline.evaluate(inputs, targets, loss)
        with torch.no_grad():
            return [loss(self._logits(inputs), targets)]

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        offset = getattr(self.modules[0], "position_offset", 0)
        positions = offset + torch.arange(inputs.shape[1], device=inputs.device)
        output = self.modules[0](input_ids=inputs, position_ids=positions[None], use_cache=False)
        return output.logits  # type: ignore[no-any-return]

    def _scaled_loss(self, tokens: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        factor = self._averaged_over / tokens

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            flat = logits.flatten(0, 1).float()
            summed = nn.functional.cross_entropy(
                flat, targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            return summed * factor

        return loss

    def _sum(self, value: float) -> float:
        """The sum over all ranks, in float64 and so the same on each."""
        if not dist.is_initialized():
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def _train_mode(self, on: bool) -> None:
        for module in self.modules:
            module.train(on)
