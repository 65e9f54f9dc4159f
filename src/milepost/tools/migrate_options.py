"""What a migration is asked to do, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import TypeAlias

from milepost.engine.write import WriteOptions
from milepost.errors import CheckpointError, InvalidInputError
from milepost.tools.migrate_content import Reading


class MigrateTarget(StrEnum):
    """The layout that is written."""

    TRIO = "trio"
    DIRECTORY = "directory"
    SINGLE_FILE = "single-file"
    """Back into one file, also from a trio."""


class Search(Enum):
    """Where checkpoints are looked for in a directory that is given."""

    TOP = "top"
    RECURSIVE = "recursive"


class Original(Enum):
    """What becomes of the source once what was written is proven to hold all of it."""

    KEEP = "keep"
    REMOVE = "remove"


class Existing(Enum):
    """What is done where the target is there already."""

    COMPARE = "compare"
    """Nothing is written: the same content is passed over, another is reported."""
    ERROR = "error"
    OVERWRITE = "overwrite"


class Backup(Enum):
    """What is removed or replaced is gone, or is kept as `<name>.bak`."""

    NONE = "none"
    KEEP = "keep"


class Proof(Enum):
    """When what was written is read again and compared with the source, bit by bit."""

    BEFORE_REMOVING = "before-removing"
    ALWAYS = "always"


class MigrateMode(Enum):
    WRITE = "write"
    DRY_RUN = "dry-run"
    """Every check of the real run, and no write: it says what that run would."""


class Outcome(StrEnum):
    """What came of one source."""

    MIGRATED = "migrated"
    PLANNED = "planned"
    SKIPPED = "skipped"
    MISMATCH = "mismatch"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `migrate`, apart from its paths."""

    to: MigrateTarget = MigrateTarget.TRIO
    original: Original = Original.KEEP
    existing: Existing = Existing.COMPARE
    backup: Backup = Backup.NONE
    proof: Proof = Proof.BEFORE_REMOVING
    mode: MigrateMode = MigrateMode.WRITE
    reading: Reading = field(default_factory=Reading)
    options: WriteOptions = field(default_factory=WriteOptions)

    def __post_init__(self) -> None:
        removes = self.original is Original.REMOVE or self.existing is Existing.OVERWRITE
        if self.backup is Backup.KEEP and not removes:
            raise InvalidInputError(
                "a backup is of what is removed or replaced: ask for that as well (in place, or "
                "overwrite), or leave the backup out"
            )
        if self.to is MigrateTarget.DIRECTORY and self.existing is Existing.OVERWRITE:
            raise InvalidInputError(
                "overwrite: a checkpoint directory is never replaced by a migration; remove it "
                "first, or write elsewhere"
            )

    @property
    def writes(self) -> bool:
        return self.mode is MigrateMode.WRITE

    @property
    def proves(self) -> bool:
        return self.proof is Proof.ALWAYS or self.original is Original.REMOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What was done, or would be, with one source.

    `target` is the stem of a trio, a file or a directory; `files` what makes it up. `nbytes` is
    what was written, or about what would be. `removed` tells that the source is gone, `backups`
    what was kept under another name. `proven` tells that the target was compared bit by bit;
    `differences` say where it is another.
    """

    source: Path
    outcome: Outcome
    target: Path | None = None
    files: tuple[Path, ...] = ()
    nbytes: int = 0
    source_nbytes: int = 0
    dialect: str | None = None
    removed: bool = False
    backups: tuple[Path, ...] = ()
    proven: bool = False
    notes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """One entry for each source, in the order in which they were found."""

    migrations: tuple[Migration, ...]

    def of(self, outcome: Outcome) -> list[Migration]:
        return [one for one in self.migrations if one.outcome is outcome]

    @property
    def ok(self) -> bool:
        return not self.of(Outcome.FAILED) and not self.of(Outcome.MISMATCH)


OnFound: TypeAlias = Callable[[Sequence[Path]], None]
"""Called with the sources before the first is tried."""

OnDone: TypeAlias = Callable[[Migration], None]
"""Called after each source, from any thread."""
