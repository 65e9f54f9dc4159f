"""Values of a trio that torch's safe loading would refuse, as one typed tree in `extra_state.pt`.

A training state may hold a `Path`, a numpy random state or a `deque`. No reader of the split layout
could load an archive with one, so they stand under a key of their own, as bytes, and are put back
where they belong when the trio is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from milepost.errors import FormatError
from milepost.layouts.trio_names import TYPED_KEY

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedState:
    """`whole` are slots by name, `entries` single entries of slots that are dicts, by slot and key,
    and `metadata` values by name that `meta.json` cannot hold."""

    whole: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, dict[Any, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.whole or self.entries or self.metadata)

    def pack(self) -> torch.Tensor:
        """The bytes, as a tensor. `UnencodableError` names what no typed tree can hold."""
        import torch

        from milepost.state.tree_blob import pack_tree

        parts = {"whole": self.whole, "entries": self.entries, "metadata": self.metadata}
        return torch.frombuffer(bytearray(pack_tree(parts, key=TYPED_KEY)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, blob: Any, *, where: str) -> TypedState:
        """What `pack` was given; `FormatError` for anything else."""
        import torch

        from milepost.state.tree_blob import unpack_tree

        if not isinstance(blob, torch.Tensor) or blob.dtype != torch.uint8:
            raise FormatError(f"{where}: expected the bytes of a typed tree", path=where)
        parts = unpack_tree(bytes(blob.numpy().tobytes()), where=where)
        try:
            return cls(**parts)
        except TypeError as error:
            raise FormatError(
                f"{where}: not the typed values of a trio: {error}", path=where
            ) from error

    def put_back(self, slots: Mapping[str, Any]) -> dict[str, Any]:
        """The slots with what was taken out of them."""
        result = {**slots, **self.whole}
        for slot, entries in self.entries.items():
            result[slot] = {**(result.get(slot) or {}), **entries}
        return result
