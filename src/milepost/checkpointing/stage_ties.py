"""Pairs that are tied across pipeline stages: found by declaration, agreed by all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from milepost.checkpointing.capture import State, check_keys
from milepost.engine.rendezvous import Conversation
from milepost.hf.tied_names import declared_ties
from milepost.plan.inventory import Inventory
from milepost.state.leaves import collect_leaves
from milepost.state.names import FQN
from milepost.state.other import Kind

Aliases: TypeAlias = dict[str, dict[FQN, FQN]]
"""For each model by key: alias to the name under which its tensor is kept."""

_FACT = "tied "


def stage_ties(talk: Conversation, state: State) -> Aliases:
    """Ties that the models of `state` declare, one side here and the other on other ranks.

    Collective; two small values for each rank, four where there is such a pair. Only what is
    declared is tied: that the bytes are equal is proven later, with the replicas.
    """
    if talk.world_size == 1:
        return {}
    models = {k: state[k] for k, kind in check_keys(state).items() if kind is Kind.MODEL}
    held = {key: set(collect_leaves(model).tensors) for key, model in models.items()}
    own = {key: _one_sided(declared_ties(model), held[key]) for key, model in models.items()}
    wanted: Aliases = {}
    for raw in talk.gather("one-sided-ties", _packed(own)):
        for key, ties in json.loads(raw).items():
            wanted.setdefault(key, {}).update(ties)
    wanted = _told(talk, "ties-wanted", wanted)
    if not any(wanted.values()):
        return {}
    kept = {key: sorted(set(ties.values()) & held.get(key, set())) for key, ties in wanted.items()}
    everywhere: dict[str, set[FQN]] = {}
    for raw in talk.gather("ties-kept", json.dumps(kept).encode()):
        for key, names in json.loads(raw).items():
            everywhere.setdefault(key, set()).update(names)
    confirmed = {
        key: {alias: name for alias, name in ties.items() if name in everywhere.get(key, ())}
        for key, ties in wanted.items()
    }
    return _told(talk, "ties-agreed", confirmed)


def _one_sided(declared: Mapping[FQN, FQN], held: set[FQN]) -> dict[FQN, FQN]:
    return {a: kept for a, kept in declared.items() if a in held and kept not in held}


def _packed(aliases: Aliases) -> bytes:
    return json.dumps({key: ties for key, ties in aliases.items() if ties}).encode()


def _told(talk: Conversation, name: str, aliases: Aliases) -> Aliases:
    raw = talk.broadcast(name, _packed(aliases) if talk.is_coordinator else None)
    found: Aliases = json.loads(raw)
    return found


def tie_facts(ties: Mapping[str, Mapping[FQN, FQN]]) -> dict[str, str]:
    """Ties as facts of an inventory: stages know only their own."""
    return {
        f"{_FACT}{key}/{alias}": kept for key, own in ties.items() for alias, kept in own.items()
    }


def ties_of(inventory: Inventory, key: str) -> dict[FQN, FQN]:
    """The ties of one model over all ranks, without names that some rank stores by themselves."""
    prefix = f"{_FACT}{key}/"
    stored: Iterable[FQN] = inventory.sets.get(key, {})
    return {
        fact.removeprefix(prefix): kept
        for fact, kept in inventory.facts.items()
        if fact.startswith(prefix) and fact.removeprefix(prefix) not in stored
    }
