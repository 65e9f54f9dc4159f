"""Buffers that no checkpoint holds, computed as the model itself computes them.

Two conventions give a module its buffers after it was built on the meta device: its own
`reset_parameters()`, as torch's deferred initialisation expects, and `_init_weights(module)` of the
transformers model around it, as `from_pretrained` uses. They are run on a twin of the module that
has memory for its buffers and none for its parameters, so nothing live is touched and no random
number of the run is drawn. Each is run twice over different garbage: what differs was not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from milepost.state.tensors import flat_bytes, same_bits

_GARBAGE = (0x5A, 0xA5)
Way = Callable[[nn.Module], Any]


def computed_buffers(
    module: nn.Module, around: Iterable[nn.Module], names: Iterable[str]
) -> dict[str, Tensor]:
    """Values on the CPU of those own buffers `names` of `module` that its init computes.

    `around` are the modules that contain it, the nearest first.
    """
    wanted = list(names)
    found: dict[str, Tensor] = {}
    for way in _ways(module, around):
        runs = [_run(way, module, garbage) for garbage in _GARBAGE]
        for name in wanted:
            first, second = (run.get(name) for run in runs)
            if first is None or second is None or name in found:
                continue
            if _fits(first, module._buffers[name]) and same_bits(first, second):
                found[name] = first.detach()
    return found


def _ways(module: nn.Module, around: Iterable[nn.Module]) -> Iterable[Way]:
    if callable(getattr(module, "reset_parameters", None)):
        yield _reset
    for outer in around:
        init: Any = getattr(outer, "_init_weights", None)
        if callable(init):
            yield init
            return


def _reset(twin: Any) -> None:
    twin.reset_parameters()


def _run(way: Way, module: nn.Module, garbage: int) -> dict[str, Tensor | None]:
    """The buffers of a twin of `module` after `way`; none when the module cannot do it so."""
    twin = _twin(module, garbage, {})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            way(twin)
    except Exception:  # noqa: BLE001 - the model's own code, which may want what a twin has not
        return {}
    return dict(twin._buffers)


def _twin(module: nn.Module, garbage: int, made: dict[int, nn.Module]) -> nn.Module:
    """A module of the same class and attributes with parameters on meta and garbage in buffers."""
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(type(module))
    made[id(module)] = twin
    twin.__dict__.update(vars(module))
    twin.__dict__["_parameters"] = {
        name: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        for name, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if buffer is None else _filled(buffer, garbage)
        for name, buffer in module._buffers.items()
    }
    twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    twin.__dict__["_modules"] = {
        name: None if child is None else _twin(child, garbage, made)
        for name, child in module._modules.items()
    }
    return twin


def _without_memory(param: Tensor) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _filled(buffer: Tensor, garbage: int) -> Tensor:
    made = torch.empty(buffer.shape, dtype=buffer.dtype)
    if made.numel():
        flat_bytes(made).fill_(garbage if made.dtype is not torch.bool else garbage & 1)
    return made


def _fits(value: Tensor, live: Tensor | None) -> bool:
    return (
        live is not None
        and value.device.type == "cpu"
        and (value.dtype, value.shape) == (live.dtype, live.shape)
    )
