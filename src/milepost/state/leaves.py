"""The live leaves of a model: which tensors and values its state dict consists of, by name.

Ordinary modules are read as they are. A module that overrides `state_dict` or
`_save_to_state_dict`, or has state-dict hooks of its own (quantised layers, renaming hooks,
trainers that leave frozen weights out), is asked: its state dict decides which names exist, and
each entry that is a live tensor of the module is then that tensor. Entries it makes up on the fly
are `indirect`: they are given back to the module through `load_state_dict`.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.state.declared import mark_declared
from milepost.state.names import (
    FQN,
    Model,
    Place,
    children,
    own_tensors,
    places,
    roots,
    unwrapped,
)
from milepost.state.tensors import region

EXTRA_STATE = "_extra_state"


class Sink(NamedTuple):
    """Where a restored entry goes: the module that has it, under the module's own key."""

    module: nn.Module
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The state dict of a model, by canonical name.

    `tensors` holds live objects under every name, tied names included, in module order. `extra`
    holds module extra state and other values that are no weights. `sinks` has an entry for each
    name that only its module can take back, and for its siblings.
    """

    tensors: dict[FQN, Tensor] = field(default_factory=dict)
    extra: dict[FQN, Any] = field(default_factory=dict)
    indirect: set[FQN] = field(default_factory=set)
    sinks: dict[FQN, Sink] = field(default_factory=dict)
    runtime: dict[FQN, str] = field(default_factory=dict)


def collect_leaves(model: Model) -> Leaves:
    """The leaves of `model`, whose FSDP2 modules are resharded first; declared slices are marked.

    Two leaves of one name are refused, naming both; so are sharded FSDP1 modules.
    """
    _reshard(model)
    mark_declared(model)
    leaves = Leaves()
    for runtime, part in roots(model):
        _collect(unwrapped(Place("", runtime, part)), leaves)
    return leaves


def asks_its_own_way(module: nn.Module) -> bool:
    """Whether the state dict of `module` may differ from its parameters and buffers."""
    kind = type(module)
    return (
        kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or "state_dict" in vars(module)
        or _has_foreign(module._state_dict_hooks.values())
        or _has_foreign(module._state_dict_pre_hooks.values())
    )


def is_torch_hook(hook: object) -> bool:
    """Whether `hook` belongs to FSDP or another wrapper of torch, whose work is done here."""
    target = getattr(hook, "hook", hook)  # torch wraps load hooks that want the module
    return str(getattr(target, "__module__", "")).startswith("torch.distributed.")


def _has_foreign(hooks: Iterable[object]) -> bool:
    return any(not is_torch_hook(hook) for hook in hooks)


def _collect(place: Place, leaves: Leaves) -> None:
    if asks_its_own_way(place.module):
        _collect_asked(place, leaves)
        return
    for name, tensor in own_tensors(place.module):
        _claim(leaves, place.canonical + name, place.runtime + name)
        leaves.tensors[place.canonical + name] = tensor
    if type(place.module).get_extra_state is not nn.Module.get_extra_state:
        name = place.canonical + EXTRA_STATE
        _claim(leaves, name, place.runtime + EXTRA_STATE)
        leaves.extra[name] = place.module.get_extra_state()
        leaves.sinks[name] = Sink(place.module, EXTRA_STATE)
    for child in children(place):
        _collect(unwrapped(child), leaves)


def _collect_asked(place: Place, leaves: Leaves) -> None:
    # First the state dict, then the live tensors: peft restores parameters when it is asked.
    entries = place.module.state_dict(keep_vars=True)
    below = sorted(places(place.module), key=lambda inner: -len(inner.runtime))
    live: dict[Hashable, Tensor] = {}
    for inner in reversed(below):
        for _, tensor in own_tensors(inner.module):
            live.setdefault(region(tensor) or id(tensor), tensor)
    for key, value in entries.items():
        name = place.canonical + _canonical(key, below)
        _claim(leaves, name, place.runtime + key)
        leaves.sinks[name] = Sink(place.module, key)
        if not isinstance(value, Tensor) or key.rpartition(".")[2] == EXTRA_STATE:
            leaves.extra[name] = value
            continue
        found = live.get(region(value) or id(value))
        leaves.tensors[name] = value if found is None else found
        if found is None:
            leaves.indirect.add(name)


def _canonical(key: str, below: list[Place]) -> str:
    for inner in below:  # longest runtime prefix first
        if key.startswith(inner.runtime):
            return inner.canonical + key[len(inner.runtime) :]
    return key


def _claim(leaves: Leaves, name: FQN, runtime: str) -> None:
    if name in leaves.runtime:
        raise InvalidInputError(
            f"{leaves.runtime[name]} and {runtime} both become {name} once wrappers are taken "
            f"off; rename one of the modules"
        )
    leaves.runtime[name] = runtime


def _reshard(model: Model) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for runtime, part in roots(model):
        for name, module in part.named_modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
            elif isinstance(module, fsdp.FullyShardedDataParallel):
                _refuse_flat(module, runtime + name)


def _refuse_flat(module: Any, name: str) -> None:
    strategy = module.sharding_strategy
    if strategy.name != "NO_SHARD" or not module._use_orig_params:
        raise InvalidInputError(
            f"{name or 'model'}: FSDP1 with {strategy.name} holds flattened parameters, whose "
            f"shards have no place in a named tensor; wrap it with fully_shard (FSDP2) instead"
        )
