"""`Checkpoint`: one handle for every layout on disk.

Opening reads headers and documents only: no tensor byte, no torch. Reading a tensor reads just its
bytes. Each layout is a subclass in a module of its own; `Checkpoint.open` recognises which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from milepost.storage.fileops import PathLike

if TYPE_CHECKING:
    import torch

Index: TypeAlias = Sequence[slice]


class Layout(Enum):
    """How a checkpoint lies on disk; the value is what `milepost ls` prints."""

    DIRECTORY = "directory"
    TRIO = "trio"
    SINGLE_FILE = "single-file"
    LEGACY = "legacy"
    HUGGING_FACE = "hugging-face"
    TORCH_DCP = "torch-dcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A stored tensor: safetensors dtype name, global shape, bytes, and the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file of the checkpoint. `role` is `weights`, `state` or `info`; `nbytes` as on disk."""

    name: str
    nbytes: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says about itself; None where its layout does not record it.

    `extra` holds further metadata by key (provenance, writer, exactness, model_config, ...).
    """

    step: int | None = None
    epoch: float | None = None
    loss: float | None = None
    best_loss: float | None = None
    created: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_id: str | None = None
    generation: int = 0
    format_version: str | None = None
    dialect: str | None = None
    model_config: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Severity(Enum):
    ERROR = "error"
    """Bytes are wrong, missing or too many."""
    WARNING = "warning"
    """A file that only informs is wrong, or nothing is recorded to check against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that `verify` found: the file, the tensor that it hits if it hits one, and why."""

    severity: Severity
    file: str
    message: str
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` did. `has_digests` is False when only the structure could be checked."""

    path: Path
    problems: tuple[Problem, ...]
    checked_nbytes: int
    has_digests: bool

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is an error."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)


class Checkpoint(ABC):
    """A checkpoint that has been opened for reading.

    >>> checkpoint = Checkpoint.open("run/checkpoint-1000")       # doctest: +SKIP
    >>> checkpoint.read("lm_head.weight", [slice(0, 128)]).shape  # doctest: +SKIP
    torch.Size([128, 4096])
    """

    layout: Layout

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open(path: PathLike) -> Checkpoint:
        """Recognise what lies at `path` and open it.

        `path` is a checkpoint directory, a Hugging Face directory, a directory of torch's
        distributed checkpoint, the stem or any file of a trio, or a `.pt` file. `NotFoundError`
        when nothing is there, `NotCommittedError` when a directory holds no committed checkpoint
        and no model either, `DamagedError` when its documents are malformed,
        `UnsupportedVersionError` when a newer version wrote it.
        """
        from milepost.layouts.recognise import open_checkpoint

        return open_checkpoint(Path(path))

    @property
    @abstractmethod
    def info(self) -> CheckpointInfo:
        """What the checkpoint says about itself."""

    @abstractmethod
    def files(self) -> Sequence[FileInfo]:
        """Its files, the manifest or metadata file last."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The weights of the (first) model by name, in file order; a tied name is not listed."""

    @property
    @abstractmethod
    def tied(self) -> Mapping[str, str]:
        """Names without a tensor of their own, and the name whose tensor they share."""

    @abstractmethod
    def state_tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors of the training state (moments, random state, ...) by name."""

    @abstractmethod
    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        """The weight `name` as a new CPU tensor, or the slice `tensor[index]` of it.

        `index` is one slice per leading dim, of step 1. Only the bytes of the result are read, as
        far as neighbouring rows allow. `NotFoundError` names close matches.
        """

    @abstractmethod
    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """All weights, or those named, on CPU; tied names map to one tensor object.

        Not one byte of the training state is read.
        """

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill existing tensors with the weights of their names, in place.

        Shape and dtype must be the stored ones: `ShapeMismatchError` or `DtypeMismatchError` names
        the tensor before any target has changed. Strides and devices are the target's.
        """
        from milepost.layouts.weights import check_targets, fill_one_by_one

        check_targets(self.tensors(), self.tied, targets)
        fill_one_by_one(self.read, targets)

    def mapped(self, name: str) -> torch.Tensor:
        """The weight `name` as a private map of its file where the layout allows it, else read.

        Pages are read when touched. Writing to the tensor changes this process's copy only, and a
        later save over the checkpoint does not change it: files are replaced, never rewritten.
        """
        return self.read(name)

    @abstractmethod
    def training_state(self) -> Mapping[str, Any]:
        """The training state by key, decoded, tensors on CPU; empty when there is none."""

    @abstractmethod
    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        """Check presence, sizes, structure and every recorded digest; never raises for damage."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.nbytes for file in self.files())
