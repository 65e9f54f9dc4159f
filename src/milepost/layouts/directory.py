"""The native layout: a directory `checkpoint-<step>` with a manifest, and a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from milepost.format import manifest as manifests
from milepost.format import strictjson
from milepost.format.manifest import FileEntry, Manifest, ModelEntry
from milepost.layouts.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    FileInfo,
    Index,
    Layout,
    TensorInfo,
    VerifyReport,
)
from milepost.layouts.tensor_set import TensorSet
from milepost.layouts.weights import map_one, read_into, read_many, read_one

if TYPE_CHECKING:
    import torch

STATE_FORMAT = "milepost-state"
PRIMARY = "model"


class DirectoryCheckpoint(Checkpoint):
    """A committed checkpoint directory.

    `damage` lists files whose size is not the stated one. Parts that are intact can be read even
    when others are not.
    """

    layout = Layout.DIRECTORY

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.manifest = read_manifest(path)

    @property
    def info(self) -> CheckpointInfo:
        manifest = self.manifest
        return CheckpointInfo(
            step=manifest.step,
            epoch=manifest.epoch,
            created=manifest.created,
            metrics=manifest.metrics,
            checkpoint_id=manifest.checkpoint_id,
            generation=manifest.generation,
            format_version=manifest.format_version,
            model_config=manifest.model_config,
            extra={
                "parent_id": manifest.parent_id,
                "writer": manifest.writer,
                "mesh": manifest.mesh,
                "fingerprint": manifest.fingerprint,
                "pp_stage_partition": manifest.pp_stage_partition,
                "phases": manifest.phases,
                "phase_nbytes": manifest.phase_nbytes,
                "provenance": manifest.provenance,
                "exactness": manifest.exactness,
                "notes": manifest.notes,
                "needs": manifest.needs,
                "linked": manifest.linked,
            },
        )

    @cached_property
    def damage(self) -> tuple[tuple[FileEntry, str], ...]:
        """Files that are absent or of another size than the manifest states, and how."""
        found = []
        for entry in self.manifest.files:
            problem = size_problem(self.path, entry)
            if problem is not None:
                found.append((entry, problem))
        return tuple(found)

    def files(self) -> Sequence[FileInfo]:
        listed = [
            FileInfo(name=entry.name, nbytes=entry.nbytes, role=entry.role)
            for entry in self.manifest.files
        ]
        own_nbytes = (self.path / manifests.MANIFEST_NAME).stat().st_size
        return [
            *listed,
            FileInfo(name=manifests.MANIFEST_NAME, nbytes=own_nbytes, role="state"),
        ]

    def model_keys(self) -> list[str]:
        """Keys of the models it holds, the one at the root first."""
        return sorted(self.manifest.models, key=lambda key: self.manifest.models[key].prefix != "")

    def model_entry(self, key: str | None = None) -> ModelEntry:
        """The entry of one model, by default the one at the root."""
        keys = self.model_keys()
        if not keys:
            raise NotFoundError(f"{self.path}: this checkpoint holds no model", path=self.path)
        if key is not None and key not in keys:
            raise NotFoundError(
                f"{self.path}: no model {key!r}; it holds {', '.join(keys)}", path=self.path
            )
        return self.manifest.models[keys[0] if key is None else key]

    def weights(self, key: str | None = None) -> TensorSet:
        """The parts of one model, by default the one at the root."""
        entry = self.model_entry(key)
        return self._tensor_set(entry.prefix, entry.stem)

    def _tensor_set(self, prefix: str, stem: str) -> TensorSet:
        directory = self.path / prefix if prefix else self.path
        return TensorSet(directory, stem, file_prefix=f"{prefix}/" if prefix else "")

    def state_set(self, key: str) -> TensorSet | None:
        """The parts of one state key that has its own (an optimizer)."""
        entry = self.manifest.state.get(key)
        if entry is None or entry.stem is None:
            return None
        return self._tensor_set("training", entry.stem)

    @cached_property
    def _primary(self) -> TensorSet:
        return self.weights()

    @property
    def tied(self) -> Mapping[str, str]:
        return self.model_entry().tied

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._primary.tensors if self.manifest.models else {}

    def state_tensors(self) -> Mapping[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for key in self.manifest.state:
            tensors = self.state_set(key)
            if tensors is not None:
                found.update({f"{key}.{name}": info for name, info in tensors.tensors.items()})
        if self.manifest.file(manifests.STATE_TENSORS_NAME) is not None:
            found.update(self._tensor_set("training", "state").tensors)
        return found

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        return read_one(self._primary, self.tied, name, index)

    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        return read_many(self._primary, self.tied, names)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        read_into(self._primary, self.tied, targets)

    def mapped(self, name: str) -> torch.Tensor:
        return map_one(self._primary, self.tied, name)

    def whole_document(self) -> dict[str, Any]:
        """`training/state.json` as it stands, its version checked."""
        path = self.path / manifests.STATE_NAME
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointIncompleteError(
                f"{path}: the training state is missing; weights can still be read", path=path
            ) from None
        document = strictjson.loads(raw, where=str(path))
        if not isinstance(document, dict) or document.get("format") != STATE_FORMAT:
            raise FormatError(f"{path}: not a training state of milepost", path=path)
        manifests.check_version({**document, "format": manifests.FORMAT}, str(path))
        return document

    def state_document(self) -> dict[str, Any]:
        """The typed tree of each state key, not decoded."""
        state = self.whole_document().get("state")
        if not isinstance(state, dict):
            path = self.path / manifests.STATE_NAME
            raise FormatError(f"{path}: state: expected an object", path=path)
        return state

    def training_state(self) -> Mapping[str, Any]:
        from milepost.format.tree import decode
        from milepost.state.tree_torch import MappingSource

        small = read_many(self._tensor_set("training", "state"), {}, None)
        where = str(self.path / manifests.STATE_NAME)
        decoded = {
            key: decode(value, MappingSource(small), where=f"{where}: {key}")
            for key, value in self.state_document().items()
        }
        for key in self.manifest.state:
            tensors = self.state_set(key)
            if tensors is not None:
                decoded[key] = {**decoded.get(key, {}), "tensors": read_many(tensors, {}, None)}
        return decoded

    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        from milepost.layouts.directory_verify import verify_directory

        return verify_directory(self, threads=threads, on_bytes=on_bytes)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory. `NotFoundError` when there is none."""
    place = path / manifests.MANIFEST_NAME
    try:
        if place.stat().st_size > manifests.MAX_MANIFEST_NBYTES:
            raise FormatError(
                f"{place}: {place.stat().st_size} bytes, a manifest has at most "
                f"{manifests.MAX_MANIFEST_NBYTES}",
                path=place,
            )
        raw = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{place}: no manifest", path=place) from None
    except OSError as error:
        raise unreadable(place, error) from error
    return manifests.parse_manifest(raw, str(place))


def unreadable(place: Path, error: OSError) -> StorageError:
    """The error for what is there and cannot be read: no damage, so nothing is concluded."""
    return StorageError(
        f"{place}: {error.strerror}; it can be neither used nor ruled out: see to the file system",
        path=place,
        number=error.errno,
    )


def size_problem(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with the presence or size of a file that the manifest lists."""
    place = path / entry.name
    try:
        stat = place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        raise unreadable(place, error) from error
    if any((path / part).is_symlink() for part in _prefixes(entry.name)):
        return (
            "lies behind a symlink; Milepost writes none into a checkpoint and follows none there"
        )
    if not S_ISREG(stat.st_mode):
        return "is not a regular file"
    if stat.st_size != entry.nbytes:
        return f"has {stat.st_size} bytes, the manifest says {entry.nbytes}"
    return None


def _prefixes(name: str) -> Iterator[str]:
    """`a`, `a/b` and `a/b/c` of `a/b/c`."""
    for number, character in enumerate(name):
        if character == "/":
            yield name[:number]
    yield name


def check_step_name(path: Path, step: int) -> None:
    """Refuse a directory name that states another step than `step`, or states it in another way."""
    digits = path.name.removeprefix("checkpoint-")
    if not path.name.startswith("checkpoint-") or not digits.isdecimal() or digits == str(step):
        return
    right = path.with_name(f"checkpoint-{step}")
    if int(digits) == step:
        raise InvalidInputError(
            f"{path}: no run would list it under that name; save to {right}", path=path
        )
    raise InvalidInputError(
        f"{path}: the name says step {int(digits)}, step={step} was given; "
        f"save to {right} or pass step={int(digits)}",
        path=path,
    )


def require_intact(
    checkpoint: DirectoryCheckpoint, roles: Iterable[str], leave_out: Collection[str] = ()
) -> None:
    """`DamagedError` naming every file of these roles that is absent or of a wrong size.

    Files named in `leave_out` are not asked for.
    """
    wanted = set(roles)
    bad = [
        f"{entry.name} {how}"
        for entry, how in checkpoint.damage
        if entry.role in wanted and entry.name not in leave_out
    ]
    if bad:
        rest = what_still_loads(checkpoint, {entry.name for entry, _ in checkpoint.damage})
        raise DamagedError(
            f"{checkpoint.path}: {len(bad)} files are not as they were saved: "
            f"{'; '.join(bad[:5])}; load an older checkpoint, or copy this one again{rest}",
            path=checkpoint.path,
        )


def what_still_loads(checkpoint: DirectoryCheckpoint, damaged: Collection[str]) -> str:
    """The end of a message about damaged files: what of the checkpoint is not concerned, if any."""
    roles = {entry.role for entry in checkpoint.manifest.files if entry.name in damaged}
    if roles - {"info"} == {"state"}:
        return "; its weights are not concerned: load them alone, {'model': model}"
    if roles - {"info"} == {"weights"}:
        return "; its training state is not concerned: load it without the model"
    return ""
