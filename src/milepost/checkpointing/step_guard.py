"""Holding an optimizer's step back until what it is about to change has been copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from milepost.errors import InvalidInputError


class _Guard:
    """The hook of one optimizer, made once; idle while nothing is being staged."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        while self.waiting:
            self.waiting.pop()()


_guards: WeakKeyDictionary[Optimizer, _Guard] = WeakKeyDictionary()


def guarded_storages(optimizers: Iterable[Optimizer]) -> set[int]:
    """Addresses of the memory that only a step of these optimizers changes.

    `InvalidInputError` for an optimizer that steps in the middle of a backward pass: its parameters
    may change before anybody can be asked to wait.
    """
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if getattr(param, "_post_accumulate_grad_hooks", None):
                    raise InvalidInputError(
                        "Overlap.UNTIL_STEP: a parameter has a hook that runs in the backward "
                        "pass (an optimizer-in-backward); use Overlap.NONE, which copies before "
                        "the call returns"
                    )
                found.update(_storages(param))
        for slots in optimizer.state.values():
            for value in slots.values():
                if isinstance(value, Tensor):
                    found.update(_storages(value))
    return found


def frozen_beside(models: Iterable[object], guarded: Collection[int]) -> set[int]:
    """Addresses of the memory of frozen parameters in those models of which the optimizers of
    `guarded` train something."""
    found: set[int] = set()
    for model in models:
        for module in model if isinstance(model, (list, tuple)) else [model]:
            if not isinstance(module, nn.Module):
                continue
            own = [(param, set(_storages(param))) for param in module.parameters()]
            if any(memory.intersection(guarded) for _, memory in own):
                found.update(*(memory for param, memory in own if not param.requires_grad))
    return found


def storage_of(tensor: Tensor) -> int:
    """The address of a plain tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _storages(tensor: Tensor) -> list[int]:
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        address = storage_of(local)
    except (NotImplementedError, RuntimeError):  # a wrapper around several tensors: copied at once
        return []
    return [address] if address else []  # an empty shard, and what is computed, have no memory


def hold_steps(optimizers: Iterable[Optimizer], hold: Callable[[], None]) -> None:
    """Call `hold` before the next step of each optimizer; each of them waits."""
    for optimizer in optimizers:
        guard = _guards.get(optimizer)
        if guard is None:
            guard = _guards[optimizer] = _Guard()
            optimizer.register_step_pre_hook(guard)
        guard.waiting.append(hold)
