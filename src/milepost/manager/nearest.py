"""Which checkpoints a resume can choose from: those of the run, and their copies in mirrors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CheckpointError, StorageError
from milepost.layouts.directory import read_manifest
from milepost.layouts.run import RunEntry, RunListing, TornEntry, in_order, list_run
from milepost.manager.mirror import Mirror
from milepost.manager.step_choice import newer_torn, step_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed checkpoint; `place` is 0 in the run, and i in the i-th mirror."""

    entry: RunEntry
    place: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What counts, newest first, of one checkpoint the run's own before the copies.

    `torn` is what lies in the run under the name of a checkpoint that is no older than the first
    candidate. `troubles` are mirrors that cannot be looked at.
    """

    candidates: tuple[Candidate, ...]
    torn: tuple[TornEntry, ...]
    troubles: tuple[str, ...]

    def is_newest(self, number: int) -> bool:
        """Whether a training goes on from the newest state of all when it takes this candidate."""
        taken = self.candidates[number].entry
        own_id = taken.manifest.checkpoint_id
        before = (each.entry.manifest.checkpoint_id for each in self.candidates[:number])
        if any(each != own_id for each in before):
            return False
        return all(
            step_of(torn) == taken.step and _id_of(torn) in (None, own_id) for torn in self.torn
        )


def choice_of(listing: RunListing | None, mirrors: Sequence[Mirror]) -> Choice:
    """What there is to resume from. Torn copies do not count and are passed over in silence."""
    own = listing.committed if listing is not None else ()
    copies, troubles = look_at_mirrors(mirrors)
    found = [(entry, place) for place, entries in copies.items() for entry in entries]
    found = [*reversed(found), *((entry, 0) for entry in own)]  # of equals, the last is taken first
    places = {entry.path: place for entry, place in found}
    ordered = in_order((entry.name, entry.path, entry.manifest) for entry, _ in found)
    current = [Candidate(entry, places[entry.path]) for entry in ordered if not entry.superseded]
    torn = newer_torn(listing) if listing is not None else []
    if current:
        torn = [each for each in torn if step_of(each) >= current[-1].entry.step]
    return Choice(tuple(reversed(current)), tuple(torn), tuple(troubles))


def look_at_mirrors(mirrors: Sequence[Mirror]) -> tuple[dict[int, list[RunEntry]], list[str]]:
    """The committed checkpoints of each mirror, by its number from 1, and which are out of reach.

    A mirror that does not exist yet is empty.
    """
    found: dict[int, list[RunEntry]] = {}
    troubles: list[str] = []
    for place, mirror in enumerate(mirrors, 1):
        try:
            mirror.directory.stat()
            found[place] = list(list_run(mirror.directory).committed)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (CheckpointError, OSError) as error:
            troubles.append(f"{mirror.directory}: {error}")
            logger.warning("mirror %s cannot be looked at: %s", mirror.directory, error)
    return found, troubles


def require_mirrors(run: Path, choice: Choice) -> None:
    """`StorageError` when nothing else is left and a mirror cannot be looked at."""
    if choice.troubles:
        raise StorageError(
            f"{run}: nothing to resume from here, and what the mirrors hold cannot be ruled out: "
            f"{'; '.join(choice.troubles)}; see to the file system, or leave the mirror out",
            path=run,
        )


def generations_in(mirrors: Sequence[Mirror]) -> Iterator[int]:
    """The generations of all copies, which a new one must be above."""
    for entries in look_at_mirrors(mirrors)[0].values():
        yield from (entry.manifest.generation for entry in entries)


def _id_of(torn: TornEntry) -> str | None:
    """The id of a torn checkpoint; None when that cannot be read."""
    try:
        return read_manifest(torn.path).checkpoint_id
    except (CheckpointError, OSError):
        return None
