"""`Verify.WHILE_READING`: tensors are proven as they are read, everything else before."""

from __future__ import annotations

from milepost.checkpointing.fresh_moments import files_of_optimizers
from milepost.engine.proof import Proof
from milepost.engine.read import ReadMode, ReadOptions
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.directory_verify import recorded_extents
from milepost.storage.space import human


def proof_of(checkpoint: Checkpoint, options: ReadOptions) -> Proof:
    """The digests of the tensors of a checkpoint, read and not yet compared.

    `InvalidInputError` for a layout that records none, and with `ReadMode.SHARED`, where ranks
    read parts of extents for each other.
    """
    if not isinstance(checkpoint, DirectoryCheckpoint):
        raise InvalidInputError(
            f"{checkpoint.path}: verify=Verify.WHILE_READING is for checkpoints that lie in a "
            "directory with a manifest; use Verify.DIGESTS"
        )
    if options.mode is ReadMode.SHARED:
        raise InvalidInputError(
            "verify=Verify.WHILE_READING with ReadMode.SHARED: ranks read parts of extents for "
            "each other, which proves none; use Verify.DIGESTS, or ReadMode.DIRECT"
        )
    return Proof(
        {
            checkpoint.path / entry.name: recorded_extents(checkpoint.path, entry)
            for entry in checkpoint.manifest.files
            if entry.name in proven_later(checkpoint)
        }
    )


def proven_later(checkpoint: DirectoryCheckpoint) -> set[str]:
    """Files whose tensors are proven as they are read."""
    manifest = checkpoint.manifest
    tensors = {entry.name for entry in manifest.files if entry.role == "weights"}
    tensors |= set(files_of_optimizers(manifest))
    return {e.name for e in manifest.files if e.name in tensors and e.records is not None}


def told(proof: Proof) -> list[str]:
    """What a report says about it."""
    if not proof.unproven_nbytes:
        return []
    return [
        f"{human(proof.unproven_nbytes)} were read as parts of extents, and not verified; "
        "verify=Verify.DIGESTS verifies them too"
    ]
