"""Writing a checkpoint directory out of any checkpoint: a rewrite in which nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from milepost.checkpointing.files import PlannedFile
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import InvalidInputError
from milepost.format.manifest import DIGESTS_NAME, Manifest
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.tools.export import ExportReport, ExportTarget, TrainingState
from milepost.tools.rewrite.beside import copied_file
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import EpSlices, Source


def export_directory(
    checkpoint: Checkpoint,
    target: Path,
    *,
    training_state: TrainingState,
    max_shard_size: int | str,
    options: WriteOptions,
) -> ExportReport:
    """See `export_checkpoint`."""
    with Source(checkpoint, EpSlices.REFUSE) as source:
        rewrite = Rewrite(
            verb="export",
            sources=[source],
            groups=[passed(tensor) for tensor in source.tensors.values()],
            arguments={
                "max_shard_size": max_shard_size,
                "training_state": training_state.value,
            },
        )
        if checkpoint.info.step is None:
            rewrite.carried().notes.append("the source records no step; this directory says 0")
        if training_state is TrainingState.INCLUDE:
            owner = _owner_of_state(checkpoint)
            rewrite.extra = list(_state_files(owner, rewrite))
            rewrite.edit_manifest = partial(_add_state, owner.manifest)
        is_durable = options.durability is Durability.DURABLE
        report = run_rewrite(
            rewrite,
            target,
            RewriteOptions(
                max_shard_size=max_shard_size, threads=options.threads, is_durable=is_durable
            ),
        )
    return ExportReport(
        path=target,
        target=ExportTarget.DIRECTORY,
        files=tuple(sorted(report.files)),
        nbytes=report.nbytes,
        notes=report.notes,
    )


def _owner_of_state(checkpoint: Checkpoint) -> DirectoryCheckpoint:
    if isinstance(checkpoint, DirectoryCheckpoint):
        return checkpoint
    raise InvalidInputError(
        f"{checkpoint.path}: the training state of a {checkpoint.layout.value} checkpoint "
        "knows parameters by position alone and cannot become that of a directory; export the "
        "weights, or convert to a trio or single file"
    )


def _state_files(checkpoint: DirectoryCheckpoint, rewrite: Rewrite) -> Iterator[PlannedFile]:
    """Everything of the source that is neither its weights nor carried, as it is."""
    weights = checkpoint.weights()
    skipped = {*weights.part_names, weights.index_path.name, DIGESTS_NAME, *rewrite.carried().names}
    for entry in checkpoint.manifest.files:
        if entry.name not in skipped:
            yield copied_file(entry.name, checkpoint.path / entry.name, entry.role)


def _add_state(source: Manifest, manifest: Manifest) -> None:
    """What the manifest of the source says of its training state and of further models."""
    manifest.state, manifest.exactness, manifest.mesh = source.state, source.exactness, source.mesh
    manifest.fingerprint = source.fingerprint
    for key, entry in manifest.models.items():
        known = source.models.get(key)
        if known is not None:  # an adapter beside merged weights goes along, too
            manifest.models[key] = msgspec.structs.replace(entry, adapter=known.adapter)
    manifest.models |= {key: e for key, e in source.models.items() if key not in manifest.models}
