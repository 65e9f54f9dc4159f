"""Directories of torch's distributed checkpoint (DCP): read as they are, never written.

Global tensors are put together from the chunks that ranks wrote, slice by slice; nothing of
`torch.distributed.checkpoint` is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import CheckpointError, InvalidInputError, NotFoundError
from milepost.format.lazy import ITEM_NBYTES
from milepost.geometry.blocks import normalise_spans
from milepost.geometry.placement import whole
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
from milepost.layouts.dcp_items import DcpItems, fill_from_chunks
from milepost.layouts.dcp_metadata import (
    METADATA_NAME,
    DcpMetadata,
    DcpTensor,
    Item,
    Key,
    read_metadata,
)
from milepost.layouts.dcp_names import DcpParts, sort_parts

if TYPE_CHECKING:
    import torch

DCP_FILES = "__*_*.distcp"
_STEP_PLACES = (("step",), ("global_step",), ("train_state", "step"), ("trainer", "global_step"))
_STEP_NAME = re.compile(r"(?:step|checkpoint)[-_](\d+)")


class DcpCheckpoint(Checkpoint):
    """A directory with a `.metadata` of DCP and the `.distcp` files that it names."""

    layout = Layout.TORCH_DCP

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata: DcpMetadata = read_metadata(path)
        self.items = DcpItems(path)

    @cached_property
    def parts(self) -> DcpParts:
        """Which entries are weights, which are optimizers."""
        return sort_parts(self.metadata)

    @cached_property
    def info(self) -> CheckpointInfo:
        version = self.metadata.version
        return CheckpointInfo(step=self._step(), format_version=version, dialect="torch-dcp")

    def _step(self) -> int | None:
        """The step that the state records under a usual name, else the one in the directory's."""
        for place, name in self.parts.others.items():
            if any(place[-len(usual) :] == usual for usual in _STEP_PLACES):
                value = self.value(name)
                number = value.item() if hasattr(value, "item") and value.numel() == 1 else value
                if type(number) is int and number >= 0:
                    return number
        found = _STEP_NAME.fullmatch(self.path.name)
        return None if found is None else int(found[1])

    def value(self, name: str) -> Any:
        """An entry by its flat name, tensor or not."""
        if name in self.metadata.tensors:
            return self.read_tensor(self.metadata.tensors[name])
        return self.items.value(name, self.metadata.values[name])

    def files(self) -> Sequence[FileInfo]:
        weights = {chunk.item.file for tensor in self._weights.values() for chunk in tensor.chunks}
        found = [
            FileInfo(
                name=entry.name,
                nbytes=entry.stat().st_size,
                role="weights" if entry.name in weights else "info",
            )
            for entry in sorted(self.path.iterdir())
            if entry.is_file() and entry.name != METADATA_NAME
        ]
        nbytes = (self.path / METADATA_NAME).stat().st_size
        return [*found, FileInfo(name=METADATA_NAME, nbytes=nbytes, role="state")]

    @cached_property
    def _weights(self) -> Mapping[str, DcpTensor]:
        return next(iter(self.parts.models.values()), {})

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: _info(name, tensor) for name, tensor in self._weights.items()}

    @property
    def tied(self) -> Mapping[str, str]:
        return {}

    def state_tensors(self) -> Mapping[str, TensorInfo]:
        own = {tensor.name for tensor in self._weights.values()}
        return {
            name: _info(name, tensor)
            for name, tensor in self.metadata.tensors.items()
            if name not in own
        }

    def find(self, name: str) -> DcpTensor:
        """A weight by name; `NotFoundError` with close matches when there is none."""
        if name not in self._weights:
            close = get_close_matches(name, self._weights, n=3)
            hint = f"; close: {', '.join(close)}" if close else ""
            raise NotFoundError(
                f"{self.path}: no tensor {name!r} among {len(self._weights)}{hint}", path=self.path
            )
        return self._weights[name]

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        return self.read_tensor(self.find(name), index)

    def read_tensor(self, tensor: DcpTensor, index: Index | None = None) -> torch.Tensor:
        """Any tensor of the directory, or a slice of it, as a new CPU tensor."""
        import torch

        try:
            spans = normalise_spans(tensor.shape, index or ())
        except ValueError as error:
            raise InvalidInputError(
                f"{tensor.name}: {error}; the stored shape is {tensor.shape}"
            ) from error
        shape = [end - start for start, end in spans]
        out = torch.empty(shape, dtype=getattr(torch, tensor.dtype))
        fill_from_chunks(self.items, [(tensor, tuple((span,) for span in spans), out)])
        return out

    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        import torch

        wanted = {name: self.find(name) for name in (self._weights if names is None else names)}
        made = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for name, tensor in wanted.items()
        }
        fill_from_chunks(
            self.items, [(wanted[name], whole(wanted[name].shape), made[name]) for name in wanted]
        )
        return made

    def training_state(self) -> Mapping[str, Any]:
        """Everything but the weights, nested as it was saved: an optimizer under the container
        that it stood in, with its own `state` and `param_groups`."""
        entries: dict[Key, str] = dict(self.parts.others)
        for root, own in self.parts.optimizers.items():
            entries.update({(*root, *place): name for place, name in own.items()})
        for container in list(self.parts.models)[1:]:
            for name, tensor in self.parts.models[container].items():
                entries[*container, name] = tensor.name
        tree = self.tree(entries)
        return {str(key): value for key, value in tree.items()}

    def tree(self, entries: Mapping[Key, str]) -> Any:
        """The values of flat names, nested by their places."""
        tree: dict[Any, Any] = {}
        for place, name in entries.items():
            _set(tree, place, self.value(name))
        return _lists(tree)

    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        problems: list[Problem] = []
        checked = 0
        for name, item in self._all_items():
            problems += self._check(name, item)
            checked += item.nbytes
            if on_bytes is not None:
                on_bytes(item.nbytes)
        return VerifyReport(
            path=self.path, problems=tuple(problems), checked_nbytes=checked, has_digests=False
        )

    def _all_items(self) -> Iterator[tuple[str, Item]]:
        yield from self.metadata.values.items()
        for tensor in self.metadata.tensors.values():
            for chunk in tensor.chunks:
                yield tensor.name, chunk.item

    def _check(self, name: str, item: Item) -> list[Problem]:
        """Presence, bounds, and the checksums of an archive."""
        try:
            if not self.items.is_archive(name, item):
                return []
            with self.items.archive(name, item) as archive:
                return [
                    Problem(
                        severity=problem.severity,
                        file=item.file,
                        message=f"{name}: {problem.message}",
                        tensor=name,
                    )
                    for problem in archive.check()
                ]
        except CheckpointError as error:
            return [
                Problem(severity=Severity.ERROR, file=item.file, message=str(error), tensor=name)
            ]


def is_dcp(path: Path) -> bool:
    """Whether a directory is one of DCP."""
    return (path / METADATA_NAME).is_file()


def _info(name: str, tensor: DcpTensor) -> TensorInfo:
    shape = tensor.header_shape(tensor.shape)
    files = sorted({chunk.item.file for chunk in tensor.chunks})
    return TensorInfo(
        name=name,
        dtype=tensor.dtype_name,
        shape=shape,
        nbytes=prod(tensor.shape) * ITEM_NBYTES[tensor.dtype],
        file=", ".join(files),
    )


def _set(tree: dict[Any, Any], place: Key, value: Any) -> None:
    for part in place[:-1]:
        tree = tree.setdefault(part, {})
    tree[place[-1]] = value


def _lists(value: Any) -> Any:
    """Containers that were lists, whose keys are 0, 1, 2, as lists again."""
    if not isinstance(value, dict):
        return value
    made = {key: _lists(item) for key, item in value.items()}
    if made and list(made) == list(range(len(made))):
        return list(made.values())
    return made
