"""One copy of a checkpoint in the hands of its leader: staged, completed, published, withdrawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from milepost.checkpointing.files import PlannedFile
from milepost.checkpointing.save_phases import Phases
from milepost.checkpointing.seal import seal
from milepost.checkpointing.target import committed_at, taken
from milepost.checkpointing.world import host_name
from milepost.engine.write import Durability, WriteOptions, create_files
from milepost.errors import CheckpointError, MismatchError
from milepost.format.digests import Extent
from milepost.format.manifest import (
    Manifest,
)
from milepost.layouts.directory import read_manifest
from milepost.storage import fileops
from milepost.storage.links import link_committed, sync_committed
from milepost.storage.staging import StagingDirectory, move_to_incomplete


class LedCopy:
    """The copy at `target`. All ranks make one for its `directory`; only its leader goes on."""

    def __init__(self, target: Path, checkpoint_id: str, options: WriteOptions) -> None:
        self.target, self.options = target, options
        self.notes: list[str] = []
        self._staging = StagingDirectory(
            target,
            unique=f"{checkpoint_id}-{target.name}",
            owns=lambda path: holds(path, checkpoint_id),
        )
        self._is_open = self._is_complete = False

    @property
    def directory(self) -> Path:
        """Where the files are written."""
        return self._staging.path

    def open(self, stack: ExitStack) -> None:
        """Take the run's lease until `stack` ends; nothing when that is done."""
        if not self._is_open:
            stack.enter_context(self._staging)
            self._is_open = True

    def link(self, source: Path, name: str) -> bool:
        """Make the file `name` a link to a committed one, or a clone; False where it cannot be."""
        _make_below(self.directory, name.rpartition("/")[0])
        place = self.directory / name
        if not link_committed(source, place):
            return False
        if self.options.durability is Durability.DURABLE:  # the save that wrote it may not be
            sync_committed(place)
        return True

    def take_back(self, name: str) -> None:
        """Take back what `link` did."""
        fileops.unlink(self.directory / name)

    def stage(self, stack: ExitStack, files: Sequence[PlannedFile]) -> None:
        """Take the run's lease until `stack` ends, and create the files with their space."""
        self.open(stack)
        for parent in sorted({file.name.rpartition("/")[0] for file in files} - {""}):
            _make_below(self.directory, parent)
        create_files([file.write_into(self.directory) for file in files])

    def check_alike(self, *, replaces: bool) -> None:
        """Refuse when another node found at its target what is not so here."""
        if replaces != (committed_at(self.target) is not None):
            raise MismatchError(
                f"{self.target} on {host_name()}: "
                + ("no checkpoint is there" if replaces else "a checkpoint is there")
                + ", unlike on the node of rank 0; remove what is there, or save another step"
            )

    def complete(
        self,
        manifest: Manifest,
        files: Sequence[PlannedFile],
        extents: Sequence[list[Extent]],
        phases: Phases,
    ) -> None:
        """Write what comes last, the digests and the manifest; nothing when that is done."""
        if self._is_complete:
            return
        manifest.phases = dict(phases.seconds)
        manifest.phase_nbytes = dict(phases.nbytes)
        seal(self.directory, manifest, files, extents, durability=self.options.durability)
        self._is_complete = True

    def publish(self, *, replaces: bool) -> None:
        """Give it its name."""
        if replaces:
            self._staging.commit_replacing()
            return
        if os.path.lexists(self.target):  # torn: it does not count, its data is kept
            found = committed_at(self.target)
            if found is not None:  # by another writer, before this one had the lease
                raise taken(self.target, found)
            place = move_to_incomplete(self.target.parent, self.target.name)
            self.notes.append(f"{self.target} was no committed checkpoint; moved to {place}")
        self._staging.commit()

    def withdraw(self) -> None:
        """Take its name back, if it has it; what it replaced is there again."""
        self._staging.withdraw()


def holds(path: Path, checkpoint_id: str) -> bool:
    """Whether the checkpoint with this id is at `path`."""
    try:
        return read_manifest(path).checkpoint_id == checkpoint_id
    except CheckpointError:
        return False


def _make_below(directory: Path, relative: str) -> None:
    path = directory
    for part in filter(None, relative.split("/")):
        path = path / part
        if not path.is_dir():
            fileops.make_directory(path)
