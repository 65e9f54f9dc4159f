"""Router balancing: a bias for each expert, added to its score when experts are chosen.

After each step an expert that got more tokens than the mean has its bias lowered, one that got
fewer has it raised, as in DeepSeek-V3. The bias decides who is chosen, never how much it counts.
Families with a slot for it (`e_score_correction_bias`) keep it there too (`bias_update`); for
others it lives beside the model (`bias_update_transient`), and the sidecar has the only copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import milepost as mp
from milepost_trainer.config import ConfigError

SIDECAR = "router_balancing_biases.pt"
SLOT = "e_score_correction_bias"
SOFTMAX_ROUTERS = (
    *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "MixtralTopKRouter"),
    "GptOssTopKRouter",
)
logger = logging.getLogger(__name__)


class RouterBalancing:
    """The biases of all routers of the model, by module name, the same on every rank.

    Collective: every rank makes it, and calls `update` after each step.
    """

    def __init__(self, mode: str, rate: float, modules: Iterable[nn.Module]) -> None:
        self.mode, self.rate = mode, rate
        self._own = {name: router for module in modules for name, router in _routers(module)}
        self.biases = self._begin()
        if not self.biases:
            raise ConfigError(f"moe_balancing: {mode}: the model has no routers to balance")
        self.loads = {
            name: torch.zeros(len(self.biases[name]), dtype=torch.int64) for name in self._own
        }
        for name, router in self._own.items():
            _check_family(mode, name, router)
            router.register_forward_hook(self._hook(name), prepend=True)

    def _begin(self) -> dict[str, torch.Tensor]:
        """What the slots hold, zeros where there is none, of the routers of all ranks."""
        own = {
            name: getattr(router, SLOT, torch.zeros(router.weight.shape[0])).detach().cpu().clone()
            for name, router in self._own.items()
        }
        return dict(sorted(_merged(own).items()))

    def _hook(self, name: str) -> Any:
        def chosen(router: Any, _: Any, output: Any) -> Any:
            if self.mode == "bias_update_transient":
                output = _chosen_with_bias(router, output, self.biases[name])
            if router.training and torch.is_grad_enabled():
                experts = output[-1].detach().flatten().cpu()
                self.loads[name] += torch.bincount(experts, minlength=len(self.loads[name]))
            return output

        return chosen

    def update(self) -> None:
        """Move the biases by what was chosen since the last call, on all ranks together."""
        counts = torch.cat(
            [
                self.loads.get(name, torch.zeros(len(bias), dtype=torch.int64))
                for name, bias in self.biases.items()
            ]
        )
        if dist.is_initialized():
            dist.all_reduce(counts)
        every = torch.split(counts, [len(bias) for bias in self.biases.values()])
        for (name, bias), load in zip(self.biases.items(), every, strict=True):
            bias += self.rate * torch.sign(load.double().mean() - load).float()
            if name in self.loads:
                self.loads[name].zero_()
        self._fill_slots()

    def sidecar(self) -> Mapping[str, torch.Tensor]:
        """What is saved beside the weights: router module name to bias."""
        return self.biases

    def restore(self, checkpoint: Path) -> None:
        """Take the biases of a checkpoint. `ConfigError` when one has another shape."""
        path = checkpoint / SIDECAR
        if not path.is_file():
            logger.warning("%s is not there: router biases are those of the model, or zero", path)
            self.biases = self._begin()
            return
        saved = mp.Checkpoint.open(path).read_weights()
        for name, bias in self.biases.items():
            if name not in saved:
                logger.warning("%s has no bias for %s, which stays as it is", path, name)
            elif saved[name].shape != bias.shape:
                raise ConfigError(
                    f"{path}: {name}: a bias of {tuple(saved[name].shape)}, the router has "
                    f"{tuple(bias.shape)}"
                )
            else:
                bias.copy_(saved[name])
        for name in saved.keys() - self.biases.keys():
            logger.warning("%s: no router of the model is called %s", path, name)
        self._fill_slots()

    def _fill_slots(self) -> None:
        if self.mode == "bias_update":
            for name, router in self._own.items():
                getattr(router, SLOT).copy_(self.biases[name])


def _chosen_with_bias(router: Any, output: Any, bias: torch.Tensor) -> Any:
    """The router's output, with experts chosen by biased probability and weighted without it."""
    logits = output[0]
    scores = torch.softmax(logits.float(), dim=-1)
    experts = torch.topk(scores + bias.to(scores.device), router.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(output[1].dtype), experts


def _routers(model: nn.Module) -> Iterable[tuple[str, Any]]:
    for name, module in model.named_modules():
        known = hasattr(module, SLOT) or type(module).__name__ in SOFTMAX_ROUTERS
        if known and hasattr(module, "top_k"):
            yield name.removeprefix("module."), module  # of DDP


def _check_family(mode: str, name: str, router: nn.Module) -> None:
    has_slot = hasattr(router, SLOT)
    if mode == "bias_update" and not has_slot:
        raise ConfigError(
            f"moe_balancing: bias_update keeps the bias in {SLOT}, which {name} "
            f"({type(router).__name__}) does not have; use bias_update_transient"
        )
    if mode == "bias_update_transient" and has_slot:
        raise ConfigError(
            f"moe_balancing: bias_update_transient is for routers without {SLOT}, which {name} "
            f"({type(router).__name__}) has; use bias_update"
        )


def _merged(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries of all ranks; pipeline stages have different routers."""
    if not dist.is_initialized():
        return own
    every: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    return {name: bias for each in every for name, bias in each.items()}
