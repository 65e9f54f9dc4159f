"""Parts of frozen weights that an earlier checkpoint of the run has already: linked, not written.

A link is a hard link, or a clone (`milepost.storage.links`) where there can be none.

Content decides, never names or version counters: what would be written is hashed, and compared with
the bytes of the earlier file, or with their recorded digests. All ranks follow one decision, and a
part is linked in every copy of a checkpoint or in none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from milepost.checkpointing.files import FilesPlan, PlannedFile
from milepost.checkpointing.led_copy import LedCopy
from milepost.checkpointing.rank_write import ExchangeGroup, RankWrite
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.verify import find_bad_extents
from milepost.engine.write import WriteOptions
from milepost.errors import CheckpointError
from milepost.format.digests import Extent
from milepost.format.manifest import MANIFEST_NAME, FileEntry
from milepost.layouts.directory import read_manifest
from milepost.layouts.directory_verify import recorded_extents
from milepost.layouts.run import list_run
from milepost.plan.shares import WriteRules

Sources: TypeAlias = dict[int, str]
"""By the number of a part: the file that may be equal to it, relative to the run directory."""


class Unchanged(Enum):
    """What a save does with parts of frozen weights that an earlier checkpoint has already."""

    LINK_VERIFIED = "link-verified"
    """They become hard links to its files, or else clones, which are read again first: nothing that
    was damaged on disk meanwhile is linked, but written anew."""
    LINK = "link"
    """The same by the recorded digests, while the file has its size and is not newer than its
    manifest: nothing is read, and damage that the disk did by itself is not seen."""
    WRITE = "write"
    """They are written again, so that each checkpoint has bytes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The parts that became links: names, bytes in all, and at leaders the extents by number."""

    names: tuple[str, ...] = ()
    nbytes: int = 0
    extents: Mapping[int, list[Extent]] = field(default_factory=dict)

    def unwritten(self, plan: FilesPlan) -> FilesPlan:
        """`plan` with the same files, of which those that are links are not written."""
        paths = {Path(name) for name in self.names}
        return replace(
            plan,
            files=tuple(
                replace(file, pieces=()) if file.name in self.names else file for file in plan.files
            ),
            steps=tuple(step for step in plan.steps if step.path not in paths),
        )

    def to_create(self, files: Iterable[PlannedFile]) -> list[PlannedFile]:
        return [file for file in files if file.name not in self.names]


def linkable_nbytes(plan: FilesPlan, unchanged: Unchanged) -> int:
    """Bytes of all parts of frozen weights, which later saves can link; none when they are
    not to. The same on all ranks."""
    if unchanged is Unchanged.WRITE:
        return 0
    return sum(file.nbytes for file in plan.files if file.header is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linking:
    """One save that may link. `led` is the number of the copy that this rank leads, if any; its
    `copy` is open, so that the run's lease is held. `told` is as for `RankWrite`."""

    talk: Conversation
    rules: Sequence[WriteRules]
    plans: Sequence[FilesPlan]
    groups: Sequence[ExchangeGroup | None]
    options: WriteOptions
    copy: LedCopy
    led: int | None
    unchanged: Unchanged
    told: Callable[[], AbstractContextManager[None]]

    @property
    def run(self) -> Path:
        return self.copy.target.parent

    def link(self, parent_id: str | None) -> Linked:
        """Find equal parts and link them; collective. Leaders know `parent_id`, the checkpoint that
        this one descends from."""
        sources = self._agree_on_sources(parent_id)
        if not sources[0]:
            return Linked()
        extents: dict[int, list[Extent]] = {}
        differing: set[int] = set()
        for number, own in enumerate(sources):
            found, unlike = self._compare(number, own)
            differing |= unlike
            extents = found if number == self.led else extents
        same = sources[0].keys() - self._of_all("unlike", differing)
        linked = self._link({} if self.led is None else sources[self.led], same)
        files = [self.plans[0].files[number] for number in sorted(linked)]
        return Linked(
            names=tuple(file.name for file in files),
            nbytes=sum(file.nbytes for file in files),
            extents={number: extents[number] for number in linked if number in extents},
        )

    def _agree_on_sources(self, parent_id: str | None) -> list[Sources]:
        """For each copy, the files that may be equal; for parts that have one in every copy."""
        own: Sources = {}
        with together(self.talk, "sources"), self.told():
            if self.led is not None:
                own = find_sources(self.run, self.plans[self.led].files, parent_id)
        reports = self.talk.gather("link-sources", json.dumps(own).encode())
        told = None
        if self.talk.is_coordinator:
            found = [json.loads(reports[rules.leader]) for rules in self.rules]
            common = set(found[0]).intersection(*found)
            told = json.dumps([{n: each[n] for n in sorted(common)} for each in found]).encode()
        agreed = json.loads(self.talk.broadcast("link-sources-of-all", told))
        return [{int(number): name for number, name in each.items()} for each in agreed]

    def _compare(self, number: int, sources: Sources) -> tuple[dict[int, list[Extent]], set[int]]:
        """Hash what this rank would write of one copy: the extents of all at its leader, and the
        parts that this rank found to differ."""
        differing: set[int] = set()

        def look(own: Mapping[int, list[Extent]]) -> None:
            if self.unchanged is Unchanged.LINK_VERIFIED:
                numbers = {self.run / name: number for number, name in sources.items()}
                jobs = {path: own.get(n, []) for path, n in numbers.items()}
                bad = find_bad_extents(jobs, threads=self.options.threads)
                differing.update(numbers[each.path] for each in bad)

        write = RankWrite(
            self.talk,
            self.rules[number],
            replace(self.options, on_bytes=None),
            self.copy.directory,
            label=f"{number}/compared",
            told=self.told,
        )
        found = write.digest(self.plans[number], sources, self.groups[number], look)
        if number != self.led:
            return {}, differing
        for part, name in sources.items():
            nbytes = self.plans[number].files[part].nbytes
            is_same = _tiles(found[part], nbytes) and (
                self.unchanged is Unchanged.LINK_VERIFIED
                or _as_recorded(self.run, name, found[part])
            )
            differing |= set() if is_same else {part}
        return {part: found[part] for part in sources}, differing

    def _link(self, sources: Sources, wanted: set[int]) -> set[int]:
        """Link in each copy; a part that cannot be linked in one of them is linked in none."""
        failed: set[int] = set()
        made = {part: self.plans[0].files[part].name for part in wanted & sources.keys()}
        with together(self.talk, "links"), self.told():
            for part, name in made.items():
                if not self.copy.link(self.run / sources[part], name):
                    failed.add(part)
        refused = self._of_all("no-links", failed)
        with together(self.talk, "links-kept"), self.told():
            for part in (refused - failed) & made.keys():
                self.copy.take_back(made[part])
        return wanted - refused

    def _of_all(self, name: str, numbers: set[int]) -> set[int]:
        """The numbers that any rank names; collective."""
        reports = self.talk.gather(name, json.dumps(sorted(numbers)).encode())
        every = {number for raw in reports for number in json.loads(raw)}
        told = json.dumps(sorted(every)).encode() if self.talk.is_coordinator else None
        return set(json.loads(self.talk.broadcast(f"{name}-of-all", told)))


def find_sources(run: Path, files: Sequence[PlannedFile], parent_id: str | None) -> Sources:
    """Files of the newest checkpoint of `run`, or else of the parent, with the size and header of
    a part of frozen weights."""
    listing = list_run(run)
    newest = [listing.newest] if listing.newest is not None else []
    parents = [e for e in listing.committed if e.manifest.checkpoint_id == parent_id]
    found: Sources = {}
    for entry in (*newest, *parents):
        for number, file in enumerate(files):
            if file.header is None or number in found:
                continue
            for other in entry.manifest.files:
                if other.nbytes == file.nbytes and _begins_with(
                    entry.path / other.name, file.header
                ):
                    found[number] = f"{entry.path.name}/{other.name}"
                    break
    return found


def _begins_with(path: Path, header: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(header)) == header
    except OSError:
        return False


def _tiles(extents: Iterable[Extent], nbytes: int) -> bool:
    covered = 0
    for extent in sorted(extents, key=lambda extent: extent.start):
        if extent.start != covered:
            return False
        covered = extent.end
    return covered == nbytes


def _as_recorded(run: Path, name: str, extents: Iterable[Extent]) -> bool:
    """Whether a file has these digests by what was recorded, and no sign of a change since."""
    checkpoint = run / name.partition("/")[0]
    own = name.partition("/")[2]
    ordered = sorted(extents, key=lambda extent: extent.start)
    try:
        entry = read_manifest(checkpoint).file(own)
        status = (run / name).stat()
        committed_ns = (checkpoint / MANIFEST_NAME).stat().st_mtime_ns
        if entry is None or status.st_size != entry.nbytes or status.st_mtime_ns > committed_ns:
            return False
        return _has(checkpoint, entry, ordered)
    except (CheckpointError, OSError):
        return False


def _has(checkpoint: Path, entry: FileEntry, extents: Sequence[Extent]) -> bool:
    recorded = recorded_extents(checkpoint, entry)
    if not recorded:
        return len(extents) == 1 and extents[0].digest.hex() == entry.digest
    return recorded == list(extents)
