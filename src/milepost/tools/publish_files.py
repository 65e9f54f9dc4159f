"""What of a checkpoint is published, checked before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from milepost._env import env_int
from milepost.checkpointing.load import Verify
from milepost.errors import DamagedError, InvalidInputError
from milepost.format.digests import digest_of
from milepost.format.manifest import (
    DIGESTS_NAME,
    MANIFEST_NAME,
    FileEntry,
    encode_manifest,
    unknown_keys,
)
from milepost.layouts.checkpoint import Checkpoint, Severity
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.huggingface import HuggingFaceCheckpoint
from milepost.layouts.tensor_set import TensorSet
from milepost.storage.staging import STAGING_PREFIX
from milepost.tools.carried import Carried, carried_files
from milepost.tools.export import TrainingState
from milepost.tools.sources import tensor_set_of

RESUME_ONLY = ("resume_adapter.json", "resume_adapter", "reference_logps.pt")
"""What only a resumed run reads; not part of the model."""

_MODULES = "modules.json"


@dataclass(slots=True, kw_only=True)
class Publication:
    """Files by their name in the repository: those that lie on disk, and those made for it."""

    paths: dict[str, Path] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        found = {name: path.stat().st_size for name, path in self.paths.items()}
        found |= {name: len(data) for name, data in self.documents.items()}
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes | None:
        """The content of one small file; None when it is not published."""
        if name in self.documents:
            return self.documents[name]
        return self.paths[name].read_bytes() if name in self.paths else None

    def put(self, name: str, data: bytes) -> None:
        """Publish `data` under `name`, in place of a file of that name."""
        self.paths.pop(name, None)
        self.documents[name] = data


def openable(path: Path) -> DirectoryCheckpoint | HuggingFaceCheckpoint:
    """The checkpoint at `path`, if it is one that can be published as it lies."""
    if path.name.startswith(STAGING_PREFIX):
        raise InvalidInputError(f"{path}: a save that was never committed", path=path)
    checkpoint = Checkpoint.open(path)
    is_directory = isinstance(checkpoint, DirectoryCheckpoint | HuggingFaceCheckpoint)
    if not is_directory or not checkpoint.path.is_dir():
        raise InvalidInputError(
            f"{path}: a {checkpoint.layout.value} checkpoint is no model that the Hub can load; "
            f"export it first: milepost export {path} OUT",
            path=path,
        )
    assert isinstance(checkpoint, DirectoryCheckpoint | HuggingFaceCheckpoint)
    return checkpoint


def collect(
    checkpoint: DirectoryCheckpoint | HuggingFaceCheckpoint, training_state: TrainingState
) -> Publication:
    """The files to publish. Names that begin with `_` or `.` never are.

    `DamagedError` when one is absent or cut short, `FormatError` for slices per rank,
    `InvalidInputError` when a sidecar that the weights need is not there.
    """
    carried = carried_files(checkpoint)
    weights = tensor_set_of(checkpoint)
    if weights is None or not weights.tensors:
        raise InvalidInputError(f"{checkpoint.path}: holds no weights", path=checkpoint.path)
    found = Publication(documents=dict(carried.documents), notes=list(carried.notes))
    if training_state is TrainingState.INCLUDE:
        found.paths = dict(_everything(checkpoint))
    else:
        found.paths = {**carried.paths, **dict(_weight_files(checkpoint, weights, carried))}
    found.paths = {n: p for n, p in found.paths.items() if n not in found.documents and _public(n)}
    if training_state is TrainingState.LEAVE_OUT:
        for name in [n for n in found.paths if _is_resume_only(n)]:
            del found.paths[name]
    _check_sizes(checkpoint, found)
    return found


def _public(name: str) -> bool:
    return not any(part.startswith(("_", ".")) for part in PurePosixPath(name).parts)


def _is_resume_only(name: str) -> bool:
    first = PurePosixPath(name).parts[0]
    return first in RESUME_ONLY or first.startswith("prefetch_pending")


def _weight_files(
    checkpoint: Checkpoint, weights: TensorSet, carried: Carried
) -> Iterator[tuple[str, Path]]:
    """The parts of the model, their index, and the weights of modules around it."""
    for part in weights.part_names:
        yield part, weights.directory / part
    if weights.index is not None:
        yield weights.index_path.name, weights.index_path
    if isinstance(checkpoint, DirectoryCheckpoint):
        others = ["training", *(e.prefix for e in checkpoint.manifest.models.values() if e.prefix)]
        for entry in checkpoint.manifest.files:
            own = "/" in entry.name and not any(entry.name.startswith(f"{o}/") for o in others)
            if entry.role == "weights" and own:
                yield entry.name, checkpoint.path / entry.name
        return
    for directory in _module_directories(carried.paths.get(_MODULES)):
        for place in sorted((checkpoint.path / directory).glob("*.safetensors")):
            yield f"{directory}/{place.name}", place


def _module_directories(modules: Path | None) -> list[str]:
    """Directories of the modules of a sentence-transformers model, which may hold weights."""
    if modules is None:
        return []
    listed = json.loads(modules.read_bytes())
    paths = [str(module.get("path") or "") for module in listed if isinstance(module, Mapping)]
    return [path for path in paths if path and "/" not in path and ".." not in path]


def _everything(checkpoint: Checkpoint) -> Iterator[tuple[str, Path]]:
    if isinstance(checkpoint, DirectoryCheckpoint):
        for entry in checkpoint.manifest.files:
            yield entry.name, checkpoint.path / entry.name
        return
    for place in sorted(checkpoint.path.rglob("*")):
        name = place.relative_to(checkpoint.path).as_posix()
        if place.is_file() and not name.startswith("checkpoint-"):
            yield name, place


def _check_sizes(checkpoint: Checkpoint, found: Publication) -> None:
    if not isinstance(checkpoint, DirectoryCheckpoint):
        return
    bad = [f"{entry.name} {how}" for entry, how in checkpoint.damage if entry.name in found.paths]
    if bad:
        raise DamagedError(
            f"{checkpoint.path}: {len(bad)} files are not as they were saved: {'; '.join(bad[:5])};"
            " nothing was published; publish another checkpoint, or copy this one again",
            path=checkpoint.path,
        )


def verify_published(checkpoint: Checkpoint, found: Publication, verify: Verify) -> None:
    """`DamagedError` when bytes that would be published are not those that were saved."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        if verify is Verify.SIZES:
            return
        checkpoint = _only(checkpoint, found)
    elif verify is not Verify.SIZES:
        found.notes.append("no digests are recorded beside these weights: headers were checked")
    report = checkpoint.verify(threads=env_int("MILEPOST_VERIFY_THREADS"))
    errors = [
        problem.message
        for problem in report.problems
        if problem.severity is Severity.ERROR or problem.file in found.paths
    ]
    if errors:
        raise DamagedError(
            f"{checkpoint.path}: {len(errors)} things are wrong: {'; '.join(errors[:3])}; nothing "
            "was published; use another checkpoint",
            path=checkpoint.path,
        )


def _only(checkpoint: DirectoryCheckpoint, found: Publication) -> DirectoryCheckpoint:
    """A handle whose manifest lists what is published, and all weights at the root."""
    manifest = checkpoint.manifest
    keys = checkpoint.model_keys()[:1]
    narrow = DirectoryCheckpoint(checkpoint.path)
    narrow.manifest = msgspec.structs.replace(
        manifest,
        files=[
            entry
            for entry in manifest.files
            if entry.name in found.paths
            or entry.name == DIGESTS_NAME
            or (entry.role == "weights" and "/" not in entry.name)
        ],
        models={key: manifest.models[key] for key in keys},
        state={k: e for k, e in manifest.state.items() if f"training/{e.stem}" in _stems(found)},
    )
    return narrow


def _stems(found: Publication) -> set[str]:
    return {name.partition(".")[0] for name in found.paths}


def sealed_manifest(checkpoint: DirectoryCheckpoint, documents: Mapping[str, bytes]) -> bytes:
    """The manifest of the same checkpoint with other documents (the card) beside its tensors."""
    place = checkpoint.path / MANIFEST_NAME
    files = [entry for entry in checkpoint.manifest.files if entry.name not in documents]
    files += [
        FileEntry(name=name, nbytes=len(data), role="info", digest=digest_of(data))
        for name, data in documents.items()
    ]
    manifest = msgspec.structs.replace(checkpoint.manifest, files=files)
    return encode_manifest(manifest, unknown_keys(place.read_bytes(), str(place)))


def document_of(found: Publication, name: str) -> dict[str, Any]:
    """A JSON object among the files; empty when there is none."""
    raw = found.read(name)
    document = json.loads(raw) if raw is not None else {}
    return document if isinstance(document, dict) else {}
