"""`<anything>.pt`: one `torch.save` file, ours or any legacy dialect, read lazily; and its writer.

What we write is the contract of the second source document: `model_state`, `optimizer` when there
is one, `metadata`, and each entry of the metadata once more at the top. The names `model_state`,
`optimizer` and `metadata` are therefore not free for metadata, and are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from milepost.errors import (
    DamagedError,
    ExistsError,
    InvalidInputError,
    UnsafePickleError,
)
from milepost.format.dtypes import by_torch_name
from milepost.format.lazy import LazyTensor
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
from milepost.layouts.legacy import read_payload
from milepost.layouts.payload import Dialect, Payload
from milepost.layouts.torch_archive import TorchArchive, verify_archive, walk_tensors
from milepost.layouts.trio_names import LEGACY_SUFFIX, look, split_suffix, trio_names
from milepost.layouts.trio_weights import absent_tensor, spans_of
from milepost.storage import atomic, fileops
from milepost.storage.fileops import PathLike
from milepost.storage.intent import read_intent, rename_and_sync, resolve_name
from milepost.storage.owned_names import owned_name, remove_dead
from milepost.storage.space import require_space, storage_error

if TYPE_CHECKING:
    import torch

RESERVED_KEYS = ("model_state", "optimizer", "metadata")
Region: TypeAlias = tuple[str, str, int, tuple[int, ...], tuple[int, ...]]


class SingleFileCheckpoint(Checkpoint):
    """A `.pt` that has been opened; `layout` is `LEGACY` for every dialect but our own.

    `allow` names classes (`module.name`) whose instances may stand in it; they come out as dicts of
    their attributes. The handle keeps reading the file that it opened, also when another has taken
    its name.
    """

    layout = Layout.LEGACY

    def __init__(self, path: Path, *, allow: Collection[str] = ()) -> None:
        super().__init__(path)
        place = resolve_name(path.parent, path.name) if path.parent.is_dir() else path
        self._archive = open_archive(place, path, allow=allow)
        self._content = read_payload(self._archive.tree, where=str(path))
        if self._content.dialect is Dialect.MODERN_LLM:
            self.layout = Layout.SINGLE_FILE

    @property
    def dialect(self) -> Dialect:
        return self._content.dialect

    @property
    def info(self) -> CheckpointInfo:
        content = self._content
        described = {"epoch", "step", "loss", "best_loss", "model_config", "config", "metrics"}
        return CheckpointInfo(
            step=content.step,
            epoch=None if "epoch" in content.defaulted else content.epoch,
            loss=content.loss,
            best_loss=None if "best_loss" in content.defaulted else content.best_loss,
            metrics=content.metrics,
            format_version=content.format_version,
            dialect=content.dialect,
            model_config=content.model_config,
            extra={k: v for k, v in content.metadata.items() if k not in described},
        )

    def files(self) -> Sequence[FileInfo]:
        return [FileInfo(name=self.path.name, nbytes=self._archive.file.nbytes, role="weights")]

    @cached_property
    def _lazy(self) -> dict[str, LazyTensor]:
        items = self._content.model_state.items()
        return {name: value for name, value in items if isinstance(value, LazyTensor)}

    @cached_property
    def _ties(self) -> dict[str, str]:
        kept: dict[Region, str] = {}
        ties: dict[str, str] = {}
        for name, tensor in self._lazy.items():
            first = kept.setdefault(_region(tensor), name) if tensor.numel else name
            if first != name:
                ties[name] = first
        return ties

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: lazy_info(name, tensor, self.path.name)
            for name, tensor in self._lazy.items()
            if name not in self._ties
        }

    @property
    def tied(self) -> Mapping[str, str]:
        return self._ties

    def state_tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: lazy_info(name, tensor, self.path.name)
            for name, tensor in walk_tensors(self._content.training_state())
        }

    def _find(self, name: str) -> LazyTensor:
        tensor = self._lazy.get(name)
        if tensor is None:
            raise absent_tensor(self.path, name, self._lazy)
        return tensor

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        lazy = self._find(name)
        if index is not None:
            spans = spans_of(name, lazy.shape, index)
            starts = (start * step for (start, _), step in zip(spans, lazy.stride, strict=True))
            lazy = replace(
                lazy,
                shape=tuple(end - start for start, end in spans),
                storage_offset=lazy.storage_offset + sum(starts),
            )
        return self._archive.read_tensor(lazy).detach()

    def read_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        wanted = list(self._lazy) if names is None else list(names)
        kept = {name: self._ties.get(name, name) for name in wanted}
        lazy = {name: self._find(name) for name in dict.fromkeys(kept.values())}
        read = self._archive.materialise(lazy)
        return {name: read[kept[name]] for name in wanted}

    def training_state(self) -> Mapping[str, Any]:
        """The slots that are there, under the names of a trio; the file's bytes are checked first.

        Dialects without a slot of a kind have no such key.
        """
        require_sound(self._archive, self.path)
        state: dict[str, Any] = self._archive.materialise(self._content.training_state())
        return state

    def payload(self) -> Payload:
        """Everything, the file's bytes checked; `DamagedError` when they are not sound."""
        require_sound(self._archive, self.path)
        payload = read_payload(self._archive.materialise(self._archive.tree), where=str(self.path))
        for name, kept in self._ties.items():
            assert isinstance(payload.model_state, dict), "state dicts are dicts"
            payload.model_state[name] = payload.model_state[kept]
        return payload

    def verify(
        self, *, threads: int = 1, on_bytes: Callable[[int], None] | None = None
    ) -> VerifyReport:
        problems = check_archive(self._archive, self.path)
        if on_bytes is not None:
            on_bytes(self._archive.file.nbytes)
        return VerifyReport(
            path=self.path,
            problems=tuple(problems),
            checked_nbytes=self._archive.file.nbytes,
            has_digests=self._archive.recorded_digest is not None,
        )


def _region(tensor: LazyTensor) -> Region:
    return (
        tensor.storage_key,
        tensor.dtype,
        tensor.storage_offset,
        tensor.shape,
        tensor.stride,
    )


def lazy_info(name: str, tensor: LazyTensor, file: str) -> TensorInfo:
    """A tensor of an archive as it is listed; a dtype that safetensors lacks keeps torch's name."""
    row = by_torch_name(tensor.dtype)
    shape = tensor.shape
    if row is not None and row.elements_per_torch > 1 and shape:
        shape = (*shape[:-1], shape[-1] * row.elements_per_torch)
    return TensorInfo(
        name=name,
        dtype=tensor.dtype if row is None else row.name,
        shape=shape,
        nbytes=tensor.nbytes,
        file=file,
    )


def open_archive(place: Path, shown: Path, *, allow: Collection[str] = ()) -> TorchArchive:
    """The archive at `place`; a pickle that is only unreadable for damage is `DamagedError`."""
    try:
        return TorchArchive.open(place, allow=allow)
    except UnsafePickleError:
        _refuse_damage(verify_archive(place), place, shown)
        raise


def check_archive(archive: TorchArchive, shown: Path) -> list[Problem]:
    """What `verify_archive` finds in the file that is open, under the name `shown`."""
    opened = Path(f"/dev/fd/{archive.file.descriptor}")
    place = opened if opened.exists() else archive.path
    return [
        replace(problem, file=shown.name, message=problem.message.replace(str(place), str(shown)))
        for problem in verify_archive(place)
    ]


def require_sound(archive: TorchArchive, shown: Path) -> None:
    """`DamagedError` when the bytes of an open archive do not give its digest or checksums."""
    _refuse_damage(check_archive(archive, shown), shown, shown)


def _refuse_damage(problems: Sequence[Problem], place: Path, shown: Path) -> None:
    errors = [problem.message for problem in problems if problem.severity is Severity.ERROR]
    if errors:
        text = "; ".join(errors[:3]).replace(str(place), str(shown))
        raise DamagedError(f"{shown}: damaged: {text}; use another checkpoint", path=shown)


def write_single_file(
    path: PathLike,
    model_state: Mapping[str, Any],
    optimizer_state: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write one `.pt`, its parents too, in place of any file or trio of its name, at once.

    `_orig_mod` segments are taken off the names; two names that become one are refused. So is what
    could not be loaded back, by its key, and metadata under a name that the file uses itself. An
    error leaves an older file as it was.
    """
    target = Path(path)
    payload = _payload(model_state, optimizer_state, metadata or {})
    _check_target(target)
    try:
        fileops.make_directories(target.parent)
        remove_dead(target)
        _write(target, payload)
    except OSError as error:
        raise storage_error(error, target) from error


def _payload(
    model_state: Mapping[str, Any], optimizer_state: Any, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    from milepost.format.names import strip_compile_prefix
    from milepost.layouts.torch_archive import check_loadable

    for key in RESERVED_KEYS:
        if key in metadata:
            raise InvalidInputError(
                f"metadata {key!r}: the file keeps {_USES[key]} under this name and repeats "
                f"metadata beside it, so one would be taken for the other; {_ADVICE[key]}"
            )
    payload: dict[str, Any] = {"model_state": strip_compile_prefix(model_state)}
    if optimizer_state is not None:
        payload["optimizer"] = optimizer_state
    payload["metadata"] = dict(metadata)
    payload |= metadata
    check_loadable(payload)
    return payload


_USES = {
    "model_state": "the weights",
    "optimizer": "the optimizer's state",
    "metadata": "all metadata",
}
_ADVICE = {
    "model_state": "call it otherwise",
    "optimizer": "call it optimizer_name, or pass a state dict as optimizer_state",
    "metadata": "pass its entries as keywords: save_checkpoint(..., **metadata)",
}


def _check_target(target: Path) -> None:
    suffix = split_suffix(target.name)[1]
    if suffix not in ("", LEGACY_SUFFIX):
        raise InvalidInputError(
            f"{target}: {suffix} names a file of a three-file checkpoint; use a name ending in .pt"
        )
    if target.is_dir():
        raise ExistsError(f"{target}: a directory has this name; choose another", path=target)


def _write(target: Path, payload: dict[str, Any]) -> None:
    from milepost.layouts.torch_archive import write_archive
    from milepost.layouts.trio_content import tensor_nbytes_below
    from milepost.layouts.trio_write import publish_file

    require_space(target.parent, tensor_nbytes_below(payload))
    temporary = owned_name(target)
    try:
        write_archive(temporary, payload)
        sidecars = _trio_of(target)
        if sidecars or read_intent(target.parent) is not None:
            publish_file(target.parent, temporary.name, target.name, sidecars)
        else:
            rename_and_sync(temporary, target)
    except BaseException:
        if os.path.lexists(temporary) and not _is_promised(temporary):
            atomic.remove_quietly(temporary)
        raise


def _is_promised(temporary: Path) -> bool:
    """Whether an intent record says that this file is to become the real one."""
    intent = read_intent(temporary.parent)
    return intent is not None and temporary.name in {source for source, _ in intent.renames}


def _trio_of(target: Path) -> list[str]:
    """The files of a trio that would count before `target`; a lone unstamped weights file is none,
    see `find_trio`."""
    from milepost.layouts.trio import is_stamped

    names = trio_names(split_suffix(target.name)[0])
    places = look(target.parent, names)
    if set(places) == {names.weights} and not is_stamped(places[names.weights].path):
        return []
    return list(places)
