"""The content of a checkpoint of few files, tensors not read: what a migration carries over.

The same view of a legacy `.pt`, a trio, a single file and a migrated directory, so that what was
written can be compared with what it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from milepost.errors import CheckpointMigrationError, FormatError
from milepost.format.lazy import LazyTensor
from milepost.layouts.legacy import NESTED_KEY, described, read_payload, recognise_dialect
from milepost.layouts.payload import STATE_SLOTS, Dialect, Payload
from milepost.layouts.single_file import open_archive, require_sound
from milepost.layouts.torch_archive import TorchArchive
from milepost.layouts.trio import TrioCheckpoint
from milepost.layouts.trio_names import MODEL_EXTRA_KEY, MODEL_METADATA_KEY, TYPED_KEY
from milepost.layouts.trio_typed import TypedState
from milepost.storage.intent import resolve_name
from milepost.tools.migrate_compare import Comparison
from milepost.tools.migrate_records import plain_record_tree

if TYPE_CHECKING:
    import torch

AT_THE_TOP = "values_at_the_top"
DESCRIBED = ("epoch", "step", "loss", "best_loss", "model_config", "metrics")


class NotACheckpointError(FormatError):
    """A sound file that holds no weights: another program's, not a checkpoint."""


@dataclass(slots=True, kw_only=True)
class Content:
    """What one checkpoint holds. `weights` and `slots` hold tensors that `read` reads one by one.

    `extras` are entries of the state dict that are no tensors, `versions` its `_metadata`;
    `described` the fields of `DESCRIBED`, `metadata` all that was recorded besides weights and
    training state. `load` reads the entries of the state dict, and the slots, whole; `check` raises
    `DamagedError` when bytes are not as they were saved. `origin` tells this checkpoint from others
    of its name, `recorded` is the origin of the one that it was made of. `defaulted` are described
    fields that it does not record.
    """

    path: Path
    dialect: Dialect
    weights: Mapping[str, Any]
    tied: Mapping[str, str]
    extras: Mapping[str, Any]
    versions: Mapping[str, Any] | None
    slots: Mapping[str, Any]
    described: Mapping[str, Any]
    metadata: dict[str, Any]
    read: Callable[[Any], torch.Tensor]
    load: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
    check: Callable[[], None] = lambda: None
    origin: dict[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, Any] | None = None
    defaulted: Collection[str] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is read: classes whose instances may stand in it, prefixes taken off names."""

    allow: tuple[str, ...] = ()
    strip_prefixes: tuple[str, ...] = ()


@contextmanager
def file_content(path: Path, reading: Reading | None = None) -> Iterator[Content]:
    """A `.pt` of any dialect. `NotACheckpointError` when it is none; unsafe pickles are refused."""
    reading = reading or Reading()
    place = resolve_name(path.parent, path.name) if path.parent.is_dir() else path
    with open_archive(place, path, allow=reading.allow) as archive:
        tree, notes = plain_record_tree(archive.tree, where=str(path))
        try:
            recognise_dialect(tree, where=str(path))
        except FormatError as error:
            raise NotACheckpointError(str(error), path=path) from error
        content = _of_archive(archive, tree, path)
        content.notes += notes
        yield stripped(content, reading.strip_prefixes)


def _of_archive(archive: TorchArchive, tree: Any, path: Path) -> Content:
    payload = read_payload(tree, where=str(path))
    metadata = archive.materialise(_without_slots(payload))
    payload = replace(payload, **_redescribed(payload, metadata))
    weights, extras = _sorted(payload.model_state)
    _refuse_attributes(weights, path)
    slots = payload.training_state()

    def load() -> tuple[dict[str, Any], dict[str, Any]]:
        state, loaded = archive.materialise((payload.model_state, slots))
        return state, loaded

    content = Content(
        path=path,
        dialect=payload.dialect,
        weights=weights,
        tied=_ties(weights),
        extras=extras,
        versions=archive.materialise(getattr(payload.model_state, "_metadata", None)),
        slots=slots,
        described={name: getattr(payload, name) for name in DESCRIBED},
        metadata=metadata,
        read=archive.read_tensor,
        load=load,
        check=lambda: require_sound(archive, path),
        origin={"file": path.name, "dialect": str(payload.dialect), **fingerprint(archive)},
        defaulted=payload.defaulted,
        notes=_notes(payload),
    )
    contradicted = _contradicted(archive, tree, payload)
    if contradicted:
        content.metadata[AT_THE_TOP] = archive.materialise(contradicted)
        content.notes.append(
            f"{', '.join(contradicted)}: other values at the top than in metadata, which is used; "
            f"the others are kept as {AT_THE_TOP}"
        )
    return content


def fingerprint(archive: TorchArchive) -> dict[str, Any]:
    """What tells one archive from another without reading it: its records and their checksums."""
    digest = xxhash.xxh3_128()
    for name, record in sorted(archive.records.items()):
        digest.update(f"{name} {record.nbytes} {record.crc32}\n".encode())
    return {"nbytes": archive.file.nbytes, "records": digest.hexdigest()}


def _without_slots(payload: Payload) -> dict[str, Any]:
    """The metadata without a second mention of what is in a slot."""
    slots = {id(value) for value in payload.training_state().values()}
    return {key: value for key, value in payload.metadata.items() if id(value) not in slots}


def _redescribed(payload: Payload, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The described fields again, now that tensors among the metadata were read."""
    return {name: value for name, value in described(metadata).items() if name in DESCRIBED}


def _sorted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by name, and the entries that are none."""
    weights = {name: value for name, value in state.items() if isinstance(value, LazyTensor)}
    return weights, {name: value for name, value in state.items() if name not in weights}


def _refuse_attributes(weights: Mapping[str, LazyTensor], path: Path) -> None:
    bad = [name for name, tensor in weights.items() if tensor.attributes]
    if bad:
        raise CheckpointMigrationError(
            f"{path}: {bad[0]}: a weight with Python attributes "
            f"({', '.join(weights[bad[0]].attributes)}), for which no other layout has a place "
            f"({len(bad)} such weights); save the state dict again without them",
            path=path,
        )


def _ties(weights: Mapping[str, LazyTensor]) -> dict[str, str]:
    kept: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        region = (tensor.storage_key, tensor.dtype, tensor.storage_offset, tensor.shape)
        first = kept.setdefault((*region, tensor.stride), name) if tensor.numel else name
        if first != name:
            ties[name] = first
    return ties


def _notes(payload: Payload) -> list[str]:
    notes = []
    if payload.stored_names:
        notes.append(f"_orig_mod taken off {len(payload.stored_names)} names")
    absent = sorted({"epoch", "loss", "best_loss"} & set(payload.defaulted))
    if absent and payload.dialect is not Dialect.STATE_DICT:
        notes.append(f"no {' and no '.join(absent)} recorded")
    return notes


def _contradicted(archive: TorchArchive, tree: Any, payload: Payload) -> dict[str, Any]:
    """Metadata whose copy at the top of the file is another value."""
    nested = tree.get(NESTED_KEY) if payload.dialect is not Dialect.STATE_DICT else None
    if not isinstance(nested, Mapping):
        return {}
    compare = Comparison(left=archive.read_tensor, right=archive.read_tensor)
    slots = {id(value) for value in payload.training_state().values()}
    both = [key for key in nested if key in tree and id(tree[key]) not in slots]
    return {key: tree[key] for key in both if not compare.same(tree[key], nested[key])}


@contextmanager
def trio_content(path: Path, reading: Reading | None = None) -> Iterator[Content]:
    """A trio by its directory and stem, which may be a temporary one."""
    checkpoint = TrioCheckpoint(path)
    meta = checkpoint.meta
    with checkpoint.opened_state() as (archive, tree):
        typed = TypedState()
        if TYPED_KEY in tree:
            blob = archive.materialise(tree[TYPED_KEY])
            typed = TypedState.unpack(blob, where=f"{path}: {TYPED_KEY}")
        slots = typed.put_back({slot: tree.get(slot) for slot in STATE_SLOTS})
        infos = checkpoint.tensors()

        def read(leaf: Any) -> torch.Tensor:
            return checkpoint.read(leaf) if isinstance(leaf, str) else archive.read_tensor(leaf)

        def load() -> tuple[dict[str, Any], dict[str, Any]]:
            payload = checkpoint.payload()
            return dict(payload.model_state), payload.training_state()

        content = Content(
            path=path,
            dialect=Dialect.TRIO,
            weights={name: name for name in (*infos, *checkpoint.tied)},
            tied=checkpoint.tied,
            extras=tree.get(MODEL_EXTRA_KEY) or {},
            versions=tree.get(MODEL_METADATA_KEY),
            slots={slot: value for slot, value in slots.items() if value is not None},
            described={name: getattr(meta, name) for name in DESCRIBED},
            metadata={**typed.metadata, **meta.unknown, **meta.metadata},
            read=read,
            load=load,
            check=lambda: require_verified(checkpoint),
            origin={"file": path.name, "dialect": str(Dialect.TRIO), "save_id": meta.save_id},
            recorded=meta.origin,
            defaulted=meta.defaulted,
        )
        yield stripped(content, reading.strip_prefixes if reading else ())


def require_verified(checkpoint: TrioCheckpoint) -> None:
    """`DamagedError` when a byte of it is not as it was saved."""
    from milepost.errors import DamagedError
    from milepost.layouts.checkpoint import Severity

    found = checkpoint.verify().problems
    errors = [problem.message for problem in found if problem.severity is Severity.ERROR]
    if errors:
        raise DamagedError(
            f"{checkpoint.path}: {'; '.join(errors[:3])}; use another checkpoint",
            path=checkpoint.path,
        )


def stripped(content: Content, prefixes: Sequence[str]) -> Content:
    """The content with the prefixes taken off the names of its weights."""
    for text in prefixes:
        prefix = text.rstrip(".") + "."
        renamed = {name: name.removeprefix(prefix) for name in content.weights}
        names = {name: name.removeprefix(prefix) for name in [*renamed, *content.extras]}
        count = sum(old != new for old, new in names.items())
        _refuse_collisions(content.path, prefix, names.items())
        content = _renamed(content, names, prefix)
        content.notes.append(f"{prefix} taken off {count} of {len(names)} names")
    return content


def _refuse_collisions(path: Path, prefix: str, pairs: Iterable[tuple[str, str]]) -> None:
    sources: dict[str, str] = {}
    for old, new in pairs:
        if new in sources:
            raise CheckpointMigrationError(
                f"{path}: {sources[new]} and {old} both become {new} without {prefix}; "
                "strip another prefix, or none",
                path=path,
            )
        sources[new] = old


def _renamed(content: Content, names: Mapping[str, str], prefix: str) -> Content:
    def load() -> tuple[dict[str, Any], dict[str, Any]]:
        state, slots = content.load()
        return {names.get(name, name): value for name, value in state.items()}, slots

    return replace(
        content,
        weights={names[name]: leaf for name, leaf in content.weights.items()},
        tied={names[name]: names[kept] for name, kept in content.tied.items()},
        extras={names[name]: value for name, value in content.extras.items()},
        versions=_renamed_versions(content.versions, prefix),
        load=load,
        notes=list(content.notes),
        origin={**content.origin, "stripped": [*content.origin.get("stripped", []), prefix]},
    )


def _renamed_versions(versions: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """The versions of the modules under the new names: the wrapped module becomes the root."""
    renamed: dict[str, Any] = {}
    for key, value in (versions or {}).items():
        if f"{key}." == prefix or key.startswith(prefix):
            renamed[key.removeprefix(prefix) if key.startswith(prefix) else ""] = value
        else:
            renamed.setdefault(key, value)
    return None if versions is None else renamed
