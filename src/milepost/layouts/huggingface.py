"""Hugging Face directories and lone safetensors files: read as they are, nothing recorded to check.

Recognised: `model.safetensors` or an index with its parts, an adapter, and what the Hugging Face
Trainer puts beside them. Symlinks are followed: hub caches consist of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import CheckpointError
from milepost.layouts.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    FileInfo,
    Index,
    Layout,
    Problem,
    Severity,
    TensorInfo,
    VerifyReport,
)
from milepost.layouts.tensor_set import TensorSet
from milepost.layouts.weights import map_one, read_into, read_many, read_one

if TYPE_CHECKING:
    import torch

    from milepost.engine.read import StoredTensor

STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
_STATE_FILES = ("optimizer.pt", "scheduler.pt", "scaler.pt")


class HuggingFaceCheckpoint(Checkpoint):
    """A directory that `from_pretrained` loads, or one safetensors file."""

    layout = Layout.HUGGING_FACE

    def __init__(self, path: Path, *, stem: str) -> None:
        super().__init__(path)
        self._set = TensorSet(path if path.is_dir() else path.parent, stem)

    @cached_property
    def _trainer_state(self) -> dict[str, Any]:
        return _read_object(self._set.directory / "trainer_state.json")

    @property
    def info(self) -> CheckpointInfo:
        state = self._trainer_state if self.path.is_dir() else {}
        step, epoch = state.get("global_step"), state.get("epoch")
        return CheckpointInfo(
            step=step if isinstance(step, int) else None,
            epoch=float(epoch) if isinstance(epoch, int | float) else None,
            dialect="hugging-face-trainer" if state else "hugging-face",
            model_config=self.config or None,
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, empty when there is none."""
        return _read_object(self._set.directory / "config.json") if self.path.is_dir() else {}

    def files(self) -> Sequence[FileInfo]:
        if not self.path.is_dir():
            return [FileInfo(name=self.path.name, nbytes=self.path.stat().st_size, role="weights")]
        weights = set(self._set.part_names)
        return [
            FileInfo(
                name=entry.name,
                nbytes=entry.stat().st_size,
                role="weights" if entry.name in weights else "info",
            )
            for entry in sorted(self.path.iterdir())
            if entry.is_file()
        ]

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._set.tensors

    @property
    def tied(self) -> Mapping[str, str]:
        return {}

    def state_tensors(self) -> Mapping[str, TensorInfo]:
        return {}

    def stored(self, name: str) -> StoredTensor:
        """Where the bytes of a weight lie."""
        return self._set.stored(name)

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        return read_one(self._set, {}, name, index)

    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        return read_many(self._set, {}, names)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        read_into(self._set, {}, targets)

    def mapped(self, name: str) -> torch.Tensor:
        return map_one(self._set, {}, name)

    def training_state(self) -> Mapping[str, Any]:
        """Optimizer, scheduler and scaler of a Hugging Face Trainer, as their state dicts, and its
        random state; keyed by parameter position, as that trainer stores them."""
        from milepost.layouts.torch_archive import TorchArchive

        state: dict[str, Any] = {}
        directory = self._set.directory
        names = [*_STATE_FILES, *sorted(path.name for path in directory.glob("rng_state*.pth"))]
        for name in names if self.path.is_dir() else ():
            if (directory / name).exists():
                archive = TorchArchive.open(directory / name)
                state[name.rpartition(".")[0]] = archive.materialise(archive.tree)
        return state

    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        problems = []
        try:
            _ = self._set.headers
        except CheckpointError as error:
            file = Path(error.path or self._set.index_path).name
            problems.append(Problem(severity=Severity.ERROR, file=file, message=str(error)))
        if self._set.has_single and self._set.index is None and self._set.index_path.exists():
            name = self._set.index_path.name
            message = f"{name}: left behind by an earlier save; loaders take the one part beside it"
            problems.append(Problem(severity=Severity.WARNING, file=name, message=message))
        return VerifyReport(
            path=self.path, problems=tuple(problems), checked_nbytes=0, has_digests=False
        )


def huggingface_stem(path: Path) -> str | None:
    """The stem of the weights in directory `path`, if it holds safetensors weights."""
    return next((stem for stem in STEMS if TensorSet(path, stem).exists()), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
