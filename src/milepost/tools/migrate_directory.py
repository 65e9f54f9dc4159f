"""Into a checkpoint directory: weights as their own parts, all else in the typed tree.

An old optimizer state knows parameters by position alone, so it cannot become one by name. It is
kept whole, as a value under `optimizer_state`, with the other slots beside it; `migrated` holds
what the old file recorded besides.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.checkpointing.capture import STATE_VERSION
from milepost.checkpointing.files import PlannedFile, document_file
from milepost.checkpointing.led_copy import holds
from milepost.checkpointing.numbers import plain_metrics
from milepost.checkpointing.provenance import writer
from milepost.checkpointing.seal import seal
from milepost.engine.source import BytesSource, TensorSource
from milepost.engine.write import Piece, WriteOptions, write_files
from milepost.errors import CheckpointError, DamagedError, FormatError, UnencodableError
from milepost.format.dtypes import DTYPES
from milepost.format.manifest import STATE_NAME, Manifest, ModelEntry, Role, StateEntry
from milepost.format.strictjson import dumps
from milepost.format.tree import encode
from milepost.hf.aux_files import CARD, CONFIG
from milepost.hf.card import new_card
from milepost.layouts.checkpoint import Severity
from milepost.layouts.directory import (
    PRIMARY,
    STATE_FORMAT,
    DirectoryCheckpoint,
    check_step_name,
)
from milepost.layouts.payload import STATE_SLOTS, Dialect
from milepost.layouts.trio_meta import time_text
from milepost.plan.parts import DEFAULT_PART_NBYTES, plan_parts
from milepost.state.tensors import refuse_unstorable, stored_dtype, stored_shape
from milepost.state.ties import tied_groups
from milepost.state.tree_torch import StateTensors
from milepost.storage import fileops
from milepost.storage.attributes import FileAttributes
from milepost.storage.space import require_space, storage_error
from milepost.storage.staging import StagingDirectory
from milepost.tools.migrate_content import DESCRIBED, Content
from milepost.tools.migrate_target import Leaving, leave

if TYPE_CHECKING:
    import torch

MIGRATED_KEY = "migrated"


class DirectoryTarget:
    """A directory that is new; it is proven after it was published, and the source leaves then."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.path = directory / stem
        self._files: list[PlannedFile] = []
        self._manifest: Manifest | None = None
        self._like: FileAttributes | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def there(self) -> Sequence[Path]:
        return [self.path] if self.path.exists() else []

    def is_whole(self) -> bool:
        return self.path.is_dir()

    def content(self) -> AbstractContextManager[Content]:
        return directory_content(self.path)

    def prepare(self, content: Content, attributes: FileAttributes) -> int:
        state, slots = content.load()
        weights, tied = _distinct(content, state)
        created = datetime.fromtimestamp(attributes.times_ns[1] / 1e9, UTC)
        self._like = attributes
        self._manifest = _manifest(content, tied, slots, time_text(created))
        check_step_name(self.path, self._manifest.step)
        self._files = [
            *_tensor_files(weights, "model", "", "weights"),
            *_state_files(content, slots),
            *_documents(content.described["model_config"]),
        ]
        return sum(file.nbytes for file in self._files)

    def write(
        self, options: WriteOptions, proof: Callable[[Content], bool] | None, leaving: Leaving
    ) -> int | None:
        assert self._manifest is not None and self._like is not None, "prepared first"
        nbytes = _publish(self.path, self._files, self._manifest, options)
        for place in self.path.rglob("*"):
            if place.is_file():
                self._like.give(place)
        if proof is not None:
            with directory_content(self.path) as written:
                if not proof(written):
                    return None
        leave(leaving)
        return nbytes


def _publish(
    target: Path, files: Sequence[PlannedFile], manifest: Manifest, options: WriteOptions
) -> int:
    """Stage, write, commit; bytes of the directory."""
    needed = sum(file.nbytes for file in files)
    fileops.make_directories(target.parent)
    staging = StagingDirectory(
        target,
        unique=f"{manifest.checkpoint_id}-{target.name}",
        owns=lambda path: holds(path, manifest.checkpoint_id),
    )
    try:
        require_space(target.parent, needed)
        with staging:
            for parent in sorted({Path(file.name).parent for file in files}):
                fileops.make_directories(staging.path / parent)
            extents = write_files([file.write_into(staging.path) for file in files], options)
            sizes = seal(staging.path, manifest, files, extents, durability=options.durability)
            staging.commit()
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(error, target, needed_nbytes=needed) from error
    return sum(sizes.values())


def _distinct(
    content: Content, state: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that get bytes of their own, and the names tied to them."""
    weights = {name: state[name] for name in content.weights}
    for name, tensor in weights.items():
        key = f"model_state.{name}"
        refuse_unstorable(tensor, key=key)
        if stored_dtype(tensor) not in DTYPES:
            raise UnencodableError(f"{key}: safetensors has no type for {tensor.dtype}", key=key)
    tied = {name: group[0] for group in tied_groups(weights) for name in group[1:]}
    return {name: tensor for name, tensor in weights.items() if name not in tied}, tied


def _manifest(
    content: Content, tied: dict[str, str], slots: Mapping[str, Any], created: str
) -> Manifest:
    described = content.described
    config, step = described["model_config"], described["step"]
    state = {key: StateEntry(kind="value") for key in (*slots, MIGRATED_KEY)}
    if step is None:
        content.notes.append("no step is recorded; the directory says 0")
    if "optimizer_state" in slots:
        content.notes.append(
            "the optimizer state goes by position, so it is kept as training_state()"
            "['optimizer_state']"
        )
    return Manifest(
        checkpoint_id=uuid.uuid4().hex,
        step=step or 0,
        epoch=None if "epoch" in content.defaulted else float(described["epoch"] + 1),
        created=created,
        metrics=_metrics(described["metrics"]),
        writer=writer(),
        mesh={"axes": {}, "world_size": 1},
        models={
            PRIMARY: ModelEntry(prefix="", stem="model", huggingface=_is_of_hub(config), tied=tied)
        },
        state={PRIMARY: StateEntry(kind="model"), **state},
        model_config=None if config is None else encode(config, key="model_config"),
        provenance={"migrated_from": encode(content.origin, key="origin")},
    )


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """Those that are numbers; all of them are among the metadata."""
    return plain_metrics(
        {k: v for k, v in metrics.items() if isinstance(v, int | float) and type(v) is not bool}
    )


def _is_of_hub(config: Any) -> bool:
    return isinstance(config, Mapping) and isinstance(config.get("model_type"), str)


def _documents(config: Any) -> Iterator[PlannedFile]:
    yield document_file(CARD, new_card(), "info")
    if _is_of_hub(config):
        text = json.dumps(config, indent=2, default=str)
        yield document_file(CONFIG, text.encode() + b"\n", "info")


def _tensor_files(
    tensors: Mapping[str, torch.Tensor], stem: str, prefix: str, role: Role
) -> Iterator[PlannedFile]:
    plan = plan_parts(
        ((name, stored_dtype(t), stored_shape(t)) for name, t in tensors.items()),
        stem=stem,
        max_part_nbytes=DEFAULT_PART_NBYTES if role == "weights" else 2**63,
    )
    for part in plan.parts:
        pieces = [Piece(start=0, source=BytesSource(part.header))]
        pieces += [
            Piece(start=part.offset(name), source=TensorSource(tensors[name]))
            for name in part.tensors
        ]
        yield PlannedFile(
            name=prefix + part.name, role=role, nbytes=part.nbytes, pieces=tuple(pieces)
        )
    if role == "weights":
        yield document_file(plan.index_name, plan.index_bytes(), role)


def _state_files(content: Content, slots: Mapping[str, Any]) -> Iterator[PlannedFile]:
    sink = StateTensors()
    trees = {slot: encode(value, sink, key=slot) for slot, value in slots.items()}
    if content.extras:
        trees[PRIMARY] = encode({"extra": dict(content.extras)}, sink, key=PRIMARY)
    migrated = {
        "described": {name: content.described[name] for name in DESCRIBED},
        "metadata": content.metadata,
        "versions": None if content.versions is None else dict(content.versions),
    }
    trees[MIGRATED_KEY] = encode(migrated, sink, key=MIGRATED_KEY)
    document = {"format": STATE_FORMAT, "format_version": STATE_VERSION, "state": trees}
    yield document_file(STATE_NAME, dumps(document, indent=1) + b"\n", "state")
    yield from _tensor_files(sink.tensors, "state", "training/", "state")


@contextmanager
def directory_content(path: Path) -> Iterator[Content]:
    """A directory that a migration wrote. `FormatError` for any other."""
    checkpoint = DirectoryCheckpoint(path)
    state = checkpoint.training_state()
    migrated = state.get(MIGRATED_KEY)
    if not isinstance(migrated, Mapping):
        raise FormatError(
            f"{path}: a checkpoint directory that no migration wrote; write elsewhere (--out)",
            path=path,
        )

    def load() -> tuple[dict[str, Any], dict[str, Any]]:
        raise AssertionError("a directory is the target of a migration, never the source")

    def check() -> None:
        found = checkpoint.verify().problems
        errors = [problem.message for problem in found if problem.severity is Severity.ERROR]
        if errors:
            raise DamagedError(f"{path}: {'; '.join(errors[:3])}", path=path)

    names = (*checkpoint.tensors(), *checkpoint.tied)
    yield Content(
        path=path,
        dialect=Dialect.TRIO,
        weights={name: name for name in names},
        tied=checkpoint.tied,
        extras=(state.get(PRIMARY) or {}).get("extra") or {},
        versions=migrated["versions"],
        slots={slot: state[slot] for slot in STATE_SLOTS if slot in state},
        described=migrated["described"],
        metadata=dict(migrated["metadata"]),
        read=checkpoint.read,
        load=load,
        check=check,
    )
