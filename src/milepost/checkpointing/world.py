"""The ranks of this process's default group, as Milepost talks to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from milepost._env import env_int, env_text
from milepost.engine.connections import Connections
from milepost.engine.rendezvous import Conversation, Rendezvous, Solo
from milepost.storage.lease import Owner

logger = logging.getLogger(__name__)

_KEPT_CONVERSATIONS = 4


@dataclass(slots=True)
class _World:
    """What is kept for one default process group: its store, and a gloo group of our own.

    `behind` are conversations that were handed over to a thread behind training, in order.
    """

    store: Any
    connections: Connections
    group: Any = None
    hosts: tuple[int, ...] = ()
    count: int = 0
    recent: list[Rendezvous] = field(default_factory=list)
    behind: list[Rendezvous] = field(default_factory=list)


_current: _World | None = None


_is_alone: ContextVar[bool] = ContextVar("_is_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Calls of this thread inside are of one process, whatever group it is a rank of.

    For a caller that saves on one rank what is whole there, while the others go on.
    """
    before = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(before)


def is_distributed() -> bool:
    """Whether this process is one of several ranks, as far as the calls at hand go."""
    if _is_alone.get():
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _world() -> _World:
    """The caller's thread alone asks: what goes on behind training may outlive the group."""
    global _current
    store: Any = dist.distributed_c10d._get_default_store()
    if _current is None or _current.store is not store:
        _current = _World(store, Connections(store))  # a process has one default group at a time
    return _current


def converse() -> Conversation:
    """A new conversation of all ranks; collective in the sense that every rank makes the call.

    Calls pair up by their number, so every rank makes the same calls in the same order. Keys of a
    conversation are deleted a few conversations later, when everybody has read them.
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
        connections=world.connections,
    )
    world.recent.append(talk)
    while len(world.recent) > _KEPT_CONVERSATIONS and _have_left(world.recent):
        world.recent.pop(0).forget()
    return talk


def _have_left(talks: list[Rendezvous]) -> bool:
    """Whether all ranks have left the first of these conversations. The coordinator may have called
    off any number of them before another rank looks at the first; what it says there is not deleted
    until it has heard all ranks in a later one."""
    return not talks[0].is_coordinator or any(talk.heard_all for talk in talks[1:])


def hand_over(talk: Conversation) -> None:
    """Let another thread go on with a conversation, which begins with `talk.hand_over()` there; its
    keys stay until `forget_behind`."""
    if isinstance(talk, Rendezvous):
        world = _world()
        world.recent.remove(talk)
        world.behind.append(talk)


def forget_behind(ended: Collection[Conversation]) -> None:
    """Delete the keys of handed over conversations that have ended on all ranks."""
    if not is_distributed():
        return
    world = _world()
    for talk in [talk for talk in world.behind if talk in ended]:
        world.behind.remove(talk)
        talk.forget()


def exchange_group() -> Any:
    """The gloo group of the exchange; made at the first call, which is collective.

    For calls that have waited for all saves behind training. One that fails drops the group, on one
    rank before another: beside it, ranks agree on one (`agreed_exchange_group`).
    """
    return kept_exchange_group() or new_exchange_group()


def agreed_exchange_group(talk: Conversation, topic: str) -> Any:
    """The gloo group of the exchange if all ranks have it, else a new one; collective."""
    kept = kept_exchange_group()
    reports = talk.gather(f"{topic}/group", bytes([kept is not None]))
    told = bytes([all(map(any, reports))]) if talk.is_coordinator else None
    (is_kept,) = talk.broadcast(f"{topic}/group-of-all", told)
    return kept if is_kept else new_exchange_group()


def kept_exchange_group() -> Any:
    """The gloo group of the exchange; None before it is made, and once it was dropped."""
    return _world().group


def new_exchange_group() -> Any:
    """Make a gloo group for this exchange and later ones; collective."""
    limit = timedelta(seconds=env_int("MILEPOST_RANK_TIMEOUT_S"))
    group = _world().group = dist.new_group(backend="gloo", timeout=limit)
    return group


def drop_exchange_group(group: Any) -> None:
    """Forget a group after an exchange that failed; every rank does so, and makes a new one."""
    if _current is not None and _current.group is group:
        _current.group = None


def host_numbers(talk: Conversation) -> tuple[int, ...]:
    """The number of the host of each rank, in order of their lowest ranks; collective.

    Asked once for each process group: a host is known by its name and boot id, or by
    `MILEPOST_HOST_ID`.
    """
    world = _world()
    if not world.hosts:
        names = talk.gather("hosts", _host_id().encode())
        numbers: dict[bytes, int] = {}
        found = [numbers.setdefault(name, len(numbers)) for name in names]
        told = json.dumps(found).encode() if talk.is_coordinator else None
        world.hosts = tuple(json.loads(talk.broadcast("host-numbers", told)))
    return world.hosts


def host_name() -> str:
    """What this host is called in messages."""
    return env_text("MILEPOST_HOST_ID") or Owner.this_process().host


def _host_id() -> str:
    """What tells this host from others: a name alone may be given twice, or again after a boot."""
    owner = Owner.this_process()
    return env_text("MILEPOST_HOST_ID") or f"{owner.host} {owner.boot_id}"
