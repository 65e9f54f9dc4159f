"""Reading a file beside the weights, the same on all ranks: biases, provenance, scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import (
    CheckpointIncompleteError,
    DigestMismatchError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
)
from milepost.format import strictjson
from milepost.format.digests import digest_of
from milepost.format.manifest import FileEntry
from milepost.layouts.directory import read_manifest, unreadable
from milepost.layouts.single_file import open_archive, require_sound
from milepost.storage.fileops import PathLike


def read_sidecar(path: PathLike, name: str) -> Any | None:
    """The content of the file `name` in the checkpoint directory `path`; None when it has none.

    A `.pt` file is decoded by the safe unpickler, tensors on the CPU, a `.json` file strictly;
    others are bytes. Where the checkpoint has a manifest, the bytes are compared with its digest.

    Collective: all ranks read the file and have to find the same one. `NotFoundError` when some do
    not, `CheckpointIncompleteError` when the manifest lists it and nobody does, `MismatchError`
    when they find different ones, `DamagedError`, `UnsafePickleError` or `StorageError` when one
    cannot be read; each of them on all ranks.

    >>> read_sidecar("run/checkpoint-500", "router_balancing_biases.pt")  # doctest: +SKIP
    """
    place = Path(path) / name
    with converse() as talk:
        with together(talk, "sidecar"):
            if not name or "/" in name or "\\" in name or name.startswith("."):
                raise InvalidInputError(
                    f"sidecar {name!r}: expected the name of a file beside the weights, without a "
                    "path"
                )
            raw = _bytes_of(place)
            _compare(talk, place, raw)
        with together(talk, "decoded"):
            return None if raw is None else _decoded(place, raw)


def _bytes_of(place: Path) -> bytes | None:
    entry = _entry_of(place)
    try:
        raw = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(place, error) from error
    if entry is not None and digest_of(raw) != entry.digest and entry.records is None:
        raise DigestMismatchError(
            f"{place}: its bytes are not those that were saved; resume from an older checkpoint",
            path=place,
        )
    return raw


def _entry_of(place: Path) -> FileEntry | None:
    """What the manifest beside a file says of it; None without a manifest."""
    try:
        return read_manifest(place.parent).file(place.name)
    except NotFoundError:
        return None


def _compare(talk: Conversation, place: Path, raw: bytes | None) -> None:
    """The coordinator refuses what is not the same everywhere."""
    found = talk.gather("found", b"" if raw is None else digest_of(raw).encode())
    if not found:
        return
    absent = [rank for rank, digest in enumerate(found) if not digest]
    if len(absent) == len(found):
        if _entry_of(place) is not None:
            raise CheckpointIncompleteError(
                f"{place}: missing, though the manifest of the checkpoint lists it; copy the "
                "checkpoint again, or resume from an older one",
                path=place,
            )
        return
    if absent:
        raise NotFoundError(
            f"{place}: not there for {_named(absent)}, but for the others; all ranks must see it",
            path=place,
        )
    other = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if other:
        raise MismatchError(
            f"{place}: another file for {_named(other)} than for rank 0; give all ranks the same "
            "checkpoint"
        )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:5])
    more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _decoded(place: Path, raw: bytes) -> Any:
    match place.suffix:
        case ".pt":
            with open_archive(place, place) as archive:
                require_sound(archive, place)
                return archive.materialise(archive.tree)
        case ".json":
            return strictjson.loads(raw, where=str(place))
    return raw
