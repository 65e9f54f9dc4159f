"""The last two files of a checkpoint directory: digests of everything else, and the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from milepost.checkpointing.files import PlannedFile, file_entries
from milepost.engine.write import Durability
from milepost.format.digests import Extent, digest_of
from milepost.format.manifest import (
    DIGESTS_NAME,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
)
from milepost.storage import atomic, fileops


def seal(
    directory: Path,
    manifest: Manifest,
    files: Sequence[PlannedFile],
    extents: Sequence[Sequence[Extent]],
    *,
    durability: Durability,
) -> dict[str, int]:
    """List the written `files` in `manifest` and write it; bytes of each file of the directory.

    `extents` are what was written of each file, by whichever rank. Refused when they do not tile
    it.
    """
    is_durable = durability is Durability.DURABLE
    write = atomic.write_new_file if is_durable else atomic.write_unsynced_file
    entries, records = file_entries(files, extents)
    if records:
        place = directory / DIGESTS_NAME
        fileops.make_directories(place.parent)
        write(place, records)
        digest = digest_of(records)
        entries.append(
            FileEntry(name=DIGESTS_NAME, nbytes=len(records), role="state", digest=digest)
        )
    manifest.files = entries
    document = encode_manifest(manifest)
    write(directory / MANIFEST_NAME, document)
    return {**{entry.name: entry.nbytes for entry in entries}, MANIFEST_NAME: len(document)}
