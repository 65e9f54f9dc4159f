"""Writing a checkpoint directory out of any checkpoint, its weights streamed."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from milepost.checkpointing.files import PlannedFile, document_file, file_entries
from milepost.checkpointing.provenance import writer
from milepost.engine.source import BytesSource
from milepost.engine.write import Durability, Piece, WriteOptions, write_files
from milepost.errors import CheckpointError, InvalidInputError
from milepost.format.digests import digest_of
from milepost.format.dtypes import DTYPES
from milepost.format.manifest import (
    DIGESTS_NAME,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ModelEntry,
    Role,
    StateEntry,
    encode_manifest,
)
from milepost.format.tree import encode
from milepost.hf.aux_files import CONFIG
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import PRIMARY, DirectoryCheckpoint, check_step_name, read_manifest
from milepost.plan.parts import parse_nbytes, plan_parts
from milepost.storage import atomic, fileops
from milepost.storage.space import require_space, storage_error
from milepost.storage.staging import StagingDirectory
from milepost.tools.carried import Carried, carried_files
from milepost.tools.export import ExportReport, ExportTarget, TrainingState, plain_metrics
from milepost.tools.sources import FileRange, tensor_set_of, weight_sources


def export_directory(
    checkpoint: Checkpoint,
    target: Path,
    *,
    training_state: TrainingState,
    max_shard_size: int | str,
    options: WriteOptions,
) -> ExportReport:
    """See `export_checkpoint`."""
    carried = carried_files(checkpoint)
    stem = _stem(checkpoint)
    files = _weight_files(checkpoint, stem, parse_nbytes(max_shard_size))
    manifest = _manifest(checkpoint, carried, stem)
    check_step_name(target, manifest.step)
    if training_state is TrainingState.INCLUDE:
        files += _state_files(checkpoint, manifest, carried, {file.name for file in files})
    for name, path in carried.paths.items():
        role: Role = "weights" if name in carried.needs else "info"
        files.append(_copied_file(name, path, role))
    files += [document_file(name, data, "info") for name, data in carried.documents.items()]
    manifest.notes = list(carried.notes)
    nbytes = publish_directory(target, files, manifest, options)
    return ExportReport(
        path=target,
        target=ExportTarget.DIRECTORY,
        files=tuple(sorted([*(entry.name for entry in manifest.files), MANIFEST_NAME])),
        nbytes=nbytes,
        notes=tuple(carried.notes),
    )


def _stem(checkpoint: Checkpoint) -> str:
    """The stem of the weights: that of the source where it is one that loaders know."""
    tensors = tensor_set_of(checkpoint)
    known = tensors is not None and tensors.stem in ("model", "adapter_model")
    return tensors.stem if tensors is not None and known else "model"


def _weight_files(checkpoint: Checkpoint, stem: str, max_part_nbytes: int) -> list[PlannedFile]:
    tensors = checkpoint.tensors()
    foreign = [info for info in tensors.values() if info.dtype not in DTYPES]
    if foreign:
        raise InvalidInputError(
            f"{checkpoint.path}: {foreign[0].name}: safetensors cannot hold {foreign[0].dtype} "
            f"({len(foreign)} such tensors); cast them before exporting"
        )
    sources = weight_sources(checkpoint)
    plan = plan_parts(
        ((info.name, info.dtype, info.shape) for info in tensors.values()),
        stem=stem,
        max_part_nbytes=max_part_nbytes,
    )
    files = []
    for part in plan.parts:
        pieces = [Piece(start=0, source=BytesSource(part.header))]
        pieces += [Piece(start=part.offset(name), source=sources[name]) for name in part.tensors]
        files.append(
            PlannedFile(name=part.name, role="weights", nbytes=part.nbytes, pieces=tuple(pieces))
        )
    return [*files, document_file(plan.index_name, plan.index_bytes(), "weights")]


def _copied_file(name: str, path: Path, role: Role) -> PlannedFile:
    source = FileRange(path, 0, path.stat().st_size)
    pieces = (Piece(start=0, source=source),)
    return PlannedFile(name=name, role=role, nbytes=source.nbytes, pieces=pieces)


def _manifest(checkpoint: Checkpoint, carried: Carried, stem: str) -> Manifest:
    info = checkpoint.info
    is_directory = isinstance(checkpoint, DirectoryCheckpoint)
    key = checkpoint.model_keys()[0] if isinstance(checkpoint, DirectoryCheckpoint) else PRIMARY
    config = info.model_config
    if info.step is None:
        carried.notes.append("the source records no step; this directory says 0")
    return Manifest(
        checkpoint_id=uuid.uuid4().hex,
        parent_id=info.checkpoint_id,
        step=info.step or 0,
        epoch=info.epoch,
        created=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        metrics=plain_metrics(info.metrics),
        writer=writer(),
        mesh={"axes": {}, "world_size": 1},
        models={
            key: ModelEntry(
                prefix="",
                stem=stem,
                huggingface=CONFIG in carried.names,
                tied=dict(checkpoint.tied),
            )
        },
        state={key: StateEntry(kind="model")},
        model_config=config if is_directory or config is None else encode(config, key="config"),
        needs=carried.needs,
        provenance={
            "exported_from": {"name": checkpoint.path.name, "layout": checkpoint.layout.value},
            **(info.extra.get("provenance") or {}),
        },
    )


def _state_files(
    checkpoint: Checkpoint, manifest: Manifest, carried: Carried, taken: set[str]
) -> list[PlannedFile]:
    """Everything of the source that is not there yet, copied; fills the manifest's entries."""
    if not isinstance(checkpoint, DirectoryCheckpoint):
        raise InvalidInputError(
            f"{checkpoint.path}: the training state of a {checkpoint.layout.value} checkpoint "
            "knows parameters by position alone and cannot become that of a directory; export the "
            "weights, or convert to a trio or single file"
        )
    source = checkpoint.manifest
    manifest.state, manifest.exactness, manifest.mesh = source.state, source.exactness, source.mesh
    manifest.fingerprint = source.fingerprint
    manifest.models |= {key: e for key, e in source.models.items() if key not in manifest.models}
    own = {info.file for info in checkpoint.tensors().values()}
    tensors = checkpoint.weights()
    skipped = {*own, *taken, *carried.names, tensors.index_path.name, DIGESTS_NAME}
    return [
        _copied_file(entry.name, checkpoint.path / entry.name, entry.role)
        for entry in source.files
        if entry.name not in skipped
    ]


def publish_directory(
    target: Path, files: list[PlannedFile], manifest: Manifest, options: WriteOptions
) -> int:
    """Stage, write, commit; bytes written."""
    needed = sum(file.nbytes for file in files)
    fileops.make_directories(target.parent)
    staging = StagingDirectory(
        target,
        unique=f"{manifest.checkpoint_id}-{target.name}",
        owns=lambda path: _id_at(path) == manifest.checkpoint_id,
    )
    try:
        require_space(target.parent, needed)
        with staging:
            manifest.files, nbytes = _write(staging.path, files, options)
            document = encode_manifest(manifest)
            _writer(options)(staging.path / MANIFEST_NAME, document)
            staging.commit()
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(error, target, needed_nbytes=needed) from error
    return nbytes + len(document)


def _write(
    directory: Path, files: list[PlannedFile], options: WriteOptions
) -> tuple[list[FileEntry], int]:
    for parent in sorted({Path(file.name).parent for file in files}):
        fileops.make_directories(directory / parent)
    extents = write_files([file.write_into(directory) for file in files], options)
    entries, records = file_entries(files, extents)
    if records:
        fileops.make_directories(directory / Path(DIGESTS_NAME).parent)
        _writer(options)(directory / DIGESTS_NAME, records)
        digest = digest_of(records)
        entries.append(
            FileEntry(name=DIGESTS_NAME, nbytes=len(records), role="state", digest=digest)
        )
    return entries, sum(entry.nbytes for entry in entries)


def _writer(options: WriteOptions) -> Callable[[Path, bytes], None]:
    is_durable = options.durability is Durability.DURABLE
    return atomic.write_new_file if is_durable else atomic.write_unsynced_file


def _id_at(path: Path) -> str | None:
    try:
        return read_manifest(path).checkpoint_id
    except CheckpointError:
        return None
