"""An adapter that was saved without its base: what belongs to it beside its tensors."""

from __future__ import annotations

from milepost.format.manifest import AdapterEntry
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.tensor_set import TensorSet


def lone_adapter(checkpoint: Checkpoint) -> AdapterEntry | None:
    """What the manifest says of the adapter that is all there is of the first model, or None."""
    if not isinstance(checkpoint, DirectoryCheckpoint) or not checkpoint.manifest.models:
        return None
    entry = checkpoint.model_entry().adapter
    return entry if entry is not None and entry.kind == "adapter" and not entry.prefix else None


def extra_files(checkpoint: Checkpoint) -> list[str]:
    """Names of the files with what is trained or updated beside a lone adapter."""
    entry = lone_adapter(checkpoint)
    if entry is None or entry.extra is None:
        return []
    extra = TensorSet(checkpoint.path, entry.extra)
    index = [extra.index_path.name] if extra.index is not None else []
    return [*extra.part_names, *index]
