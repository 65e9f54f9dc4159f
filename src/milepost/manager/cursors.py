"""Where a streamed data set stands: one cursor per reader, and whether it fits the data.

`line_index` counts the non-blank lines of the source that any reader consumed; reader
`rank * num_workers + worker` takes the lines whose number leaves that remainder. Everything is
saved as plain dicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from milepost._warn import warn_user
from milepost.checkpointing.world import converse
from milepost.errors import CheckpointWarning, FormatError, MismatchError, NotFoundError
from milepost.storage.fileops import PathLike

CONTENT_KEY = "content"
_SAMPLES = 16
_SAMPLE_NBYTES = 64 * 1024


@dataclass(slots=True)
class StreamShardState:
    """One reader: lines consumed, and tokens that were read and not used yet."""

    line_index: int = 0
    token_buffer: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes back: plain values."""
        return {"line_index": self.line_index, "token_buffer": list(self.token_buffer)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "shard") -> StreamShardState:
        """`FormatError` names the field that is wrong."""
        if not isinstance(data, Mapping):
            raise FormatError(f"{where}: expected a dict, found a {type(data).__name__}")
        line, tokens = data.get("line_index", 0), data.get("token_buffer", [])
        if not isinstance(line, int) or isinstance(line, bool) or line < 0:
            raise FormatError(f"{where}.line_index: expected a count of lines, found {line!r:.60}")
        if not isinstance(tokens, Sequence) or not all(isinstance(token, int) for token in tokens):
            raise FormatError(f"{where}.token_buffer: expected token ids, found {tokens!r:.60}")
        return cls(line_index=line, token_buffer=list(tokens))


def shard_key(rank: int, num_workers: int = 1, worker: int = 0) -> str:
    """The key of one reader in `StreamDataState.shards`.

    >>> shard_key(2, num_workers=4, worker=1)
    '9'
    """
    return str(rank * num_workers + worker)


@dataclass(slots=True)
class StreamDataState:
    """The cursors of every reader by `shard_key`."""

    shards: dict[str, StreamShardState] = field(default_factory=dict)

    def shard(self, key: str) -> StreamShardState:
        """The cursor of one reader, at the beginning when it has none yet."""
        return self.shards.setdefault(key, StreamShardState())

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes back: plain values."""
        return {"shards": {key: shard.to_dict() for key, shard in self.shards.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "stream_data") -> StreamDataState:
        """`FormatError` names the place that is wrong."""
        shards = data.get("shards", {}) if isinstance(data, Mapping) else None
        if not isinstance(shards, Mapping):
            raise FormatError(f"{where}.shards: expected a dict, found {data!r:.60}")
        return cls(
            shards={
                str(key): StreamShardState.from_dict(shard, f"{where}.shards[{str(key)!r}]")
                for key, shard in shards.items()
            }
        )


def local_source(path: PathLike) -> dict[str, Any]:
    """The fingerprint of a file: its absolute path, and a digest over samples of its content.

    Another path is another source. Content that changed under one path is only warned about, since
    lines may have been appended.
    """
    place = Path(path).resolve()
    try:
        content = _sampled(place)
    except FileNotFoundError:
        raise NotFoundError(f"{place}: no such data file", path=place) from None
    return {"type": "local", "path": str(place), CONTENT_KEY: content}


def hf_source(
    name: str, *, config: str | None = None, split: str = "train", column: str = "text"
) -> dict[str, Any]:
    """The fingerprint of a data set of the hub."""
    return {"type": "hf", "name": name, "config": config, "split": split, "column": column}


def dedup_source(
    inner: Mapping[str, Any],
    *,
    hash_algo: str,
    normalizer: str,
    seen_hashes_path: PathLike | None = None,
) -> dict[str, Any]:
    """The fingerprint of a source whose repeated lines are left out."""
    seen = None if seen_hashes_path is None else str(seen_hashes_path)
    return {
        "type": "dedup",
        "inner": dict(inner),
        "hash_algo": hash_algo,
        "normalizer": normalizer,
        "seen_hashes_path": seen,
    }


def _sampled(path: Path) -> dict[str, Any]:
    """Size and XXH3-128 over up to 16 samples of 64 KiB, the first and the last among them."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        last = max(nbytes - _SAMPLE_NBYTES, 0)
        for start in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
            file.seek(start)
            hasher.update(file.read(_SAMPLE_NBYTES))
    return {"nbytes": nbytes, "xxh3_128_of_samples": hasher.hexdigest()}


class StreamCursor:
    """The cursors of this process as a contributor of extra state.

    `source` is a fingerprint such as `local_source(path)`. A reader advances its `shard(key)`; when
    several ranks train, rank 0's checkpoint gets the shards of all. `world_size` and the loaded
    state may come in either order: they are compared when both are known.
    """

    checkpoint_key = "stream"

    def __init__(self, source: Mapping[str, Any], *, world_size: int | None = None) -> None:
        self.source = dict(source)
        self.state = StreamDataState()
        self.world_size: int | None = None
        self._own: set[str] = set()
        self._saved_world_size: int | None = None
        if world_size is not None:
            self.set_world_size(world_size)

    def set_world_size(self, world_size: int) -> None:
        """How many readers share the source. `MismatchError` when the loaded state had others."""
        self.world_size = world_size
        self._compare_world()

    def shard(self, key: str) -> StreamShardState:
        """The cursor of a reader of this process, to be advanced; at the beginning when new."""
        self._own.add(key)
        return self.state.shard(key)

    def get_checkpoint_state(self) -> dict[str, Any]:
        """Collective where torch.distributed is initialised; complete on rank 0."""
        state = self._gathered()
        found: dict[str, Any] = {"stream_data": state.to_dict(), "stream_source": dict(self.source)}
        if self.world_size is not None:
            found["stream_world_size"] = self.world_size
        return found

    def load_checkpoint_state(self, state: Mapping[str, Any] | None) -> None:
        """Take the saved cursors. `MismatchError` when they are of other data or another world."""
        if state is None or "stream_data" not in state:
            return
        loaded = StreamDataState.from_dict(state["stream_data"])
        self._compare_source(state.get("stream_source"))
        saved_world = state.get("stream_world_size")
        if saved_world is not None:
            _refuse_world(saved_world, self.world_size)
        self._saved_world_size = saved_world
        self.state = loaded

    def _compare_world(self) -> None:
        if self._saved_world_size is not None:
            _refuse_world(self._saved_world_size, self.world_size)

    def _compare_source(self, saved: Any) -> None:
        if saved is None:
            return
        if _identity(saved) != _identity(self.source):
            raise MismatchError(
                f"stream_source: the checkpoint was reading {_identity(saved)}, this run reads "
                f"{_identity(self.source)}; a position in one means nothing in the other: read the "
                "saved source, or start without the saved cursor"
            )
        if _content(saved) and _content(self.source) and _content(saved) != _content(self.source):
            warn_user(
                f"stream_source: {_identity(self.source)} was edited since the checkpoint: "
                f"{_content(saved)} then, {_content(self.source)} now; lines before the cursor may "
                "have moved",
                CheckpointWarning,
            )

    def _gathered(self) -> StreamDataState:
        """This process's state, and over it what the readers of each rank know of themselves."""
        own = {key: shard.to_dict() for key, shard in self.state.shards.items() if key in self._own}
        with converse() as talk:
            every = talk.gather("cursors", json.dumps({"shards": own}).encode())
        merged = StreamDataState(shards=dict(self.state.shards))
        for raw in every:
            merged.shards.update(StreamDataState.from_dict(json.loads(raw)).shards)
        return merged


def _refuse_world(saved: Any, now: int | None) -> None:
    if now is not None and saved != now:
        raise MismatchError(
            f"stream_world_size: the checkpoint was written by {saved} readers, this run has "
            f"{now}; each line belongs to one reader by number: use as many as were saved, or "
            "start without the saved cursor"
        )


def _identity(source: Any) -> Any:
    """A fingerprint without what may change under it."""
    if not isinstance(source, Mapping):
        return source
    return {key: _identity(value) for key, value in source.items() if key != CONTENT_KEY}


def _content(source: Any) -> list[Any]:
    """What a fingerprint says about content, outermost first."""
    if not isinstance(source, Mapping):
        return []
    own = [source[CONTENT_KEY]] if CONTENT_KEY in source else []
    return own + [found for value in source.values() for found in _content(value)]
