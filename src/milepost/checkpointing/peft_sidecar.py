"""`peft_adapter_<method>.bin`: the adapter of a model, beside the checkpoint of its base.

The file is a `torch.save` dict of `format_version`, `method_name`, `peft_kwargs` and a `state_dict`
with the keys `<method>.<i>` in module order. Milepost adds `names`, the parameters by position, and
`base`, by which another base is noticed. Files without them are read by position.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from milepost.checkpointing.peft_methods import (
    BITFIT,
    Structure,
    adapter_tensors,
    base_record,
    lacks_method,
    put_on,
    recorded_kwargs,
    require_known,
)
from milepost.errors import (
    FormatError,
    InvalidInputError,
    KeyMismatchError,
    MismatchError,
    NotFoundError,
    ShapeMismatchError,
    UnsupportedVersionError,
)
from milepost.format.lazy import LazyTensor
from milepost.layouts.single_file import open_archive, require_sound
from milepost.layouts.torch_archive import TorchArchive, write_archive
from milepost.state.names import FQN
from milepost.state.tensors import is_dtensor
from milepost.storage import atomic, fileops
from milepost.storage.fileops import PathLike
from milepost.storage.intent import rename_and_sync
from milepost.storage.owned_names import owned_name, remove_dead
from milepost.storage.space import require_space, storage_error

logger = logging.getLogger(__name__)

FORMAT_VERSION = "1.0"
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The content of a file: `tensors` by position, `names` and `base` where it has them."""

    path: Path
    peft_kwargs: Mapping[str, Any]
    tensors: Sequence[LazyTensor]
    names: Sequence[FQN] | None
    base: Mapping[str, Any] | None


def peft_sidecar_path(checkpoint_dir: PathLike, method_name: str) -> Path:
    """Where the adapter of a checkpoint lies by default.

    >>> peft_sidecar_path("run", "lora").name
    'peft_adapter_lora.bin'
    """
    require_known(method_name)
    return Path(checkpoint_dir) / f"peft_adapter_{method_name}.bin"


def save_peft(model: nn.Module, path: PathLike, method_name: str, **peft_kwargs: Any) -> Path:
    """Save the adapter of `model` to the file `path`, in place of an older one; returns the path.

    The adapter is what `peft` put on the model, else the parameters that are trained while others
    are frozen. `peft_kwargs` are the options that made it; what they do not say is recorded from
    the model. The file appears complete or not at all, is durable when this returns, and its
    parents are created.

    With torch.distributed only rank 0 writes, and may call this alone; parameters that are sharded
    as DTensors are gathered, for which every rank has to call it. `InvalidInputError` for an
    unknown method, another one than the model's, and an adapter with nothing in it.

    >>> save_peft(model, "run/peft_adapter_lora.bin", "lora", r=8)  # doctest: +SKIP
    """
    target = Path(path)
    require_known(method_name)
    _refuse_directory(target, method_name)
    adapter = adapter_tensors(model, method_name)
    _refuse_empty(adapter)
    kwargs, left_out = recorded_kwargs(model, peft_kwargs)
    values = [_whole(tensor) for tensor in adapter.values()]
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return target
    if left_out:
        logger.warning(
            "%s: options of the adapter that are no plain data are not recorded: %s; "
            "pass them to load_peft",
            target,
            ", ".join(left_out),
        )
    payload = {
        "format_version": FORMAT_VERSION,
        "method_name": method_name,
        "peft_kwargs": kwargs,
        "state_dict": {f"{method_name}.{index}": value for index, value in enumerate(values)},
        "names": list(adapter),
        "base": base_record(model, adapter),
    }
    _write(target, payload, sum(value.nbytes for value in values))
    return target


def _refuse_directory(path: Path, method: str) -> None:
    if path.is_dir():
        raise InvalidInputError(
            f"{path}: a directory, and the adapter is a file; pass {path}/peft_adapter_{method}.bin"
        )


def _refuse_empty(adapter: Mapping[FQN, Tensor]) -> None:
    empty = [name for name, tensor in adapter.items() if tensor.numel() == 0]
    if empty:
        raise InvalidInputError(
            f"{empty[0]}: {tuple(adapter[empty[0]].shape)}, without an element "
            f"({len(empty)} of {len(adapter)} parameters of the adapter are empty); the model is "
            f"sharded by its trainer: gather its parameters first"
        )


def _whole(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    if is_dtensor(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    return value.cpu()


def _write(target: Path, payload: Mapping[str, Any], nbytes: int) -> None:
    try:
        fileops.make_directories(target.parent)
        remove_dead(target)
        require_space(target.parent, nbytes)
        temporary = owned_name(target)
        write_archive(temporary, dict(payload))
        try:
            rename_and_sync(temporary, target)
        except BaseException:
            atomic.remove_quietly(temporary)
            raise
    except OSError as error:
        raise storage_error(error, target) from error


def load_peft(
    model: nn.Module, path: PathLike, method_name: str, **override_kwargs: Any
) -> nn.Module:
    """Fill the adapter of `model` from the file `path`; returns the model that has it.

    A model without an adapter gets one first, with the options in the file, of which
    `override_kwargs` wins; what `peft` then returns is the result. Tensors are matched by name,
    by position in files that record no names, and cast to the model's dtype and device; casts are
    logged. Bytes are checked against their digest or checksums.

    Every error leaves the model as it was: `NotFoundError`, `InvalidInputError` for an unknown or
    another method, `UnsupportedVersionError`, `UnsafePickleError`, `DamagedError`, and
    `MismatchError` when counts, names, shapes or the base differ.

    >>> model = load_peft(model, "run/peft_adapter_lora.bin", "lora")  # doctest: +SKIP
    """
    place = Path(path)
    require_known(method_name)
    _refuse_directory(place, method_name)
    with _open(place) as archive:
        sidecar = _read(archive.tree, place, method_name)
        require_sound(archive, place)
        structure = Structure(model)
        try:
            adapted = _adapted(model, sidecar, method_name, override_kwargs)
            adapter = adapter_tensors(adapted, method_name)
            pairs = _pairs(adapter, sidecar)
            _require_base(base_record(adapted, adapter), sidecar)
            values = archive.materialise(list(sidecar.tensors))
        except BaseException:
            structure.put_back()
            raise
    for (name, tensor), value in zip(pairs, values, strict=True):
        _fill(tensor, value, f"{place}: {name}")
    return adapted


def _open(path: Path) -> TorchArchive:
    if not path.exists():
        raise NotFoundError(f"{path}: no such adapter file", path=path)
    return open_archive(path, path)


def _read(tree: Any, path: Path, method: str) -> Sidecar:
    """The content of a file, its form checked."""
    wanted = {"format_version": object, "method_name": str, "peft_kwargs": dict, "state_dict": dict}
    if not isinstance(tree, dict):
        raise FormatError(f"{path}: no adapter file: a {type(tree).__name__}, not a dict")
    for key, kind in wanted.items():
        if not isinstance(tree.get(key), kind) or tree.get(key) is None:
            raise FormatError(
                f"{path}: no adapter file: {key} is missing or a {type(tree.get(key)).__name__}"
            )
    if tree["format_version"] != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{path}: format_version is {tree['format_version']!r:.50}, expected "
            f"{FORMAT_VERSION!r}; read it with the version that wrote it",
            path=path,
        )
    if tree["method_name"] != method:
        raise InvalidInputError(
            f"{path}: an adapter of the method {tree['method_name']!r:.50}, not {method!r}; "
            f"pass the method of the file"
        )
    tensors = _by_position(tree["state_dict"], path, method)
    return Sidecar(
        path=path,
        peft_kwargs=tree["peft_kwargs"],
        tensors=tensors,
        names=_names(tree.get("names"), path, len(tensors)),
        base=tree["base"] if isinstance(tree.get("base"), dict) else None,
    )


def _by_position(state: Mapping[Any, Any], path: Path, method: str) -> list[LazyTensor]:
    keys = [f"{method}.{index}" for index in range(len(state))]
    wrong = next((key for key in keys if not isinstance(state.get(key), LazyTensor)), None)
    if wrong is not None or not keys:
        raise FormatError(
            f"{path}: state_dict has {len(state)} entries and no tensor {wrong or f'{method}.0'}; "
            f"the file is not complete",
            path=path,
        )
    return [state[key] for key in keys]


def _names(names: Any, path: Path, count: int) -> list[FQN] | None:
    if names is None:
        return None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(set(names)) != count or len(names) != count:
        raise FormatError(f"{path}: names: expected a list of {count} different names", path=path)
    return list(names)


def _adapted(
    model: nn.Module, sidecar: Sidecar, method: str, overrides: Mapping[str, Any]
) -> nn.Module:
    if not lacks_method(model, method, sidecar.names):
        if overrides:
            logger.warning("the model has its adapter already; unused: %s", ", ".join(overrides))
        return model
    if method == BITFIT and overrides:
        raise InvalidInputError(f"{BITFIT} takes no options, found {', '.join(overrides)}")
    return put_on(model, method, {**sidecar.peft_kwargs, **overrides})


def _pairs(adapter: Mapping[FQN, Tensor], sidecar: Sidecar) -> list[tuple[FQN, Tensor]]:
    """Name and live tensor for each position of the file; all that does not fit in one error."""
    path, names = sidecar.path, sidecar.names
    if names is None:
        names = [n for n, t in adapter.items() if t.requires_grad] or list(adapter)
        if len(names) != len(sidecar.tensors):
            raise KeyMismatchError(
                f"{path}: the file holds {len(sidecar.tensors)} tensors, the adapter of the model "
                f"has {len(names)}; were other options used, or another base?"
            )
    missing = [name for name in adapter if name not in set(names)] if sidecar.names else []
    unexpected = [name for name in names if name not in adapter]
    if missing or unexpected:
        raise KeyMismatchError(
            f"{path}: the file holds {len(names)} tensors, the adapter of the model has "
            f"{len(adapter)}: {len(missing)} missing in the file{_first(missing)}, "
            f"{len(unexpected)} unexpected{_first(unexpected)}; were other options used, or "
            f"another base?",
            missing=missing,
            unexpected=unexpected,
        )
    wrong = [
        f"{index} ({name}): the file holds {tuple(lazy.shape)}, the model wants "
        f"{tuple(adapter[name].shape)}"
        for index, (name, lazy) in enumerate(zip(names, sidecar.tensors, strict=True))
        if tuple(lazy.shape) != tuple(adapter[name].shape)
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ShapeMismatchError(
            f"{path}: tensor {'; tensor '.join(wrong[:_SHOWN])}{more}; were other options used?"
        )
    return [(name, adapter[name]) for name in names]


def _first(names: Sequence[FQN]) -> str:
    return f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})" * bool(names)


def _require_base(live: Mapping[str, Any], sidecar: Sidecar) -> None:
    recorded = sidecar.base
    if recorded is not None and recorded.get("digest") != live["digest"]:
        raise MismatchError(
            f"{sidecar.path}: the adapter was trained on a base of {recorded.get('parameters')} "
            f"parameters with the digest {recorded.get('digest')}; the model has "
            f"{live['parameters']} with {live['digest']} (names and shapes); load the base it "
            f"was trained on"
        )


@torch.no_grad()
def _fill(tensor: Tensor, value: Tensor, where: str) -> None:
    if value.dtype != tensor.dtype:
        logger.warning("%s: cast from %s to %s", where, value.dtype, tensor.dtype)
    if is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor

        held: Any = tensor
        value = distribute_tensor(
            value.to(held.device), held.device_mesh, held.placements, src_data_rank=None
        )
    tensor.copy_(value)
