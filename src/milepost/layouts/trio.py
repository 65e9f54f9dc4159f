"""The trio: `<name>.safetensors`, `<name>.meta.json`, `<name>.extra_state.pt`, read as one.

Opening reads the metadata and the header of the weights. Weights and metadata can be read whatever
became of `extra_state.pt`. All three carry the same stamps (`save_id`, epoch) where the writer
stamped them; files of different saves are never combined.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    DigestMismatchError,
    FormatError,
)
from milepost.format.header import Header, read_header
from milepost.layouts.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    FileInfo,
    Index,
    Layout,
    TensorInfo,
    VerifyReport,
)
from milepost.layouts.payload import STATE_SLOTS, Dialect, Payload
from milepost.layouts.trio_content import TrioContent
from milepost.layouts.trio_meta import TrioMeta
from milepost.layouts.trio_names import (
    LEGACY_SUFFIX,
    MODEL_EXTRA_KEY,
    MODEL_METADATA_KEY,
    TYPED_KEY,
    WEIGHTS_SUFFIX,
    TrioNames,
    look,
    split_suffix,
    trio_names,
)
from milepost.layouts.trio_open import READ_ATTEMPTS, open_documents, replaced
from milepost.layouts.trio_typed import TypedState
from milepost.layouts.trio_weights import TrioWeights
from milepost.layouts.trio_write import StaleFile, TrioWritten, remove_trio, write_trio
from milepost.storage.intent import resolve_name

if TYPE_CHECKING:
    import torch

    from milepost.layouts.torch_archive import TorchArchive

__all__ = [
    "StaleFile",
    "TrioCheckpoint",
    "TrioContent",
    "TrioWritten",
    "find_trio",
    "remove_trio",
    "trio_names",
    "write_trio",
]

T = TypeVar("T")


def find_trio(path: Path) -> TrioCheckpoint | None:
    """The trio that `path` names: its stem, any of its three files, or the `.pt` it replaced.

    One file of the three is enough for the trio to count, so that a stale `.pt` beside it is not
    taken for the newest save; what is missing is then an error. A lone `.safetensors` without
    stamps is no trio when the path names that file, or a `.pt` that is there.
    """
    stem, suffix = split_suffix(path.name)
    if not stem or not path.parent.is_dir():
        return None
    names = trio_names(stem)
    places = look(path.parent, names)
    if not places:
        return None
    if set(places) == {names.weights} and not is_stamped(places[names.weights].path):
        other = resolve_name(path.parent, path.name)
        if suffix == WEIGHTS_SUFFIX or (suffix == LEGACY_SUFFIX and other.is_file()):
            return None
    return TrioCheckpoint(path.parent / stem)


def is_stamped(weights: Path) -> bool:
    """Whether a safetensors file says that it is part of a trio."""
    try:
        return "save_id" in read_header(weights).metadata
    except CheckpointError:
        return False


class TrioCheckpoint(Checkpoint):
    """A trio that has been opened; `path` is its directory and stem.

    `CheckpointIncompleteError` when weights or metadata are missing, `InconsistentError` when their
    stamps differ. The handle goes on reading the weights that it opened, also when another save has
    taken the names; asking for the training state then raises `ReplacedError`, and the path must be
    opened again.
    """

    layout = Layout.TRIO

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.documents, descriptor = open_documents(path)
        self.weights = TrioWeights(self.documents, descriptor)

    @property
    def names(self) -> TrioNames:
        return self.documents.names

    @property
    def meta(self) -> TrioMeta:
        return self.documents.meta

    @property
    def header(self) -> Header:
        return self.documents.header

    @property
    def was_replaced(self) -> bool:
        """Whether another save has taken the names since this one was opened."""
        return self.documents.was_replaced

    @property
    def info(self) -> CheckpointInfo:
        meta = self.meta
        return CheckpointInfo(
            step=meta.step,
            epoch=None if "epoch" in meta.defaulted else meta.epoch,
            loss=meta.loss,
            best_loss=meta.best_loss,
            created=meta.created,
            metrics=meta.metrics,
            checkpoint_id=meta.save_id,
            format_version=meta.format_version,
            dialect=Dialect.TRIO,
            model_config=meta.model_config,
            extra={
                **meta.metadata,
                "writer": {"milepost": meta.writer},
                **({"origin": meta.origin} if meta.origin else {}),
                **meta.unknown,
            },
        )

    def files(self) -> Sequence[FileInfo]:
        """Those that are there, the metadata last."""
        names, places = self.names, self.documents.places
        order = ((names.weights, "weights"), (names.extra_state, "state"), (names.meta, "state"))
        return [
            FileInfo(name=name, nbytes=places[name].nbytes, role=role)
            for name, role in order
            if name in places
        ]

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.weights.tensors()

    @property
    def tied(self) -> Mapping[str, str]:
        return self.meta.tied

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        return self.weights.read(name, index)

    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """See `Checkpoint.read_weights`. Whole tensors are checked against the recorded digests:
        `DigestMismatchError` names the tensor whose bytes are wrong."""
        return self.weights.read_many(names)

    @contextmanager
    def opened_state(self) -> Iterator[tuple[TorchArchive, dict[str, Any]]]:
        """`extra_state.pt`, open, and its dict with tensors not read; its stamps are compared."""
        with self._open_archive() as archive:
            tree, where = archive.tree, self.documents.file(self.names.extra_state)
            if not isinstance(tree, dict):
                raise FormatError(
                    f"{where}: holds a {type(tree).__name__}, expected a dict", path=where
                )
            stamps = (tree.get("save_id"), tree.get("epoch"))
            self.documents.compare_stamps(stamps, self.names.extra_state)
            yield archive, tree

    def _open_archive(self) -> TorchArchive:
        from milepost.layouts.single_file import open_archive

        shown = self.documents.file(self.names.extra_state)
        for _ in range(READ_ATTEMPTS):
            place = look(self.path.parent, self.names).get(self.names.extra_state)
            if place is None:
                raise self._no_state()
            try:
                archive = open_archive(place.path, shown)
            except CheckpointError:
                if self.was_replaced:
                    break
                if place.path.exists():
                    raise
                continue  # a finished intent moved it to its real name
            if not self.was_replaced:
                return archive
            archive.close()
            break
        raise replaced(self.path)

    def _no_state(self) -> CheckpointIncompleteError:
        missing = self.documents.file(self.names.extra_state)
        return CheckpointIncompleteError(
            f"{missing}: missing, so optimizer, scheduler and extra state are gone (present: "
            f"{', '.join(self.documents.places)}); resume from another checkpoint of the run, or "
            "load only the weights: milepost.Checkpoint.open(path).read_weights()",
            path=missing,
        )

    def state_tensors(self) -> Mapping[str, TensorInfo]:
        from milepost.layouts.single_file import lazy_info
        from milepost.layouts.torch_archive import walk_tensors

        with self.opened_state() as (_, tree):
            slots = {slot: tree.get(slot) for slot in STATE_SLOTS}
            return {
                name: lazy_info(name, tensor, self.names.extra_state)
                for name, tensor in walk_tensors(slots)
            }

    def training_state(self) -> Mapping[str, Any]:
        """The slots of `extra_state.pt` that are not None; its bytes are checked first."""
        state = self._put_back(self._sound_state())[0]
        return {slot: state[slot] for slot in STATE_SLOTS if state.get(slot) is not None}

    def _put_back(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """The state with its typed values where they belong, and those of the metadata."""
        if TYPED_KEY not in state:
            return dict(state), {}
        where = f"{self.documents.file(self.names.extra_state)}: {TYPED_KEY}"
        typed = TypedState.unpack(state[TYPED_KEY], where=where)
        return typed.put_back(state), typed.metadata

    def _sound_state(self) -> dict[str, Any]:
        from milepost.layouts.single_file import require_sound

        with self.opened_state() as (archive, tree):
            file, recorded = self.documents.file(self.names.extra_state), self.meta.extra_state
            require_sound(archive, file)
            if recorded is not None and archive.recorded_digest != recorded.digest:
                raise DigestMismatchError(
                    f"{file}: digest {archive.recorded_digest}, {self.names.meta} records "
                    f"{recorded.digest}; it is not the file that was saved",
                    path=file,
                )
            state: dict[str, Any] = archive.materialise(tree)
            return state

    def payload(self) -> Payload:
        """Everything, with the bytes of both data files checked; `DamagedError` when not sound."""
        state = self._sound_state()
        return self._payload(self.read_weights(), state)

    def weights_payload(self) -> Payload:
        """Weights and metadata; `extra_state.pt` is not looked at."""
        return self._payload(self.read_weights(), {})

    def _payload(self, weights: Mapping[str, Any], stored: Mapping[str, Any]) -> Payload:
        meta = self.meta
        state, typed_metadata = self._put_back(stored)
        model_state: OrderedDict[str, Any] = OrderedDict(weights)
        model_state.update(state.get(MODEL_EXTRA_KEY) or {})
        if state.get(MODEL_METADATA_KEY) is not None:
            model_state._metadata = state[MODEL_METADATA_KEY]  # type: ignore[attr-defined]
        slots: dict[str, Any] = {slot: state.get(slot) for slot in STATE_SLOTS}
        return Payload(
            model_state=model_state,
            **slots,
            model_config=meta.model_config,
            epoch=meta.epoch,
            step=meta.step,
            loss=meta.loss,
            best_loss=meta.best_loss,
            metrics=meta.metrics,
            format_version=meta.format_version,
            dialect=Dialect.TRIO,
            quantization=meta.unknown.get("quantization", meta.metadata.get("quantization")),
            metadata={**typed_metadata, **meta.as_metadata()},
            stored_names={new: old for new, old in self.weights.stored.items() if new != old},
            defaulted=meta.defaulted,
        )

    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        from milepost.layouts.trio_verify import verify_trio

        return verify_trio(self, threads=threads, on_bytes=on_bytes)
