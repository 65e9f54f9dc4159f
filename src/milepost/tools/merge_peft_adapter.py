"""The adapters of an offline merge, opened: configuration, headers, digest, and their base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from milepost.adapters.base import differs, directory_identity
from milepost.adapters.config import (
    AdapterConfig,
    read_adapter_config,
    refuse_changed_base,
    refuse_unmergeable,
)
from milepost.adapters.kinds import ADAPTER_CONFIG, adapter_directory, adapter_file
from milepost.errors import CheckpointError, CheckpointIncompleteError, InvalidInputError
from milepost.hf.foreign_calls import attempt
from milepost.layouts.directory import read_manifest
from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.source import Source, open_source

_PIECE_NBYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAdapter:
    """An adapter and the factor of its difference. `digest` is that of its file of tensors."""

    directory: Path
    weight: float
    config: AdapterConfig
    source: Source
    digest: str

    @property
    def where(self) -> str:
        """What messages call its configuration."""
        return str(self.directory / ADAPTER_CONFIG)


def weighted_path(text: str) -> tuple[Path, float]:
    """`DIR` or `DIR:WEIGHT`; what follows the last colon is a weight when it is a number.

    >>> weighted_path("runs/a:0.5")[1], weighted_path("runs/b")[1]
    (0.5, 1.0)
    """
    path, colon, last = text.rpartition(":")
    try:
        return (Path(path), float(last)) if colon and path else (Path(text), 1.0)
    except ValueError:
        return Path(text), 1.0


def open_adapter(path: PathLike, weight: float = 1.0) -> OpenedAdapter:
    """The adapter in a directory; in a checkpoint that it was merged into, the one beside it.

    `CheckpointIncompleteError` without a configuration or tensors, `InvalidInputError` for a kind
    that cannot be folded into weights. Reads headers, and the file once for its digest.
    """
    directory = adapter_directory(Path(path)) or Path(path)
    config = read_adapter_config(directory)
    where = str(directory / ADAPTER_CONFIG)
    refuse_unmergeable(config, where=where)
    refuse_changed_base(config, where=where)
    file = adapter_file(directory)
    if file is None:
        raise CheckpointIncompleteError(
            f"{directory}: there is an {ADAPTER_CONFIG}, but no adapter_model.safetensors; copy it "
            "from where the adapter was saved",
            path=directory,
        )
    return OpenedAdapter(
        directory=directory,
        weight=weight,
        config=config,
        source=open_source(file),
        digest=_digest(file),
    )


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            hasher.update(piece)
    return f"xxh3-128:{hasher.hexdigest()}"


def base_of(adapters: Sequence[OpenedAdapter], given: PathLike | None) -> Path:
    """The directory of the base: the one `given`, or that which all adapters name.

    A name that is no directory is looked for beside the adapter and in the local cache of the Hub;
    nothing is downloaded. `InvalidInputError` where it is not found.
    """
    if given is not None:
        return Path(given)
    named = {adapter.config.base for adapter in adapters}
    if len(named) > 1:
        listed = ", ".join(f"{a.config.base} ({a.directory})" for a in adapters)
        raise InvalidInputError(
            f"the adapters name different bases: {listed}; say which to merge into (--base-model)"
        )
    (name,) = named
    if name is None:
        raise InvalidInputError(
            f"{adapters[0].where}: names no base (base_model_name_or_path); give --base-model"
        )
    for place in (Path(name), adapters[0].directory / name):
        if place.exists():
            return place
    revision = adapters[0].config.document.get("revision")
    cached = _cached(name, revision if isinstance(revision, str) else None)
    if cached is None:
        raise InvalidInputError(
            f"{adapters[0].where}: its base {name} is neither a directory here nor in the local "
            "cache of the Hub; download it, or give --base-model"
        )
    return cached


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    found, _ = attempt(partial(snapshot_download, name, revision=revision, local_files_only=True))
    return None if found is None else Path(found)


def refuse_other_base(adapter: OpenedAdapter, base: Source) -> None:
    """`InvalidInputError` when the adapter's manifest says that it was trained on other weights."""
    try:
        models = read_manifest(adapter.directory).models.values()
    except (CheckpointError, OSError):
        return
    saved = next((m.adapter.base for m in models if m.adapter is not None), {})
    difference = differs(saved, directory_identity(base.path))
    if difference is not None:
        raise InvalidInputError(
            f"{adapter.directory}: it was trained on another base than {base.path}: {difference}; "
            "give the one it was trained on (--base-model)"
        )


def refuse_merged_twice(adapter: OpenedAdapter, base: Source) -> None:
    """`InvalidInputError` when the base has this adapter folded in already."""
    earlier = base.checkpoint.info.extra.get("provenance") or {}
    known = {entry.get("digest") for entry in earlier.get("adapters", ())}
    beside = adapter_directory(base.path) if base.path.is_dir() else None
    file = None if beside is None else adapter_file(beside)
    if file is not None:
        known.add(_digest(file))
    if adapter.digest in known:
        raise InvalidInputError(
            f"{base.path}: the adapter {adapter.directory} is folded into these weights already "
            "(its digest says so), and folding it in again would add it twice; give the base that "
            "it was trained on (--base-model)"
        )
