"""State that each rank has of its own: its random state, and trees that differed between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from milepost.engine.read import read_tensor
from milepost.errors import FormatError, MismatchError
from milepost.layouts.tensor_set import TensorSet
from milepost.state.rng import restore_rng, seed_everything, unpack_rng
from milepost.state.tree_blob import unpack_tree


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

    def value(self, key: str) -> Any:
        """This rank's value. `MismatchError` when it was saved by another number of ranks: what
        one rank of them had read or drawn cannot be given to one of these."""
        name, saved_size = self._entry(self._document["per_rank"][key], key)
        if saved_size != self._world_size:
            raise MismatchError(
                f"{self._where}: {key} was saved by {saved_size} ranks, each with a state of its "
                f"own, and {self._world_size} ranks load it; leave it out of the state, or load "
                "with missing=Missing.KEEP to leave it as it is"
            )
        return unpack_tree(self._row(name, key), where=f"{self._where}: {key}")

    def rng(self) -> tuple[Callable[[], list[str]] | None, str | None]:
        """What sets this rank's random state, and a note when it is not the saved one.

        With another number of ranks, every rank is seeded from the first saved row, the number of
        ranks and its own number: distinct streams, the same at every such load.
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
            "was seeded from it anew"
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
