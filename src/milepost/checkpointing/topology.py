"""The topology fingerprint of a live state, derived as far as placements and configuration say."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from milepost.checkpointing.capture import Captured, State
from milepost.engine.rendezvous import Conversation
from milepost.format.fingerprint import Differences, OptimizerStateFingerprint, Stated
from milepost.hf.live import hf_config, unwrap
from milepost.plan.inventory import Inventory, LeafInfo, holding_of
from milepost.plan.stages import find_stages
from milepost.state.model import ModelState
from milepost.state.optimizer import class_name, inner_optimizers
from milepost.state.other import Kind
from milepost.state.placements import axes_of
from milepost.state.tensors import is_dtensor

# What torch, torchtitan and transformers call the axes of a mesh.
_AXES = {
    "ep_size": ("ep", "expert_parallel"),
    "expert_tp_size": ("etp", "expert_tp"),
    "cp_size": ("cp", "ulysses"),
    "tp_size": ("tp",),
    "pp_size": ("pp",),
}
_REPLICATED_AXES = ("dp_replicate", "replicate", "ddp")
_EXPERT_AXES = (*_AXES["ep_size"], *_AXES["expert_tp_size"])
_EXPERTS = re.compile(r"(?:^|\.)experts\.")


def fingerprint_of(
    models: Mapping[str, Any],
    leaves: Mapping[str, Mapping[str, Tensor]],
    optimizers: Iterable[Any],
    inventory: Inventory,
    *,
    world_size: int,
    stated: Stated = None,
    placed: Mapping[str, str] | None = None,
) -> OptimizerStateFingerprint:
    """What this rank sees, with the fields that the caller states in place of what was derived.

    `leaves` are the tensors of `models` by key and name, `inventory` is that of all ranks, where
    `placed` gives the sets of models that have another name.
    """
    if isinstance(stated, OptimizerStateFingerprint):
        return stated
    tensors = [tensor for own in leaves.values() for tensor in own.values()]
    axes = mesh_axes(tensors)
    sizes = axis_sizes(axes)
    sets = {key: inventory.sets.get((placed or {}).get(key, key), {}) for key in models}
    if sizes["pp_size"] == 1:
        stages = [found.count for own in sets.values() if (found := find_stages(own)) is not None]
        sizes["pp_size"] = max(stages, default=1)
    experts = {n: leaf for own in sets.values() for n, leaf in own.items() if _EXPERTS.search(n)}
    derived = OptimizerStateFingerprint(
        world_size=world_size,
        **sizes,
        fsdp_shard_ep1_experts=sizes["ep_size"] == 1 and _shards_experts(leaves),
        optimizer_class=_optimizer_class(optimizers),
        ep_scope=None,
        use_grouped_gemm=_uses_grouped_gemm(models.values()),
        hsdp=any(_is_hybrid(tensor) for tensor in tensors if is_dtensor(tensor)),
        nvlink_domain_size=None,
        expert_replica_size=_replicas(experts),
    )
    return derived.stated(stated or {})


def fingerprint_of_save(
    captured: Captured,
    state: State,
    inventory: Inventory,
    live: Mapping[str, ModelState],
    *,
    world_size: int,
    stated: Stated = None,
    placed: Mapping[str, str] | None = None,
) -> OptimizerStateFingerprint:
    """The fingerprint of a state that is being saved; `live` are its models as they are."""
    return fingerprint_of(
        {key: state[key] for key in captured.models},
        {key: model.leaves for key, model in live.items()},
        [state[key] for key, kind in captured.kinds.items() if kind is Kind.OPTIMIZER],
        inventory,
        world_size=world_size,
        stated=stated,
        placed=placed,
    )


def agreed_differences(
    talk: Conversation,
    saved: OptimizerStateFingerprint | None,
    now: OptimizerStateFingerprint,
) -> Differences:
    """The fields that differ as the coordinator sees them, the same on all ranks; collective."""
    own = {} if saved is None else saved.differences(now)
    told = json.dumps(own).encode() if talk.is_coordinator else None
    found: dict[str, list[Any]] = json.loads(talk.broadcast("fingerprint", told))
    return {name: (before, live) for name, (before, live) in found.items()}


def mesh_axes(tensors: Iterable[Any]) -> dict[str, int]:
    """Size of each axis of the meshes that tensors lie on, and of the meshes they were cut from."""
    axes: dict[str, int] = {}
    seen: set[int] = set()
    for tensor in tensors:
        if not is_dtensor(tensor):
            axes.update(axes_of(tensor))
            continue
        mesh = tensor.device_mesh
        if id(mesh) not in seen:
            seen.add(id(mesh))
            for each in (mesh._get_root_mesh(), mesh):
                axes.update(zip(each.mesh_dim_names or (), each.shape, strict=False))
    return axes


def axis_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the fingerprint that axes of a mesh show, by field."""
    return {field: _size(axes, names) for field, names in _AXES.items()}


def _size(axes: Mapping[str, int], names: Collection[str]) -> int:
    return max((size for name, size in axes.items() if name in names), default=1)


def _optimizer_class(optimizers: Iterable[Any]) -> str:
    """Class names without their modules, each once, joined by a comma; empty without any."""
    names = [
        class_name(inner).rpartition(".")[2]
        for optimizer in optimizers
        for inner in inner_optimizers(optimizer).values()
    ]
    return ",".join(dict.fromkeys(names))


def _uses_grouped_gemm(models: Iterable[Any]) -> bool | None:
    """Whether transformers runs the experts with grouped matrix products; None when it says not."""
    for model in models:
        for part in model if isinstance(model, list | tuple) else [model]:
            config = hf_config(unwrap(part))
            kind = getattr(config, "_experts_implementation", None)
            if kind is not None:
                return bool(kind == "grouped_mm")
    return None


def _is_hybrid(tensor: Any) -> bool:
    """Whether shards of `tensor` are replicated along an axis of data parallelism."""
    placements = tensor.placements
    names = tensor.device_mesh.mesh_dim_names or ("",) * len(placements)
    if not any(placement.is_shard() for placement in placements):
        return False
    return any(
        placement.is_replicate() and size > 1 and (name in _REPLICATED_AXES or name == "")
        for placement, name, size in zip(placements, names, tensor.device_mesh.shape, strict=True)
    )


def _shards_experts(leaves: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether experts are cut by an axis that is not one of their own."""
    return any(
        placement.is_shard() and name not in (*_EXPERT_AXES, *_AXES["tp_size"])
        for own in leaves.values()
        for fqn, tensor in own.items()
        if _EXPERTS.search(fqn) and is_dtensor(tensor)
        for name, placement in zip(
            tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim,
            tensor.placements,
            strict=True,
        )
    )


def _replicas(experts: Mapping[str, LeafInfo]) -> int | None:
    """Ranks that hold the same part of the experts; None where no rank holds a part of them."""
    for name, leaf in experts.items():
        holding = holding_of(leaf, name)
        if holding.signature:
            return holding.replica_count
    return None
