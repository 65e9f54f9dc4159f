"""Which ranks write which copy of a checkpoint, agreed before it is laid out.

Usually there is one copy and every rank writes into it. Ranks that do not see its directory, on
nodes without the shared disk, send what they hold to ranks that do. Where every node has a disk of
its own, each can have a whole copy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from milepost.checkpointing.files import PlannedFile, document_bytes, document_file
from milepost.checkpointing.world import host_numbers
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.write import InnerDim, WriteOptions
from milepost.errors import InvalidInputError
from milepost.format.manifest import Manifest, Role, encode_manifest, parse_manifest
from milepost.plan.shares import WriteRules
from milepost.storage import fileops
from milepost.storage.space import storage_error
from milepost.storage.staging import STAGING_PREFIX, left_alone

_SMALL_ON_ONE_HOST = 0
_SMALL_ON_SEVERAL = 1024 * 1024
_LOOKS = 3
_PAUSE_S = 0.05


class Copies(Enum):
    """How many copies of a checkpoint a save makes."""

    ONE = "one"
    """One, on a file system that at least rank 0 sees; ranks that do not see it send their part."""
    PER_NODE = "per-node"
    """One on each node, on a disk of its own, whole. All of them are complete and durable before
    the first gets its name; see `save`."""


def agree_rules(
    talk: Conversation, target: Path, unique: str, options: WriteOptions, copies: Copies
) -> list[WriteRules]:
    """The rules of each copy, the same on all ranks; collective.

    The leader of a copy leaves a directory beside the target, and the ranks that see it are the
    writers. Rank 0 leads the first copy, the lowest rank of every other node another one.
    """
    if talk.world_size == 1:
        return [WriteRules(writers=(0,), hosts=(0,))]
    hosts = host_numbers(talk)
    groups: list[Sequence[int]] = [range(talk.world_size)]
    if copies is Copies.PER_NODE:
        groups = [[r for r, host in enumerate(hosts) if host == h] for h in dict.fromkeys(hosts)]
    leads = talk.rank in [group[0] for group in groups]
    probe = target.parent / f"{STAGING_PREFIX}{unique}-probe"
    with left_alone(probe):  # by the save before this one, which may begin to write now
        try:
            with together(talk, "probe"):
                if leads:
                    _leave(probe, target)
            reports = talk.gather("sees", b"1" if leads or _sees(probe) else b"0")
            own = [options.inner_dim.value, options.aggregate_below, options.stripe_nbytes]
            told = json.dumps([_packed(reports), *own]).encode() if talk.is_coordinator else None
            seen, way, aggregate_below, stripe = json.loads(talk.broadcast("writers", told))
        finally:
            if leads:
                _remove(probe)
    if aggregate_below is None:
        aggregate_below = _SMALL_ON_SEVERAL if len(set(hosts)) > 1 else _SMALL_ON_ONE_HOST
    writers = _unpacked(seen, talk.world_size)
    rules = [
        WriteRules(
            writers=tuple(rank for rank in group if rank in writers),
            hosts=hosts,
            page_nbytes=stripe,
            aggregate_below=0 if way == InnerDim.MAPPED.value else aggregate_below,
            is_mapped=way == InnerDim.MAPPED.value,
        )
        for group in groups
    ]
    if any(each.is_mapped and not (each.on_one_host and each.all_write) for each in rules):
        raise InvalidInputError(
            "inner_dim=InnerDim.MAPPED needs all ranks on one host, and all of them must see "
            f"{target.parent}; use InnerDim.EXCHANGE"
        )
    return rules


def _leave(probe: Path, target: Path) -> None:
    try:
        fileops.make_directories(probe)
    except OSError as error:
        raise storage_error(error, target) from error


def _remove(probe: Path) -> None:
    """Twice, for a full disk may need a moment to let go; the next writer removes what is left."""
    for _ in range(2):
        with suppress(OSError):
            fileops.remove_directory(probe)
            return


def _sees(probe: Path) -> bool:
    """Whether the probe is there; a network file system may be a moment late."""
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        if probe.is_dir():
            return True
    return False


def _packed(reports: Sequence[bytes]) -> str:
    """One bit for each rank, in hexadecimal; empty when all of them are set."""
    bits = int("".join(report.decode() for report in reports), 2)
    return "" if bits == 2 ** len(reports) - 1 else f"{bits:x}"


def _unpacked(seen: str, count: int) -> frozenset[int]:
    if not seen:
        return frozenset(range(count))
    bits = f"{int(seen, 16):0{count}b}"
    return frozenset(rank for rank, bit in enumerate(bits) if bit == "1")


def share_documents(
    talk: Conversation,
    rules: Sequence[WriteRules],
    own: list[PlannedFile],
    manifest: Manifest | None,
) -> tuple[list[PlannedFile], Manifest | None]:
    """The coordinator's own files and manifest, also at the leaders of further copies."""
    leaders = [each.leader for each in rules[1:]]
    if talk.is_coordinator and leaders:
        assert manifest is not None, "the coordinator has the manifest"
        files = [(file.name, file.role, document_bytes(file)) for file in own]
        talk.post("documents", msgspec.msgpack.encode((files, encode_manifest(manifest))))
    if talk.rank not in leaders:
        return own, manifest
    raw = talk.fetch("documents", 0)
    found, sealed = msgspec.msgpack.decode(raw, type=tuple[list[tuple[str, Role, bytes]], bytes])
    documents = [document_file(name, data, role) for name, role, data in found]
    return documents, parse_manifest(sealed, "the manifest of rank 0")
