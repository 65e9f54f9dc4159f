"""The ranks of this process's default group, as Milepost talks to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from milepost._env import env_int
from milepost.engine.rendezvous import Conversation, Rendezvous, Solo

logger = logging.getLogger(__name__)

_KEPT_CONVERSATIONS = 2


@dataclass(slots=True)
class _World:
    """What is kept for one default process group: its store, and a gloo group of our own."""

    store: Any
    group: Any = None
    count: int = 0
    recent: list[Rendezvous] = field(default_factory=list)


_worlds: dict[int, _World] = {}


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _world() -> _World:
    default = dist.group.WORLD
    if id(default) not in _worlds:
        _worlds.clear()  # a process has one default group at a time
        _worlds[id(default)] = _World(store=dist.distributed_c10d._get_default_store())
    return _worlds[id(default)]


def converse() -> Conversation:
    """A new conversation of all ranks; collective in the sense that every rank makes the call.

    Calls pair up by their number, so every rank makes the same calls in the same order. Keys of a
    conversation are deleted two conversations later, when everybody has read them.
    """
    if not is_distributed():
        return Solo()
    world = _world()
    world.count += 1
    talk = Rendezvous(
        world.store,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        topic=f"milepost/{world.count}",
        limit_s=float(env_int("MILEPOST_RANK_TIMEOUT_S")),
    )
    world.recent.append(talk)
    if len(world.recent) > _KEPT_CONVERSATIONS:
        world.recent.pop(0).forget()
    return talk


def exchange_group() -> Any:
    """The gloo group on which rows are exchanged; made at the first call, which is collective."""
    world = _world()
    if world.group is None:
        world.group = dist.new_group(backend="gloo")
    return world.group
