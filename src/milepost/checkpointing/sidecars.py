"""Sidecars: files beside the weights without which these are not what was trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch import Tensor

from milepost.checkpointing.files import PlannedFile, document_file
from milepost.errors import InvalidInputError
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.archive_write import archive_bytes

Sidecars: TypeAlias = Mapping[str, bytes | Mapping[str, Tensor]]
"""Content by file name: bytes as they are, or tensors by name for a `.pt` file."""


def sidecar_files(sidecars: Sidecars, planned: Iterable[str]) -> list[PlannedFile]:
    """The files to write. `InvalidInputError` for a name that cannot be one, or is `planned`."""
    taken = {*planned, MANIFEST_NAME}
    files = []
    for name, content in sidecars.items():
        _check_name(name, taken, is_bytes=isinstance(content, bytes))
        data = content if isinstance(content, bytes) else archive_bytes(dict(content))
        files.append(document_file(name, data, "weights"))
    return files


def _check_name(name: str, taken: set[str], *, is_bytes: bool) -> None:
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise InvalidInputError(
            f"sidecar {name!r}: expected the name of a file beside the weights, without a path"
        )
    if name in taken:
        raise InvalidInputError(f"sidecar {name}: the checkpoint has a file of this name already")
    if name.endswith((".safetensors", ".bin", ".index.json")):
        raise InvalidInputError(
            f"sidecar {name}: programs that load weights by a glob would take it for some; choose "
            "another ending"
        )
    if not is_bytes and not name.endswith(".pt"):
        raise InvalidInputError(f"sidecar {name}: tensors become a .pt file; end the name in .pt")
