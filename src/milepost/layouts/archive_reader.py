"""Reading `torch.save` archives: the structure at once and without torch, tensors when asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milepost.errors import FormatError
from milepost.format.lazy import ITEM_NBYTES, LazyTensor, StorageRef
from milepost.format.pickle_tree import children
from milepost.format.pickles import loads
from milepost.format.torch_globals import storage_reference
from milepost.layouts.archive_names import join
from milepost.layouts.archive_zip import ArchiveFile, Record
from milepost.storage.fileops import PathLike

if TYPE_CHECKING:
    import torch

    from milepost.layouts.checkpoint import Problem

_PICKLE = "/data.pkl"


class TorchArchive:
    """An open archive of `torch.save`: `tree` is what was saved, with `LazyTensor` for tensors.

    Opening reads the zip directory and the pickle, no byte of a tensor, and needs no torch. The
    pickle goes through the safe unpickler; `allow` names further classes, whose instances come out
    as `Opaque`. Raises `FormatError` for what is no sound archive, `UnsafePickleError` for one that
    holds more than data, `NotFoundError` when there is no file.

    With `window`, the archive is that byte range of the file.

    >>> with TorchArchive.open("latest.pt") as archive:                    # doctest: +SKIP
    ...     archive.tree["model_state"]["lm_head.weight"].shape
    (32000, 4096)
    """

    def __init__(self, file: ArchiveFile, root: str, tree: Any) -> None:
        self.file = file
        self.path = file.path
        self.root = root
        self.tree = tree

    @classmethod
    def open(
        cls,
        path: PathLike,
        *,
        allow: Collection[str] = (),
        window: tuple[int, int] | None = None,
    ) -> TorchArchive:
        file = ArchiveFile(path, window=window)
        try:
            root = find_root(file)
            tree = read_tree(file, root, allow)
        except BaseException:
            file.close()
            raise
        return cls(file, root, tree)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def records(self) -> Mapping[str, Record]:
        return self.file.records

    @property
    def recorded_digest(self) -> str | None:
        """XXH3-128 of the file as `write_archive` recorded it, or None."""
        return self.file.recorded_digest

    @property
    def version(self) -> str | None:
        """torch's number for the format, such as "3"."""
        return self._text("version")

    @property
    def serialization_id(self) -> str | None:
        return self._text(".data/serialization_id")

    def _text(self, name: str) -> str | None:
        return read_text(self.file, f"{self.root}/{name}")

    def tensors(self) -> dict[str, LazyTensor]:
        """The tensors of the tree by dotted key; a tensor at two places has two keys."""
        return dict(walk_tensors(self.tree))

    def storage_record(self, storage: StorageRef) -> Record:
        """Where the bytes of a storage lie in the file."""
        return self.records[f"{self.root}/data/{storage.key}"]

    def check(self) -> list[Problem]:
        """Every record against its CRC32; the structure was checked on opening."""
        from milepost.layouts.archive_verify import bad_records

        return bad_records(self.file)

    def materialise(self, value: Any) -> Any:
        """The same structure with torch tensors, on the CPU.

        Each storage below `value` is read once, so ties and views share memory as they did.
        """
        from milepost.layouts.archive_tensors import Materialiser

        return Materialiser(self).value(value, "")

    def read_tensor(self, tensor: LazyTensor) -> torch.Tensor:
        """One tensor, reading only the part of its storage that it covers; shares with nothing."""
        from milepost.layouts.archive_tensors import read_alone

        return read_alone(self, tensor)


def find_root(file: ArchiveFile) -> str:
    """The directory inside the archive, after checking that this is data saved by torch.save."""
    roots = [n.removesuffix(_PICKLE) for n in file.records if n.endswith(_PICKLE)]
    roots = [root for root in roots if "/" not in root]
    if len(roots) != 1:
        raise FormatError(
            f"{file.path}: a zip file, but not one of torch.save: {len(roots)} records are named "
            f"<root>/data.pkl, 1 is expected",
            path=file.path,
        )
    root = roots[0]
    if any(n.startswith((f"{root}/code/", f"{root}/constants.pkl")) for n in file.records):
        raise FormatError(
            f"{file.path}: a TorchScript archive, which holds code; load it with torch.jit.load "
            f"and save its state_dict()",
            path=file.path,
        )
    order = read_text(file, f"{root}/byteorder")
    if order not in (None, "little"):
        raise FormatError(
            f"{file.path}: its byte order is {order!r}; only little-endian files are read: load "
            f"it with torch and save it again on a little-endian machine",
            path=file.path,
        )
    return root


def read_tree(file: ArchiveFile, root: str, allow: Collection[str]) -> Any:
    """The structure in `data.pkl`, each storage checked against its record."""
    storages: dict[str, StorageRef] = {}

    def load_storage(identity: object) -> StorageRef:
        found = storage_reference(identity)
        known = storages.setdefault(found.key, found)
        if known != found:
            raise ValueError(f"storage {found.key[:40]!r} is described in two ways")
        record = file.records.get(f"{root}/data/{found.key}")
        if record is None:
            raise ValueError(f"the bytes of storage {found.key[:40]!r} are missing")
        if not found.nbytes <= record.nbytes < found.nbytes + ITEM_NBYTES[found.dtype]:
            raise ValueError(
                f"storage {found.key[:40]!r} wants {found.nbytes} bytes, its record has "
                f"{record.nbytes}"
            )
        return known

    record = file.records[f"{root}{_PICKLE}"]
    raw = file.read(record.start, record.nbytes)
    return loads(raw, where=str(file.path), allow=allow, persistent_load=load_storage)


def read_text(file: ArchiveFile, name: str) -> str | None:
    record = file.records.get(name)
    if record is None:
        return None
    return file.read(record.start, min(record.nbytes, 100)).decode("ascii", "replace").strip()


def walk_tensors(value: Any, key: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Dotted key and tensor of each tensor below `value`, in order."""
    match value:
        case LazyTensor():
            yield key, value
        case dict():
            for name, item in value.items():
                yield from walk_tensors(item, join(key, name))
        case _:
            for index, item in enumerate(children(value)):
                yield from walk_tensors(item, join(key, index))
