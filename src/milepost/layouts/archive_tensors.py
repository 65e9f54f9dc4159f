"""From the records of an opened archive to torch tensors, with the sharing they were saved with."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from milepost.errors import FormatError
from milepost.format.lazy import (
    ITEM_NBYTES,
    LazyTensor,
    Opaque,
    StorageRef,
    StorageType,
    TorchKind,
    TorchValue,
)
from milepost.format.pickle_globals import Global
from milepost.layouts.archive_names import join

if TYPE_CHECKING:
    from milepost.layouts.archive_reader import TorchArchive


class Materialiser:
    """One walk over a tree: a storage is read once, an object that was shared stays one object."""

    def __init__(self, archive: TorchArchive) -> None:
        self.archive = archive
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.made: dict[int, tuple[object, Any]] = {}

    def value(self, value: Any, key: str) -> Any:
        """`value` with tensors; `key` is its place, for messages."""
        known = self.made.get(id(value))
        if known is not None:
            return known[1]
        result = self._convert(value, key)
        self.made[id(value)] = (value, result)  # keeps `value` alive, so that its id stays its own
        return result

    def _convert(self, value: Any, key: str) -> Any:
        match value:
            case LazyTensor():
                return self._tensor(value, key)
            case TorchValue():
                return _torch_value(value, self.archive, key)
            case StorageRef():
                return self._storage(value)
            case StorageType() | Global():
                raise _error(self.archive, key, "a class stands where a value is expected")
            case dict():
                return self._mapping(value, key)
            case list():
                return [self.value(item, join(key, i)) for i, item in enumerate(value)]
            case tuple():
                return tuple(self.value(item, join(key, i)) for i, item in enumerate(value))
            case set() | frozenset():
                return type(value)(self.value(item, key) for item in value)
            case _:
                return self._rare(value, key)

    def _rare(self, value: Any, key: str) -> Any:
        match value:
            case deque():
                return deque((self.value(item, key) for item in value), value.maxlen)
            case SimpleNamespace():
                return SimpleNamespace(**self._attributes(vars(value), key))
            case Opaque():
                return Opaque(
                    class_name=value.class_name,
                    args=self.value(value.args, key),
                    kwargs=self.value(value.kwargs, key),
                    state=self.value(value.state, key),
                    items=self.value(value.items, key),
                    entries=self.value(value.entries, key),
                )
            case _:
                return value

    def _mapping(self, value: dict[Any, Any], key: str) -> dict[Any, Any]:
        result: dict[Any, Any]
        if isinstance(value, defaultdict):
            result = defaultdict(value.default_factory)
        else:
            result = type(value)()
        for name, item in value.items():
            result[self.value(name, key)] = self.value(item, join(key, name))
        if isinstance(value, OrderedDict):
            vars(result).update(self._attributes(vars(value), key))
        assert isinstance(result, dict | OrderedDict | Counter)
        return result

    def _attributes(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        return {name: self.value(item, join(key, name)) for name, item in values.items()}

    def _storage(self, storage: StorageRef) -> torch.UntypedStorage:
        if storage.key not in self.storages:
            record = self.archive.storage_record(storage)
            self.storages[storage.key] = _read(self.archive, record.start, record.nbytes)
        return self.storages[storage.key]

    def _tensor(self, lazy: LazyTensor, key: str) -> torch.Tensor:
        storage = self._storage(lazy.storage)
        tensor = _view(self.archive, lazy, storage, lazy.storage_offset, key)
        attributes = self._attributes(lazy.attributes, key)
        for name in attributes:
            if hasattr(torch.Tensor, name):
                raise _error(self.archive, key, f"a tensor would lose its attribute {name!r}")
        vars(tensor).update(attributes)
        return tensor


def read_alone(archive: TorchArchive, lazy: LazyTensor) -> torch.Tensor:
    """A tensor with a storage of its own, just as long as what it covers."""
    first, end = lazy.span
    item = ITEM_NBYTES[lazy.dtype]
    start = archive.storage_record(lazy.storage).start + first * item
    storage = _read(archive, start, (end - first) * item)
    return _view(archive, lazy, storage, 0, f"storage {lazy.storage_key}")


def _read(archive: TorchArchive, start: int, nbytes: int) -> torch.UntypedStorage:
    data = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        archive.file.read_into(data.numpy().data, start)
    return data.untyped_storage()


def _view(
    archive: TorchArchive, lazy: LazyTensor, storage: torch.UntypedStorage, offset: int, key: str
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=_dtype(lazy.dtype, archive, key))
    try:
        tensor.set_(storage, offset, lazy.shape, lazy.stride)
    except RuntimeError as error:
        raise _error(archive, key, f"torch cannot make this tensor: {error}") from error
    if lazy.conjugated:
        tensor = tensor.conj()
    if lazy.negated:
        tensor = torch._neg_view(tensor)
    if lazy.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=lazy.requires_grad)
    return tensor.requires_grad_(lazy.requires_grad)


def _torch_value(value: TorchValue, archive: TorchArchive, key: str) -> Any:
    match value.kind:
        case TorchKind.DTYPE:
            return _dtype(str(value.value), archive, key)
        case TorchKind.SIZE:
            return torch.Size(value.value)  # type: ignore[arg-type]
        case TorchKind.DEVICE:
            try:
                return torch.device(str(value.value))
            except RuntimeError as error:
                raise _error(archive, key, f"torch knows no device {value.value}") from error
        case TorchKind.LAYOUT:
            return torch.strided


def _dtype(name: str, archive: TorchArchive, key: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise _error(archive, key, f"this torch ({torch.__version__}) has no dtype {name}")
    return dtype


def _error(archive: TorchArchive, key: str, message: str) -> FormatError:
    return FormatError(f"{archive.path}: {key or 'the root'}: {message}", path=archive.path)
