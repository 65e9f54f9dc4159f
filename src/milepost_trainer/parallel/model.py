"""A model on a mesh, and one training step on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from milepost_trainer.parallel import gradients
from milepost_trainer.parallel.collectives import gathered, summed
from milepost_trainer.parallel.meshes import Meshes
from milepost_trainer.parallel.pipeline import Pipeline, share_tied_gradients
from milepost_trainer.parallel.sizes import MeshSizes
from milepost_trainer.parallel.ulysses import slice_of_sequence

IGNORED = -100
_SEED_STRIDE = 1_000_003


class _Share(NamedTuple):
    """Token ids, next-token targets and positions, if these are not plain, of a rank's columns."""

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None


class ParallelModel:
    """What `build` returns: the part of a model that this rank holds, ready to train.

    A batch is a dict of tensors `(rows, length)`: `input_ids`, and `labels` as transformers takes
    them (not shifted; -100 where there is no loss). Attention is causal over the row: pad on the
    right. With `positions`, which begin anew where a text of a packed row does, it ends there too
    (not with context or pipeline parallelism). Ranks with the same `data_rank` must pass the same
    batch: context-, tensor- and pipeline-parallel ranks take their share of it themselves.
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
    def configs(self) -> list[Any]:
        """The transformers configuration of each module."""
        inner: list[Any] = [getattr(module, "module", module) for module in self.modules]  # of DDP
        return [module.config for module in inner]

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
        with self.evaluating():
            return self._loss_of(batch, self._evaluate)

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

    # ---- for losses of other kinds, without pipelines

    @property
    def averaged_over(self) -> int:
        """Ranks over which FSDP2 and DDP average gradients that should be added up."""
        return self.sizes.data_world * self.sizes.cp

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout and gradients."""
        modes = [module.training for module in self.modules]
        try:
            for module in self.modules:
                module.eval()
            with torch.no_grad():
                yield
        finally:
            for module, mode in zip(self.modules, modes, strict=True):
                module.train(mode)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank has of `(rows, length, ...)`, on its device."""
        tensor = tensor.to(self.device)
        if self.sizes.cp == 1:
            return tensor
        return slice_of_sequence(tensor, self.sizes.cp, self._context_place)

    def first_column(self, length: int) -> int:
        """Where this rank's columns of rows of `length` begin."""
        return self._context_place * (length // self.sizes.cp)

    def outputs(
        self,
        inputs: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the model's head gives for this rank's columns of token ids, `(rows, columns)`.

        `attention_mask` `(rows, length)` is for models that read in both directions, which have to
        be told what is padding; such models number their positions themselves. `positions`
        `(rows, length)` are those of packed rows.
        """
        if positions is None:
            columns = inputs.shape[1]
            numbers = torch.arange(columns, device=inputs.device)
            positions = (numbers + self._context_place * columns)[None]
        given: dict[str, Any] = {"position_ids": positions}
        if attention_mask is not None:
            given = {"attention_mask": attention_mask.to(inputs.device)}
        output: torch.Tensor = self.modules[0](input_ids=inputs, use_cache=False, **given)[0]
        return output

    def sum_over_context(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share rows; gradients reach each rank's part. Collective."""
        if self.sizes.cp == 1:
            return part
        assert self.meshes is not None
        return summed(part, self.meshes.dense["cp"].get_group())

    def rows_of_all(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all data ranks in order, as many from each; gradients flow. Collective."""
        return rows if self.data_world == 1 else gathered(rows, self._data_group)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Float64 sums over the data ranks of values that the ranks of one share. Collective."""
        total = values.detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total / (self.sizes.tp * self.sizes.cp)

    @cached_property
    def _data_group(self) -> Any:
        """The ranks that differ from this one in their rows only; all ranks make all groups."""
        columns: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.sizes.world_size):
            place = self.sizes.coordinates(rank)
            columns.setdefault((place["pp"], place["cp"], place["tp"]), []).append(rank)
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in columns.values()}
        return next(group for ranks, group in groups.items() if self.rank in ranks)

    @property
    def _context_place(self) -> int:
        return self.sizes.coordinates(self.rank)["cp"]

    # ---- the loss of a language model

    def _loss_of(
        self,
        batch: dict[str, torch.Tensor],
        run: Callable[[_Share, float], list[torch.Tensor]],
    ) -> float:
        share = self._share(batch)
        # Every label is seen by the tensor- and pipeline-parallel ranks of its slice.
        seen_by = self.sizes.tp * self.sizes.pp
        tokens = max(self._sum(float((share.targets != IGNORED).sum())) / seen_by, 1.0)
        losses = run(share, tokens)
        part = sum(float(loss.detach()) for loss in losses) if self.is_last_stage else 0.0
        copies = self.sizes.tp * self.averaged_over
        return self._sum(part) / copies

    def _share(self, batch: dict[str, torch.Tensor]) -> _Share:
        """The columns that this rank holds."""
        inputs = self.columns(batch["input_ids"])
        targets = self.columns(next_tokens(batch["labels"]))
        if self._pipeline is not None:
            for module in self.modules:
                module.position_offset = self._context_place * inputs.shape[1]  # type: ignore[assignment]
        positions = batch.get("positions")
        if positions is not None:
            positions = positions.to(self.device)
        return _Share(inputs, targets, positions)

    def _train(self, share: _Share, tokens: float) -> list[torch.Tensor]:
        loss = self._scaled_loss(tokens)
        if self._pipeline is not None:
            return self._pipeline.train(share.inputs, share.targets, loss)
        value = loss(self.outputs(share.inputs, positions=share.positions), share.targets)
        value.backward()  # type: ignore[no-untyped-call]
        return [value]

    def _evaluate(self, share: _Share, tokens: float) -> list[torch.Tensor]:
        loss = self._scaled_loss(tokens)
        if self._pipeline is not None:
            return self._pipeline.evaluate(share.inputs, share.targets, loss)
        with torch.no_grad():
            return [loss(self.outputs(share.inputs, positions=share.positions), share.targets)]

    def _scaled_loss(self, tokens: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        factor = self.averaged_over / tokens

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


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """What each column of `(rows, length)` predicts: the label of the next one."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
