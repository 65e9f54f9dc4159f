"""The sidecars of training, read: balancing biases of routers, and what became of attention sinks.

Nothing is executed: the `.pt` goes through the safe unpickler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import (
    CheckpointIncompleteError,
    DigestMismatchError,
    FormatError,
    NotFoundError,
)
from milepost.format import strictjson
from milepost.format.digests import digest_of
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.directory import read_manifest
from milepost.layouts.torch_archive import TorchArchive

if TYPE_CHECKING:
    from torch import Tensor

ROUTER_BIASES = "router_balancing_biases.pt"
PROVENANCE = "training_provenance.json"
SIDECARS = (ROUTER_BIASES, PROVENANCE)
"""Files without which weights of some families are not what was trained."""

SINKS_KEY = "gpt_oss_attention_sinks"
BALANCING_KEY = "router_balancing"
TRANSIENT = "bias_update_transient"


class SinkPolicy(StrEnum):
    """What training did with attention sinks."""

    NEUTRALIZED = "neutralized"
    """Trained without them; they must be made ineffective wherever the weights go."""
    LIVE = "live"
    TRAINABLE = "trainable"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSidecars:
    """What lies beside weights: biases by router module, the policy for sinks.

    `is_transient`: the model that was trained keeps its biases in no tensor of its own, even where
    the family has a slot.
    """

    files: tuple[str, ...] = ()
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    sinks: SinkPolicy | None = None
    is_transient: bool = False


def read_training_sidecars(directory: Path) -> TrainingSidecars:
    """The sidecars in `directory`; without any, an empty answer.

    `NotFoundError` when there is no directory. Of a committed checkpoint, a sidecar that its
    manifest says the weights need raises `CheckpointIncompleteError` when it is absent, and
    `DigestMismatchError` when it is another than was saved. `FormatError` for content that is no
    sidecar, `UnsafePickleError` for a pickle of more than data.
    """
    if not directory.is_dir():
        raise NotFoundError(f"{directory}: no such directory", path=directory)
    if (directory / MANIFEST_NAME).exists():
        _check_committed(directory)
    present = tuple(name for name in SIDECARS if (directory / name).is_file())
    provenance = _provenance(directory / PROVENANCE) if PROVENANCE in present else {}
    return TrainingSidecars(
        files=present,
        biases=_biases(directory / ROUTER_BIASES) if ROUTER_BIASES in present else {},
        sinks=_sink_policy(provenance, directory / PROVENANCE),
        is_transient=provenance.get(BALANCING_KEY) == TRANSIENT,
    )


def _check_committed(directory: Path) -> None:
    manifest = read_manifest(directory)
    absent = [name for name in manifest.needs if not (directory / name).is_file()]
    if absent:
        raise CheckpointIncompleteError(
            f"{directory}: its weights need {', '.join(absent)}, which is not there; put it back, "
            "or use another checkpoint",
            path=directory,
        )
    for name in SIDECARS:
        entry = manifest.file(name)
        if entry is None or entry.records is not None or not (directory / name).is_file():
            continue
        if digest_of((directory / name).read_bytes()) != entry.digest:
            raise DigestMismatchError(
                f"{directory / name}: its bytes are not those that were saved; put the file back, "
                "or use another checkpoint",
                path=directory / name,
            )


def _provenance(path: Path) -> Mapping[str, Any]:
    document = strictjson.loads(path.read_bytes(), where=str(path))
    if not isinstance(document, dict):
        raise FormatError(
            f"{path}: expected a JSON object, found {type(document).__name__}", path=path
        )
    return document


def _sink_policy(provenance: Mapping[str, Any], path: Path) -> SinkPolicy | None:
    value = provenance.get(SINKS_KEY)
    if value is None:
        return None
    known = {policy.value for policy in SinkPolicy}
    if value not in known:
        raise FormatError(
            f"{path}: {SINKS_KEY} is {value!r}, expected one of {', '.join(sorted(known))}; a "
            "newer trainer wrote it, or the file was edited",
            path=path,
        )
    return SinkPolicy(value)


def _biases(path: Path) -> Mapping[str, Tensor]:
    """Each bias, one row of floats, by router module."""
    with TorchArchive.open(path) as archive:
        tree = archive.materialise(archive.tree)
    if not isinstance(tree, dict):
        raise FormatError(
            f"{path}: expected a dict of router module to bias, found {type(tree).__name__}",
            path=path,
        )
    for name, bias in tree.items():
        shape = getattr(bias, "shape", None)
        if not isinstance(name, str) or shape is None or len(shape) != 1:
            found = type(bias).__name__ if shape is None else f"a tensor of {tuple(shape)}"
            raise FormatError(
                f"{path}: {name!r}: expected one row of biases, one for each expert, found {found}",
                path=path,
            )
        if not bias.is_floating_point():
            raise FormatError(f"{path}: {name!r}: expected floats, found {bias.dtype}", path=path)
    return tree
