"""State that each rank has of its own: random state, places in data, trees that differed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from milepost.checkpointing.capture import Captured
from milepost.engine.read import read_tensor
from milepost.engine.rendezvous import Conversation
from milepost.errors import FormatError, MismatchError
from milepost.format.tree import decode
from milepost.layouts.tensor_set import TensorSet
from milepost.state.data_position import can_seek, is_position, seek
from milepost.state.rng import restore_rng, seed_everything, unpack_rng
from milepost.state.tree_blob import unpack_tree


def settle_positions(talk: Conversation, captured: Captured) -> None:
    """Keep where the whole job stands in its data only if all ranks say the same; collective."""
    own = captured.positions
    every = [json.loads(raw) for raw in talk.gather("positions", json.dumps(own).encode())]
    for key in [k for k in own if any(each.get(k) != own[k] for each in every)]:
        del own[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The saved state of an entry: its `value`, or `seek` and a note when it was resplit."""

    value: Any = None
    seek: Callable[[], None] | None = None
    note: str = ""


class PerRank:
    """Rows of a checkpoint for `rank` of `world_size`; `document` is `training/state.json`."""

    def __init__(
        self,
        document: Mapping[str, Any],
        tensors: TensorSet,
        *,
        where: str,
        rank: int,
        world_size: int,
    ) -> None:
        self._document, self._tensors, self._where = document, tensors, where
        self._rank, self._world_size = rank, world_size

    def has(self, key: str) -> bool:
        """Whether `key` was saved once for each rank."""
        rows = self._document.get("per_rank", {})
        return isinstance(rows, dict) and key in rows

    def find(self, key: str, live: object, saved_size: int, shared: Callable[[], Any]) -> Found:
        """What this rank gets back under `key`; `shared` decodes what all ranks have in common.

        A place in data belongs to the number of ranks that were there, `saved_size`, even where
        theirs looked alike. On another number, `live` is set to the position of the whole job if
        both know it. `MismatchError` otherwise.
        """
        if saved_size != self._world_size and is_position(live):
            position = self.position(key)
            if position is None or not can_seek(live):
                raise self.of_others(key, saved_size)
            note = (
                f"{key}: saved by {saved_size} ranks; the {self._world_size} that load it share "
                "what the whole job had not read"
            )
            return Found(seek=lambda: seek(live, position), note=note)
        return Found(value=self.value(key) if self.has(key) else shared())

    def value(self, key: str) -> Any:
        """This rank's value. `MismatchError` when it was saved by another number of ranks: what
        one rank of them had read or drawn cannot be given to one of these."""
        name, saved_size = self._entry(self._document["per_rank"][key], key)
        if saved_size != self._world_size:
            raise self.of_others(key, saved_size)
        return unpack_tree(self._row(name, key), where=f"{self._where}: {key}")

    def of_others(self, key: str, saved_size: int) -> MismatchError:
        """The error for a state that belongs to another number of ranks."""
        return MismatchError(
            f"{self._where}: {key} was saved by {saved_size} ranks, each with a state of its "
            f"own, and {self._world_size} ranks load it; leave it out of the state, load with "
            "missing=Missing.KEEP to leave it as it is, or use a loader that knows the position of "
            "the whole job (ElasticSampler)"
        )

    def position(self, key: str) -> Any:
        """Where the whole job stood in its data, by `key`; None when that was not kept."""
        trees = self._document.get("positions", {})
        if not isinstance(trees, dict) or key not in trees:
            return None
        return decode(trees[key], None, where=f"{self._where}: position of {key}")

    def rng(self) -> tuple[Callable[[], list[str]] | None, str | None]:
        """What sets this rank's random state, and a note when it is not the saved one.

        With another number of ranks, no saved stream is continued: every rank is seeded from the
        first saved row, the number of ranks and its own number. The streams are distinct, and the
        same at every such load.
        """
        document = self._document.get("rng")
        if document is None:
            return None, None
        where = f"{self._where}: random state"
        name, saved_size = self._entry(document, "random state")
        if saved_size == self._world_size:
            saved = unpack_rng(self._row(name, "random state"), where)
            return lambda: restore_rng(saved), None
        first = self._row(name, "random state", row=0)
        unpack_rng(first, where)
        key = first + f"/{self._world_size}/{self._rank}".encode()
        seed = xxhash.xxh3_64_intdigest(key)

        def reseed() -> list[str]:
            seed_everything(seed)
            return []

        return reseed, (
            f"random state was saved by {saved_size} ranks, {self._world_size} load it: every rank "
            "was seeded from it anew, with a stream of its own that none of the saved ones had"
        )

    def _entry(self, document: Any, key: str) -> tuple[str, int]:
        name = document.get("tensor") if isinstance(document, dict) else None
        size = document.get("world_size") if isinstance(document, dict) else None
        if not isinstance(name, str) or not isinstance(size, int):
            raise FormatError(
                f"{self._where}: {key}: expected a tensor and a world size, found {document!r:.100}"
            )
        return name, size

    def _row(self, name: str, key: str, *, row: int | None = None) -> bytes:
        stored = self._tensors.stored(name)
        number = self._rank if row is None else row
        if len(stored.shape) != 2 or stored.dtype != "U8" or number >= stored.shape[0]:
            raise FormatError(
                f"{self._where}: {key}: expected rows of bytes, one for each rank, found "
                f"{stored.dtype} of shape {stored.shape}"
            )
        spans = ((number, number + 1), (0, stored.shape[1]))
        data: torch.Tensor = read_tensor(stored, spans)
        raw: bytes = data.numpy().tobytes()
        return raw
