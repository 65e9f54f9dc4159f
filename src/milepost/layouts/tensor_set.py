"""The tensors of one set of safetensors parts: an index and its parts, or one file.

Headers are read, tensor data is not. The index says which parts there are; every tensor it names
must stand in the part it names, and every part must hold nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import CheckpointIncompleteError, FormatError, NotFoundError
from milepost.format.header import Header, read_header
from milepost.format.index import Index, parse_index
from milepost.layouts.checkpoint import TensorInfo
from milepost.plan.part_names import EP_SHARDED

if TYPE_CHECKING:
    from milepost.engine.read import StoredTensor

_SHARD_KEY = re.compile(r"\.shard_\d+$")


class TensorSet:
    """Parts with the stem `stem` in `directory`: `<stem>.safetensors` or an index with its parts.

    `file_prefix` is put before file names in `TensorInfo.file` and in messages.
    """

    def __init__(self, directory: Path, stem: str, *, file_prefix: str = "") -> None:
        self.directory = directory
        self.stem = stem
        self._prefix = file_prefix

    @property
    def index_path(self) -> Path:
        return self.directory / f"{self.stem}.safetensors.index.json"

    @property
    def _single(self) -> str:
        return f"{self.stem}.safetensors"

    @property
    def has_single(self) -> bool:
        """Whether there is a part that needs no index."""
        return (self.directory / self._single).is_file()

    def exists(self) -> bool:
        return self.index_path.exists() or self.has_single or bool(self._lone_shards)

    @cached_property
    def index(self) -> Index | None:
        """The index; None when there is one part and no index that names it.

        Where `<stem>.safetensors` lies beside an index that does not name it, it is what
        `from_pretrained` loads: the index was left behind by an earlier save. An index of experts
        per rank is never left behind: then the single part is the older one.
        """
        try:
            raw = self.index_path.read_bytes()
        except FileNotFoundError:
            return None
        index = parse_index(raw, str(self.index_path))
        is_sharded = index.metadata.get("format") == EP_SHARDED
        if self._single not in index.weight_map.values() and self.has_single and not is_sharded:
            return None
        return index

    @cached_property
    def _lone_shards(self) -> list[str]:
        """Files of experts per rank that lie here without an index: a save that was cut off, or a
        directory that was copied without it."""
        if self.index is not None or self.has_single or not self.directory.is_dir():
            return []
        pattern = re.compile(rf"{re.escape(self.stem)}-\d+-of-\d+\.safetensors")
        found = sorted(e.name for e in self.directory.iterdir() if pattern.fullmatch(e.name))
        if not found:
            return []
        header = read_header(self.directory / found[0])
        return found if any(_SHARD_KEY.search(name) for name in header.tensors) else []

    @cached_property
    def is_ep_sharded(self) -> bool:
        """Whether the parts are slices of the experts, one file for each rank: the index says so,
        or, where there is none, the names in the first file do."""
        if self.index is not None:
            return self.index.metadata.get("format") == EP_SHARDED
        return bool(self._lone_shards)

    def require_loadable(self) -> None:
        """`FormatError` for parts that are slices per rank, with the command that merges them."""
        if self.is_ep_sharded:
            place = self.index_path if self.index is not None else self.directory
            raise FormatError(
                f"{place}: an ep_sharded save, one slice of the experts per rank; no reader can "
                "use it as it lies; merge it first (milepost merge-ep-shards)",
                path=place,
            )

    @cached_property
    def part_names(self) -> list[str]:
        if self.index is None:
            return self._lone_shards or [self._single]
        return sorted(set(self.index.weight_map.values())) or [self._single]

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The header of each part. `CheckpointIncompleteError` names parts that are not there."""
        absent = [name for name in self.part_names if not (self.directory / name).is_file()]
        if absent:
            raise CheckpointIncompleteError(
                f"{self.directory}: {len(absent)} of {len(self.part_names)} parts are missing: "
                f"{', '.join(absent[:5])}; the directory was copied or written incompletely",
                path=self.directory,
            )
        headers = {name: read_header(self.directory / name) for name in self.part_names}
        self._compare(headers)
        return headers

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return {name: self.directory / name for name in self.part_names}

    def _compare(self, headers: Mapping[str, Header]) -> None:
        if self.index is None:
            return
        for name, part in self.index.weight_map.items():
            if name not in headers[part].tensors:
                raise CheckpointIncompleteError(
                    f"{self.directory / part}: tensor {name!r} is not in it, though "
                    f"{self.index_path.name} says so; a part was replaced or renamed",
                    path=self.directory / part,
                )
        for part, header in headers.items():
            for name in header.tensors:
                if self.index.weight_map.get(name) != part:
                    raise CheckpointIncompleteError(
                        f"{self.directory / part}: holds tensor {name!r}, which "
                        f"{self.index_path.name} does not place there; a part was replaced or "
                        "renamed",
                        path=self.directory / part,
                    )

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, in order of part and offset; refused for slices per rank."""
        self.require_loadable()
        return self.listed

    @cached_property
    def listed(self) -> dict[str, TensorInfo]:
        """The same, of slices per rank as well: what lies in the files."""
        return {info.name: info for info in self._infos()}

    def _infos(self) -> Iterator[TensorInfo]:
        for part, header in self.headers.items():
            for name, entry in header.tensors.items():
                yield TensorInfo(
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    nbytes=entry.nbytes,
                    file=self._prefix + part,
                )

    def find(self, name: str) -> TensorInfo:
        """`NotFoundError` with close matches when there is no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            close = get_close_matches(name, self.tensors, n=3)
            hint = f"; close: {', '.join(close)}" if close else ""
            raise NotFoundError(
                f"{self.directory}: no tensor {name!r} among {len(self.tensors)}{hint}",
                path=self.directory,
            ) from None

    def stored(self, name: str) -> StoredTensor:
        """Where the bytes of `name` lie."""
        from milepost.engine.read import StoredTensor

        info = self.find(name)
        part = info.file.removeprefix(self._prefix)
        header = self.headers[part]
        return StoredTensor(
            name=name,
            path=self._paths[part],
            start=header.data_start + header.tensors[name].start,
            dtype=info.dtype,
            shape=info.shape,
        )
