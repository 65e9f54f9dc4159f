"""Files that a caller has written beside the weights: sidecars, which these need, and documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from milepost.checkpointing.files import PlannedFile, document_file
from milepost.errors import InvalidInputError
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.archive_write import archive_bytes

Sidecars: TypeAlias = Mapping[str, bytes | Mapping[str, Tensor]]
"""Content by file name: bytes as they are, or tensors by name for a `.pt` file."""

Documents: TypeAlias = Mapping[str, bytes | Mapping[str, Any]]
"""Content by name: bytes as they are, or plain containers and tensors for a `.pt` file."""

_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OWN_DIRECTORIES = ("training", "resume_adapter")


def sidecar_files(sidecars: Sidecars, planned: Iterable[str]) -> list[PlannedFile]:
    """The files to write. `InvalidInputError` for a name that cannot be one, or is `planned`."""
    taken = {*planned, MANIFEST_NAME}
    files = []
    for name, content in sidecars.items():
        _check_name(name, taken, is_bytes=isinstance(content, bytes))
        data = content if isinstance(content, bytes) else archive_bytes(dict(content))
        files.append(document_file(name, data, "weights"))
    return files


def with_documents(
    files: Sequence[PlannedFile], documents: Documents, planned: Iterable[str]
) -> list[PlannedFile]:
    """`files` and the documents, each in place of the one of its name, if there is one.

    `InvalidInputError` for a name that cannot be one, or is that of a file of tensors, `planned`.
    """
    own = {file.name: file for file in files}
    taken = {*planned, MANIFEST_NAME, *(name for name, file in own.items() if file.role != "info")}
    for name, content in documents.items():
        directory, _, last = name.rpartition("/")
        is_plain = directory == "" or _DIRECTORY.fullmatch(directory)
        if not is_plain or directory in _OWN_DIRECTORIES:
            raise InvalidInputError(
                f"document {name!r}: expected a file name, or a directory beside the weights and "
                "a file name"
            )
        _check_name(last, set(), is_bytes=isinstance(content, bytes))
        if name in taken:
            raise InvalidInputError(f"document {name}: the checkpoint has a file of this name")
        data = content if isinstance(content, bytes) else archive_bytes(dict(content))
        own[name] = document_file(name, data, "info")
    return list(own.values())


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
