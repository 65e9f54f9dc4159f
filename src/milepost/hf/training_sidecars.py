"""Sidecars of training put to use: the one place that makes weights what was trained.

A model that is made from a training checkpoint by any other way than loading it (a merge of an
adapter into its base, a cast) lacks what lies beside the weights: attention sinks that training had
switched off, and balancing biases of routers. `apply_training_sidecars` puts both into a live
model, `sidecar_actions` says what a tool that works on files has to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from milepost._warn import warn_user
from milepost.errors import CheckpointWarning, InvalidInputError, ShapeMismatchError
from milepost.format.dtypes import DTYPES
from milepost.hf.live import hf_config
from milepost.hf.router_slots import (
    ROUTER_SLOTS,
    SINK_FAMILIES,
    SINKS,
    RouterSlot,
    SlotIndex,
    Spelling,
    bare,
    find_slots,
    layer_of,
)
from milepost.hf.sidecar_files import (
    PROVENANCE,
    ROUTER_BIASES,
    SinkPolicy,
    TrainingSidecars,
    read_training_sidecars,
)
from milepost.layouts.checkpoint import Checkpoint, TensorInfo
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from milepost.layouts.tensor_set import TensorSet
from milepost.state.names import own_tensors, places
from milepost.state.tensors import is_dtensor
from milepost.storage.fileops import PathLike

NEUTRAL_SINK = -1e4
"""A sink of this logit takes no attention in any dtype, and stays finite in every cast."""

_ROUTERS = frozenset({"gate", "router"})


class ActionKind(Enum):
    """What was done with sidecars, or has to be."""

    SINKS_NEUTRALISED = "sinks-neutralised"
    BIASES_FROM_WEIGHTS = "biases-from-weights"
    BIASES_FROM_SIDECAR = "biases-from-sidecar"
    BIASES_IN_FP32 = "biases-in-fp32"
    SLOTS_ADDED = "slots-added"
    NO_SLOT = "no-slot"
    """Routers whose bias no tensor of the model can hold; the sidecar keeps the only copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarAction:
    """One thing done; `names` are the tensors, for `NO_SLOT` the router modules. `str` says it."""

    kind: ActionKind
    names: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.names)
        shown = ", ".join(self.names[:3]) + (", ..." if count > 3 else "")
        return _TEXTS[self.kind].format(count=count) + f": {shown}"


_TEXTS = {
    ActionKind.SINKS_NEUTRALISED: f"{{count}} attention sinks neutralised ({PROVENANCE} says so)",
    ActionKind.BIASES_FROM_WEIGHTS: "{count} balancing biases kept at the dtype of training",
    ActionKind.BIASES_FROM_SIDECAR: f"{{count}} balancing biases taken from {ROUTER_BIASES}",
    ActionKind.BIASES_IN_FP32: "{count} balancing biases held in fp32",
    ActionKind.SLOTS_ADDED: "{count} balancing biases that the base had switched off were added",
    ActionKind.NO_SLOT: "{count} routers have no slot for their balancing bias, so "
    f"{ROUTER_BIASES} has the only copy, and whoever runs the weights without it routes tokens "
    "differently",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarPlan:
    """What a tool writes so that its output is what was trained.

    `tensors` replace those of their names, or are new; they are written in the dtype that they
    have. Those in `widen` are written in fp32 in place of any narrower dtype. `config` are changes
    of `config.json`, by key, for the top level or for its `text_config`, whichever has the key.
    `needs` are files to carry along and to list as needed.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    widen: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[SidecarAction, ...] = ()
    needs: tuple[str, ...] = ()


def sidecar_actions(
    source: PathLike, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> SidecarPlan:
    """What the sidecars in directory `source` ask of an output made of `tensors` and `config`.

    `source` is what was trained: a full checkpoint (whose own balancing tensors are then taken, in
    their dtype) or an adapter. `tensors` are the headers of the weights that the tool starts from,
    by the names of the hub. Nothing is read but sidecars and balancing tensors.

    Raises as `apply_training_sidecars`.
    """
    specs = {name: _Spec(_torch_dtype(info), tuple(info.shape)) for name, info in tensors.items()}
    target = _Target(specs, _model_types(config), Spelling.STORED, modules=None)
    return _plan(target, Path(source))


def apply_training_sidecars(model: nn.Module, source_dir: PathLike) -> tuple[SidecarAction, ...]:
    """Make `model`, of weights out of `source_dir`, what was trained there; returns what was done.

    Attention sinks are neutralised where the provenance says that training was without them.
    Balancing tensors get the values and dtype that the source's own weights have. If the source has
    no weights of its own (an adapter), they are filled from `router_balancing_biases.pt`, and kept
    in fp32; a slot that the base had switched off is made. Routers without a slot are reported, and
    warned about. Sharded models are refused: call this before sharding. Not collective.

    `InvalidInputError` for a bias of a module that the model does not have, `ShapeMismatchError`
    for one of another length, and what `read_training_sidecars` raises: the model is unchanged.
    """
    config = hf_config(model)
    live = dict(_live_tensors(model))
    target = _Target(
        {name: _Spec(tensor.dtype, tuple(tensor.shape)) for name, (_, _, tensor) in live.items()},
        _model_types(config.to_dict()) if config is not None else (),
        Spelling.RUNTIME,
        modules=frozenset(bare(place.canonical.rstrip(".")) for place in places(model)),
    )
    plan = _plan(target, Path(source_dir))
    touched = [live[name][2] for name in {*plan.tensors, *plan.widen} if name in live]
    _refuse_unwritable(touched)
    _turn_on(model, plan.config)
    for name in plan.widen:
        _put(live[name], live[name][2].detach().float())
    for name, value in plan.tensors.items():
        place = live.get(name) or _new_slot(model, name)
        _put(place, value if not target.is_operand(name) else value.to(place[2].dtype))
    for action in plan.actions:
        if action.kind is ActionKind.NO_SLOT:
            warn_user(f"{source_dir}: {action}", CheckpointWarning)
    return plan.actions


# ---- what has to be done


@dataclass(frozen=True, slots=True)
class _Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Target:
    """The tensors that sidecars are for: of a live model, or of files."""

    def __init__(
        self,
        specs: Mapping[str, _Spec],
        model_types: tuple[str, ...],
        spelling: Spelling,
        modules: frozenset[tuple[str, ...]] | None,
    ) -> None:
        self.specs = specs
        known = [name for name in model_types if name in ROUTER_SLOTS]
        self.row: RouterSlot | None = ROUTER_SLOTS[known[0]] if known else None
        self.family = known[0] if known else None
        self.slots = {name: specs[name] for name in find_slots(specs, self.family, spelling)}
        self.switched_off = self._switched_off()
        has_sinks = not SINK_FAMILIES.isdisjoint(model_types)
        self.sinks = [n for n in specs if has_sinks and n.rpartition(".")[2] == SINKS]
        self._modules = modules

    def _switched_off(self) -> dict[str, _Spec]:
        """Slots that the family could have, in layers that have a router and no slot."""
        row = self.row
        if row is None or row.switch is None or row.router is None:
            return {}
        weight = tuple(f"{row.router}.weight".split("."))
        block, _, own = row.stored.rpartition(".")
        found = {}
        for name, spec in self.specs.items():
            if bare(name)[-len(weight) :] != weight:
                continue
            slot = f"{name[: name.rindex(block) + len(block)]}.{own}"
            if slot not in self.slots:
                found[slot] = _Spec(torch.float32, spec.shape[:1])
        return found

    def is_operand(self, name: str) -> bool:
        return self.row is not None and self.row.is_operand and name in self.slots

    def narrow_slots(self) -> set[str]:
        """Slots of less than fp32 that need not have the dtype of anything else."""
        return {
            name
            for name, spec in self.slots.items()
            if spec.dtype in _NARROW and not self.is_operand(name)
        }

    def has_module(self, router: str) -> bool:
        """Whether there is such a module, as far as names of tensors tell."""
        path = bare(router)
        if self._modules is not None:
            return path in self._modules
        paths = [bare(name) for name in self.specs]
        if any(each[: len(path)] == path for each in paths):
            return True
        layer = layer_of(path)
        return (
            path[-1:] != ()
            and path[-1] in _ROUTERS
            and any(each[: len(layer)] == layer for each in paths)
        )


def _plan(target: _Target, source: Path) -> SidecarPlan:
    sidecars = read_training_sidecars(source)
    sinks = target.sinks if sidecars.sinks is SinkPolicy.NEUTRALIZED else []
    own = _own_weights(source)
    filled, homeless = _from_sidecar(target, sidecars, source / ROUTER_BIASES)
    if own is not None:
        filled = _from_weights(target, own)
    added = list(target.switched_off) if not filled.keys().isdisjoint(target.switched_off) else []
    widen = target.narrow_slots() - filled.keys() if own is None else set()
    done = {
        ActionKind.SINKS_NEUTRALISED: sinks,
        ActionKind.BIASES_FROM_SIDECAR: [] if own is not None else filled,
        ActionKind.BIASES_FROM_WEIGHTS: [] if own is None else filled,
        ActionKind.SLOTS_ADDED: added,
        ActionKind.BIASES_IN_FP32: sorted(widen),
        ActionKind.NO_SLOT: homeless,
    }
    specs = {name: target.specs[name] for name in sinks}
    switch = target.row.switch if target.row is not None else None
    return SidecarPlan(
        tensors={
            **{n: torch.full(s.shape, NEUTRAL_SINK, dtype=s.dtype) for n, s in specs.items()},
            **{name: torch.zeros(target.switched_off[name].shape) for name in added},
            **filled,
        },
        widen=frozenset(widen),
        config={switch: True} if added and switch is not None else {},
        actions=tuple(SidecarAction(kind=k, names=tuple(n)) for k, n in done.items() if n),
        needs=sidecars.files,
    )


_NARROW = (torch.bfloat16, torch.float16)


def _from_sidecar(
    target: _Target, sidecars: TrainingSidecars, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """The value of each slot that the sidecar has a bias for, and routers that have no slot."""
    index = SlotIndex([*target.slots, *target.switched_off])
    filled: dict[str, Tensor] = {}
    homeless = []
    for router, bias in sidecars.biases.items():
        if not target.has_module(router):
            raise InvalidInputError(
                f"{path}: a bias for {router}, which the model does not have; the sidecar is that "
                "of another model",
                path=path,
            )
        slots = [] if sidecars.is_transient else index.of_router(router)
        if not slots:
            homeless.append(router)
        for name in slots:
            filled[name] = _shaped(bias, name, target, f"{path}: {router}")
    return filled, homeless


def _from_weights(target: _Target, own: Checkpoint) -> dict[str, Tensor]:
    """The value of each slot that the source's own weights hold, in their dtype."""
    stored = SlotIndex(find_slots(own.tensors(), target.family, Spelling.STORED))
    filled = {}
    for name in [*target.slots, *target.switched_off]:
        found = stored.of_slot(name)
        if found:
            filled[name] = _shaped(own.read(found[0]), name, target, f"{own.path}: {found[0]}")
    return filled


def _shaped(bias: Tensor, name: str, target: _Target, where: str) -> Tensor:
    """The bias in the shape of its slot, which may have leading dims of 1."""
    spec = target.slots.get(name) or target.switched_off[name]
    length = spec.shape[-1:] if spec.shape else ()
    if tuple(bias.shape[-1:]) != length or bias.numel() != torch.Size(spec.shape).numel():
        raise ShapeMismatchError(
            f"{where}: a bias of {tuple(bias.shape)}, {name} has {spec.shape}: the routers have "
            "other experts; use the sidecar of this model"
        )
    return bias.reshape(spec.shape)


def _own_weights(source: Path) -> Checkpoint | None:
    """Weights of the whole model in `source`; None for an adapter alone."""
    if TensorSet(source, "model").exists():
        return HuggingFaceCheckpoint(source, stem="model")
    if (source / "pytorch_model.bin").is_file():
        return Checkpoint.open(source / "pytorch_model.bin")
    if (source / "pytorch_model.bin.index.json").is_file():
        raise InvalidInputError(
            f"{source}: weights in several .bin files are not read; save them as safetensors",
            path=source,
        )
    return None


def _model_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return tuple(name for name in (config.get("model_type"), inner) if isinstance(name, str))


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    row = DTYPES.get(info.dtype)
    name = "uint8" if row is None or row.torch_name is None else row.torch_name
    dtype: torch.dtype = getattr(torch, name, torch.uint8)
    return dtype


# ---- live models


_Live = tuple[nn.Module, str, Tensor]


def _live_tensors(model: nn.Module) -> Iterable[tuple[str, _Live]]:
    for place in places(model):
        for name, tensor in own_tensors(place.module):
            yield place.canonical + name, (place.module, name, tensor)


def _refuse_unwritable(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if is_dtensor(tensor) or tensor.device.type == "meta":
            state = "sharded" if is_dtensor(tensor) else "on the meta device"
            raise InvalidInputError(
                f"the model is {state}; apply sidecars to a whole model that has its weights"
            )


def _put(place: _Live, value: Tensor) -> None:
    module, name, old = place
    moved = value.to(old.device).clone()
    if name in module._parameters:
        old.data = moved
    else:
        module._buffers[name] = moved


def _turn_on(model: nn.Module, switches: Mapping[str, Any]) -> None:
    """Set configuration keys that make slots count, in the configuration and in its modules."""
    config = hf_config(model)
    configs = [config, getattr(config, "text_config", None)]
    for key, value in switches.items():
        holders = [*configs, *(place.module for place in places(model))]
        for holder in holders:
            if holder is not None and hasattr(holder, key):
                setattr(holder, key, value)


def _new_slot(model: nn.Module, name: str) -> _Live:
    """A buffer for the slot `name` in the module that it belongs to."""
    path, _, own = name.rpartition(".")
    module = next(place.module for place in places(model) if place.canonical == f"{path}.")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    buffer = torch.zeros(0, device=device)
    module.register_buffer(own, buffer)
    return module, own, buffer
