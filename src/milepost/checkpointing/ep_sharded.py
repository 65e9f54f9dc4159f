"""Each rank's experts in a file of their own: which runs can be saved so, and the slices.

The fastest thing to write where whole experts would have to be put together from many ranks, and
of no use as it lies: the index says so, and readers refuse it. What it cannot express is refused
before anything is written, and by `validate_ep_sharded_save` before training begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

import xxhash
from torch import Tensor, nn

from milepost.checkpointing.capture import Captured
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.names_on_disk import NamesOnDisk
from milepost.checkpointing.topology import axis_sizes, mesh_axes
from milepost.engine.rendezvous import Conversation
from milepost.errors import InvalidInputError
from milepost.format.fingerprint import OptimizerStateFingerprint, Stated
from milepost.geometry.placement import whole
from milepost.hf.ep_families import EP_FAMILIES, EpSave, supported_ep_merge_model_types
from milepost.hf.live import hf_config, unwrap
from milepost.plan.holding import Holding
from milepost.plan.inventory import SELF, LeafInfo
from milepost.state.leaves import collect_leaves
from milepost.state.names import FQN
from milepost.state.placements import Held, axes_of, describe, own_rank

_EXPERT_LORA = re.compile(r"(?:^|\.)experts\..*\blora_[AB]\b")
_EXPERT_AXES = ("ep", "expert_parallel")


class MergeOnSave(Enum):
    """Whether the run folds expert adapters into the weights that it saves."""

    NO = "no"
    EXPERT_LORA = "expert-lora"


def validate_ep_sharded_save(
    model: nn.Module,
    *,
    world_size: int,
    fingerprint: Stated = None,
    merge: MergeOnSave = MergeOnSave.NO,
    copies: Copies = Copies.ONE,
) -> None:
    """Refuse a run whose experts cannot be saved one slice for each rank, with every reason.

    To be called when a trainer is made; `save_sharded_ep` checks the same once more. `fingerprint`
    states sizes of the run that the placements of `model` do not show. Not collective; raises
    `InvalidInputError`.
    """
    reasons = list(_reasons(model, world_size, fingerprint, merge, copies))
    if reasons:
        raise InvalidInputError(
            f"save_sharded_ep: {'; '.join(reasons)}; use save(), whose directory is loadable as it "
            "is"
        )


def _reasons(
    model: nn.Module, world_size: int, stated: Stated, merge: MergeOnSave, copies: Copies
) -> Iterator[str]:
    leaves = collect_leaves(model).tensors
    sizes = _sizes(leaves, stated)
    experts = {name: tensor for name, tensor in leaves.items() if _is_expert(tensor)}
    if merge is MergeOnSave.EXPERT_LORA:
        yield "expert adapters are merged on save, which needs whole experts"
    if not experts:
        yield "the model has no layer whose experts are divided among ranks"
    if sizes["cp_size"] > 1 or _has_ulysses(model):
        yield "the model is under context parallelism (Ulysses)"
    if any(_EXPERT_LORA.search(name) for name in leaves):
        yield "the model has native adapters on its experts, which have a save of their own"
    if any(cls.__name__ == "PeftModel" for cls in type(model).__mro__):
        yield "the model is a PeftModel, whose adapter is what a run saves"
    yield from _family_reasons(model)
    if sizes["expert_tp_size"] > 1 or any(_cuts_inside(tensor) for tensor in experts.values()):
        yield f"experts are cut inside (expert_tp_size {sizes['expert_tp_size']})"
    ep_size = sizes["ep_size"]
    if experts and ep_size != world_size:
        yield (
            f"the group of the experts spans {ep_size} of {world_size} ranks, so that several "
            "ranks would write one slice"
        )
    if sizes["pp_size"] > 1:
        yield f"the model is a pipeline of {sizes['pp_size']} stages"
    if copies is Copies.PER_NODE:
        yield "every node has an output disk of its own, so that no directory would have all files"


def _sizes(leaves: Mapping[FQN, Tensor], stated: Stated) -> dict[str, int]:
    derived = axis_sizes(mesh_axes(leaves.values()))
    if isinstance(stated, OptimizerStateFingerprint):
        stated = stated.to_dict()
    return {**derived, **{k: v for k, v in (stated or {}).items() if k in derived}}


def _family_reasons(model: nn.Module) -> Iterator[str]:
    config = hf_config(unwrap(model))
    text = config.get_text_config() if config is not None else None
    kinds = [getattr(each, "model_type", None) for each in (config, text)]
    known = [EP_FAMILIES[kind] for kind in kinds if kind in EP_FAMILIES]
    if EpSave.HUB_NAMESPACE_ONLY in known:
        yield f"{kinds[0]} is exported in a namespace of its own, which slices cannot have"
    elif not known:
        yield (
            f"the model type {kinds[0]!r} is none of those whose slices can be merged "
            f"({', '.join(supported_ep_merge_model_types())})"
        )


def _is_expert(tensor: Tensor) -> bool:
    """Whether an axis of expert parallelism divides `tensor`."""
    return any(axis in _EXPERT_AXES for axis in axes_of(tensor)) and bool(
        Holding(describe(tensor, key="an expert").info.classes).signature
    )


def _cuts_inside(tensor: Tensor) -> bool:
    holding = Holding(describe(tensor, key="an expert").info.classes)
    return any(placement.dim != 0 for length, placement in holding.signature if length > 1)


def _has_ulysses(model: nn.Module) -> bool:
    return any("ulysses" in type(module).__name__.lower() for module in model.modules())


def rank_slices(
    leaves: Mapping[FQN, Tensor], held: Mapping[FQN, Held], *, world_size: int
) -> dict[FQN, Held]:
    """What this rank holds of a model, experts as slices of its own under `<name>.shard_<rank>`.

    Slices in order of rank are the whole tensor along dim 0; where they are not, it is refused.
    """
    rank = own_rank()
    found: dict[FQN, Held] = {}
    for name, own in held.items():
        if not _is_expert(leaves[name]):
            found[name] = own
            continue
        _check_slices(name, own.info, world_size)
        shape = tuple(own.local.shape)
        info = LeafInfo(
            dtype=own.info.dtype, shape=shape, itemsize=own.info.itemsize, classes=(SELF,)
        )
        found[f"{name}.shard_{rank}"] = own._replace(info=info)
    return found


def _check_slices(name: FQN, info: LeafInfo, world_size: int) -> None:
    holding = Holding(info.classes)
    end = 0
    for rank in range(world_size):
        place = holding.shard_coordinate(rank)
        if place is None:
            raise InvalidInputError(f"{name}: rank {rank} holds nothing of it, every rank must")
        rows, *inner = holding.held(info.shape, place)
        first, last = rows[0] if rows else (end, end)
        if len(rows) > 1 or first != end or tuple(inner) != whole(info.shape)[1:]:
            raise InvalidInputError(
                f"{name}: what rank {rank} holds does not follow on what the ranks before it hold; "
                "use save()"
            )
        end = last


def _alike(talk: Conversation, key: str, names: Iterable[FQN]) -> bool:
    """Whether all ranks have the same names; collective."""
    digest = xxhash.xxh3_128("\0".join(names).encode()).digest()
    found = talk.gather(f"names-of/{key}", digest)
    told = b"1" if len(set(found)) == 1 else b"0"
    return talk.broadcast(f"alike/{key}", told if talk.is_coordinator else None) == b"1"


def slice_experts(
    talk: Conversation, captured: Captured, held: dict[str, dict[str, Held]]
) -> NamesOnDisk:
    """Put slices of this rank in place of the experts of the model at the root of `held`.

    Everything keeps the name that it has in memory. Collective; ranks that have different tensors
    are refused: they are stages of a pipeline, whose files are others.
    """
    for key, model in captured.models.items():
        if captured.prefixes[key]:
            continue
        if not _alike(talk, key, model.leaves):
            raise InvalidInputError(
                f"{key}: ranks have different tensors, as the stages of a pipeline have; its "
                "experts cannot be saved one slice for each rank: use save_pp_checkpoint"
            )
        held[key] = rank_slices(model.leaves, held[key], world_size=talk.world_size)
    return NamesOnDisk(
        notes=["one file of experts for each rank: max_shard_size does not apply to the weights"]
    )
