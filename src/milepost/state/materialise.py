"""Models on the meta device: each tensor gets memory where it is placed, just before it is filled.

A tensor keeps its identity, so optimizers and tied modules go on to refer to it. A DTensor gets
memory for its local shard alone, on the device of its mesh. Buffers that no checkpoint holds are
computed by the model's own init (`milepost.state.rebuild`). All of it is planned first and refused,
by name, when something would be left without its values.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.state.declared import declaration
from milepost.state.mismatch import first_few
from milepost.state.names import FQN, Model, Place, places, roots
from milepost.state.rebuild import computed_buffers
from milepost.state.tensors import is_dtensor, local_of, same_bits


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer of `module` and the value that its init computes."""

    fqn: FQN
    module: nn.Module
    name: str
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Materialisation:
    """What gives a model memory; nothing has been done yet. `rebuilt` names the buffers."""

    model: Model
    device: torch.device
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[_Buffer] = field(default_factory=list)

    @property
    def rebuilt(self) -> tuple[FQN, ...]:
        return tuple(buffer.fqn for buffer in self.buffers)

    def run(self) -> None:
        """Give every tensor memory, without values, and every buffer its value."""
        with torch.no_grad():
            for tensor in self.tensors:
                _give_memory(tensor, self.device)
            for buffer in self.buffers:
                live = buffer.module._buffers[buffer.name]
                assert live is not None, f"{buffer.fqn} vanished between the phases"
                where = self.device if live.device.type == "meta" else live.device
                buffer.module._buffers[buffer.name] = buffer.value.to(where)
            if self.tensors:
                _tell_fsdp(self.model)


def plan_materialisation(
    model: Model, filled: set[int], *, device: torch.device | str | None = None
) -> Materialisation:
    """What `model` needs before a load fills the tensors whose `id` is in `filled`.

    Plain tensors on meta go to `device`, by default where the meshes of the model's DTensors are,
    else to torch's default device. `InvalidInputError` names every tensor that would stay on meta
    or without its values. The model is not touched.
    """
    where = _default_device(model) if device is None else torch.device(device)
    plan = Materialisation(model=model, device=where)
    unset: list[str] = []
    held: list[str] = []
    seen: set[int] = set()
    for place, around in _places_with_outer(model):
        for name, tensor in _on_meta(place.module):
            if id(tensor) not in filled:
                if name in place.module._parameters:
                    unset.append(place.canonical + name)
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                plan.tensors.append(tensor)
                if weakref.getweakrefs(tensor):
                    held.append(place.canonical + name)
        _plan_buffers(plan, place, around, filled, unset)
    _refuse(unset, held)
    _plan_emptied(plan)
    return plan


def _refuse(unset: Sequence[str], held: Sequence[str]) -> None:
    if unset:
        raise InvalidInputError(
            f"{len(unset)} tensors of the model are on the meta device and neither the checkpoint "
            f"nor the model's own init gives them values: {first_few(unset)}; build the model with "
            "them on a real device, or give their module a reset_parameters() that computes them"
        )
    if held:
        raise InvalidInputError(
            f"{len(held)} tensors on the meta device have weak references, so they cannot get "
            f"memory and stay the same objects: {first_few(held)}; load before the model is "
            "compiled or used"
        )


def _places_with_outer(model: Model) -> Iterator[tuple[Place, list[nn.Module]]]:
    """Every module with those around it, the nearest first and itself included."""
    for _, part in roots(model):
        trail: list[Place] = []
        for place in places(part):
            while trail and not place.canonical.startswith(trail[-1].canonical):
                trail.pop()
            trail.append(place)
            yield place, [outer.module for outer in reversed(trail)]


def _on_meta(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.device.type == "meta":
            yield name, tensor


def _plan_buffers(
    plan: Materialisation,
    place: Place,
    around: Sequence[nn.Module],
    filled: set[int],
    unset: list[str],
) -> None:
    """Compute the buffers of one module that are on meta and in no checkpoint."""
    module = place.module
    wanted = [n for n, t in _on_meta(module) if n in module._buffers and id(t) not in filled]
    if not wanted:
        return
    values = computed_buffers(module, around, wanted)
    for name in wanted:
        if name in values:
            plan.buffers.append(_Buffer(place.canonical + name, module, name, values[name]))
        else:
            unset.append(place.canonical + name)


def _plan_emptied(plan: Materialisation) -> None:
    """Rebuild the buffers of a model that got memory by `to_empty()`: they hold garbage.

    It is known by its tensors, most of which were never written; a buffer that was never written
    either and is not what its init computes is garbage then.
    """
    if not _was_emptied(plan.model):
        return
    for place, around in _places_with_outer(plan.model):
        module = place.module
        fresh = [
            name
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None
            and buffer.device.type != "meta"
            and _never_written(buffer)
        ]
        values = computed_buffers(module, around, fresh) if fresh else {}
        for name, value in values.items():
            live = module._buffers[name]
            assert live is not None, "it was looked at above"
            if not same_bits(live, value.to(live.device)):
                plan.buffers.append(_Buffer(place.canonical + name, module, name, value))


def _was_emptied(model: Model) -> bool:
    untouched = total = 0
    for _, root in roots(model):
        for param in root.parameters():
            if param.device.type != "meta":
                total += param.numel()
                untouched += param.numel() if _never_written(param) else 0
    return 2 * untouched > total


def _never_written(tensor: Tensor) -> bool:
    """Whether no operation wrote into the memory of `tensor` since it was made."""
    local = local_of(tensor)
    return not local.is_inference() and local._version == 0


def _default_device(model: Model) -> torch.device:
    for _, root in roots(model):
        for param in root.parameters():
            if is_dtensor(param):
                mesh: Any = param.device_mesh  # type: ignore[attr-defined]
                return torch.device(mesh.device_type)
    chosen = torch.get_default_device()
    return torch.device("cpu") if chosen.type == "meta" else chosen


def _give_memory(tensor: Tensor, device: torch.device) -> None:
    """Make `tensor`, the same object, one with memory of its own; padding of a slice is zero."""
    where = device
    if is_dtensor(tensor):
        where = torch.device(tensor.device_mesh.device_type)  # type: ignore[attr-defined]
    like = torch.empty_like if declaration(tensor) is None else torch.zeros_like
    made = like(tensor.detach(), device=where)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    if type(made) is not type(tensor):
        made.__class__ = type(tensor)
    made.__dict__.update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _tell_fsdp(model: Model) -> None:
    """FSDP2 keeps references to the memory of its shards, and pads uneven ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for _, root in roots(model):
        for module in root.modules():
            if isinstance(module, fsdp.FSDPModule):
                state: Any = module._get_fsdp_state()
                for group in state._fsdp_param_groups:
                    for param in group.fsdp_params:
                        param.reset_sharded_param()
