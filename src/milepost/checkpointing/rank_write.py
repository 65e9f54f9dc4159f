"""The write phase of one rank for one copy: its own pieces, the exchange, and what was written.

Digests of extents do not go through the store, however many tensors there are: each writer puts its
records into a region of its own of a hidden file in the staging directory, and the leader of the
copy reads them there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec

from milepost.checkpointing.files import FilesPlan, PlannedFile
from milepost.checkpointing.frozen_parts import check_share, remember_share
from milepost.checkpointing.world import (
    drop_exchange_group,
    kept_exchange_group,
    new_exchange_group,
)
from milepost.engine.exchange import ExchangeStep
from milepost.engine.exchange_write import (
    copy_mapped,
    digest_mapped,
    exchange_and_digest,
    exchange_and_write,
)
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.write import WriteMode, WriteOptions, digest_files, fill_files
from milepost.errors import CheckpointError, DamagedError, RankError
from milepost.format.digests import Extent, digest_of, pack_records, unpack_records
from milepost.plan.shares import WriteRules
from milepost.storage import fileops

RECORDS_NAME = ".records"
_REGION = struct.Struct("<Q16s")
_LENGTH = struct.Struct("<Q")


class _Records(NamedTuple):
    """What a rank leaves in the file of records: where, how much, and its digest."""

    rank: int
    start: int
    nbytes: int
    digest: str


class ExchangeGroup(NamedTuple):
    """What an exchange runs on; `gloo` is None where memory maps do its work."""

    gloo: Any


class _Exchange(Protocol):
    def __call__(
        self, steps: Sequence[ExchangeStep], options: WriteOptions, *, group: Any
    ) -> dict[Path, list[Extent]]: ...


_broken: WeakSet[Any] = WeakSet()
"""Groups of exchanges that failed: messages of those may still come, and be taken for others."""


def ready_group(
    talk: Conversation, number: int, rules: WriteRules, plan: FilesPlan
) -> ExchangeGroup | None:
    """The group for the copy `number`, None when nothing of it travels; collective.

    Made by the caller's thread: whatever runs behind training makes no groups.
    """
    if talk.world_size == 1:
        return None
    kept = kept_exchange_group()
    reports = talk.gather(f"travels/{number}", bytes([bool(plan.steps), kept is not None]))
    told = None
    if talk.is_coordinator:
        told = bytes([any(r[0] for r in reports), all(r[1] for r in reports)])
    travels, is_kept = talk.broadcast(f"travels-any/{number}", told)
    if not travels:
        return None
    if rules.is_mapped:
        return ExchangeGroup(None)
    return ExchangeGroup(kept if is_kept else new_exchange_group())


class RankWrite:
    """One rank's writing of one copy; every rank makes one for every copy.

    `label` tells its messages from those of others in the same save. `told` is entered around what
    touches files: it makes the error of Milepost of an `OSError`.
    """

    def __init__(
        self,
        talk: Conversation,
        rules: WriteRules,
        options: WriteOptions,
        directory: Path,
        *,
        label: str,
        told: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.talk, self.rules, self.options, self.directory = talk, rules, options, directory
        self.label, self.told = label, told

    def run(
        self, plan: FilesPlan, files: Sequence[PlannedFile], group: ExchangeGroup | None
    ) -> list[list[Extent]]:
        """Write this rank's part; all writers' extents, file by file, at the leader. Collective.

        `files` begins with those of `plan`, the same on all ranks; what a leader has beyond them is
        its own. `group` is that of `ready_group`.
        """
        writes = [file.write_into(self.directory) for file in files]
        steps = [replace(step, path=self.directory / step.path) for step in plan.steps]
        options = self.options
        if group is not None and self.rules.is_mapped:  # maps and O_DIRECT lose each other's pages
            options = replace(options, mode=WriteMode.BUFFERED)
        own: dict[int, list[Extent]] = {}
        with together(self.talk, f"pieces/{self.label}"), self.told():
            busy = [number for number, file in enumerate(files) if file.pieces]
            found = fill_files([writes[number] for number in busy], options)
            own.update(zip(busy, found, strict=True))
            for number, extents in own.items():
                check_share(files[number], extents)
                self._remember(files[number], extents)
        if group is not None:
            exchanged = (
                self._mapped(steps)
                if self.rules.is_mapped
                else self._exchanged(steps, group, exchange_and_write)
            )
            for number, write in enumerate(writes):
                own.setdefault(number, []).extend(exchanged.get(write.path, []))
        return self._collected(own, len(files))

    def digest(
        self,
        plan: FilesPlan,
        numbers: Collection[int],
        group: ExchangeGroup | None,
        look: Callable[[Mapping[int, list[Extent]]], None],
    ) -> list[list[Extent]]:
        """What `run` would return for these files, and nothing written; collective.

        Empty for what maps of files would do the work of. `look` is called with what this rank
        would write, before that goes to the leader.
        """
        paths = {Path(plan.files[number].name): number for number in sorted(numbers)}
        own: dict[int, list[Extent]] = {}
        with together(self.talk, f"pieces/{self.label}"), self.told():
            own |= {n: list(plan.files[n].digested or ()) for n in paths.values()}
            rest = [n for n in paths.values() if plan.files[n].digested is None]
            writes = [plan.files[number].write_into(Path()) for number in rest]
            own.update(zip(rest, digest_files(writes, self.options), strict=True))
            for number, extents in own.items():
                self._remember(plan.files[number], extents)
        if group is not None and not self.rules.is_mapped:
            steps = [step for step in plan.steps if step.path in paths]
            for path, found in self._exchanged(steps, group, exchange_and_digest).items():
                own[paths[path]] += found
        with together(self.talk, f"look/{self.label}"), self.told():
            look(own)
        return self._collected(own, len(plan.files))

    def _remember(self, file: PlannedFile, extents: Sequence[Extent]) -> None:
        remember_share(self.directory, int(self.label.partition("/")[0]), file, extents)

    def _exchanged(
        self, steps: Sequence[ExchangeStep], group: ExchangeGroup, exchange: _Exchange
    ) -> Mapping[Path, list[Extent]]:
        try:
            with together(self.talk, f"exchange/{self.label}"), self.told():
                if group.gloo in _broken:
                    raise RankError(
                        "the exchange of the save before this one broke off, and this one was "
                        "queued on the same connections; save again"
                    )
                return exchange(steps, self.options, group=group.gloo)
        except CheckpointError:
            _broken.add(group.gloo)
            drop_exchange_group(group.gloo)
            raise

    def _mapped(self, steps: Sequence[ExchangeStep]) -> Mapping[Path, list[Extent]]:
        with together(self.talk, f"copied/{self.label}"), self.told():
            copy_mapped(steps, self.options)
        with together(self.talk, f"digested/{self.label}"), self.told():
            return digest_mapped(steps, self.options)

    def _collected(self, own: Mapping[int, list[Extent]], count: int) -> list[list[Extent]]:
        """The extents of all writers at the leader; empty elsewhere."""
        packed = msgspec.msgpack.encode({n: pack_records(found) for n, found in own.items()})
        leader, *others = self.rules.writers
        announced: list[_Records] = []
        blobs = [packed]
        if others:
            with together(self.talk, f"records/{self.label}"), self.told():
                if self.talk.rank == leader:
                    announced = self._make_room(others)
                elif self.talk.rank in others:
                    self._leave_records(packed, others.index(self.talk.rank))
            with together(self.talk, f"records-read/{self.label}"), self.told():
                if self.talk.rank == leader:
                    blobs += self._read_records(announced)
        extents: list[list[Extent]] = [[] for _ in range(count)]
        if self.talk.rank == leader:
            for rank, blob in zip(self.rules.writers, blobs, strict=True):
                for number, records in msgspec.msgpack.decode(blob, type=dict[int, bytes]).items():
                    extents[number] += unpack_records(records, f"rank {rank}")
        return extents

    def _leave_records(self, packed: bytes, place: int) -> None:
        """Write this rank's records into the region that the leader gives it."""
        name = f"records-of/{self.label}"
        digest = bytes.fromhex(digest_of(packed))
        self.talk.post(f"{name}/{self.talk.rank}", _REGION.pack(len(packed), digest))
        (length,) = _LENGTH.unpack(self.talk.fetch(f"{name}/length", self.rules.leader))
        descriptor = fileops.open_file(self.directory / RECORDS_NAME, os.O_WRONLY)
        try:
            fileops.write_at(descriptor, packed, place * length)
        finally:
            fileops.close_file(descriptor)

    def _make_room(self, others: Sequence[int]) -> list[_Records]:
        """Make the file, with a region for each of the others; no page has two of them."""
        name = f"records-of/{self.label}"
        found = [_REGION.unpack(self.talk.fetch(f"{name}/{rank}", rank)) for rank in others]
        page = self.rules.page_nbytes
        length = -(-max(nbytes for nbytes, _ in found) // page) * page
        path = self.directory / RECORDS_NAME
        fileops.close_file(fileops.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self.talk.post(f"{name}/length", _LENGTH.pack(length))
        return [
            _Records(rank=rank, start=place * length, nbytes=nbytes, digest=digest.hex())
            for place, (rank, (nbytes, digest)) in enumerate(zip(others, found, strict=True))
        ]

    def _read_records(self, announced: Sequence[_Records]) -> Iterator[bytes]:
        """What the others left, and remove it; read through a fresh open, once all are done."""
        path = self.directory / RECORDS_NAME
        with open(path, "rb") as file:
            for records in announced:
                file.seek(records.start)
                blob = file.read(records.nbytes)
                if digest_of(blob) != records.digest:
                    raise DamagedError(
                        f"{path}: the digests that rank {records.rank} left there read back "
                        "differently; nothing was committed; check the file system",
                        path=path,
                    )
                yield blob
        fileops.unlink(path)
