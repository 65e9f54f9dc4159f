"""Which tensor lies in which part, at which byte: a pure function of names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from milepost.errors import InvalidInputError, UnencodableError
from milepost.format.header import TensorEntry, encode_header, layout_tensors, tensor_nbytes
from milepost.format.index import Index, encode_index
from milepost.plan.part_names import Numbered, PartNaming

Item: TypeAlias = tuple[str, str, tuple[int, ...]]
DATA_ALIGNMENT_NBYTES = 4096
DEFAULT_PART_NBYTES = 5 * 10**9
FROZEN_NBYTES = 16 * 2**20
"""Frozen tensors of fewer bytes, in a group, do not get parts of their own."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_nbytes(size: int | str) -> int:
    """Bytes of a size as Hugging Face spells it: `"5GB"` is 5 * 10**9, `"5GiB"` 5 * 2**30."""
    if isinstance(size, int):
        nbytes = size
    else:
        digits = size.strip().upper()
        unit = digits.lstrip("0123456789. ")
        number = digits[: len(digits) - len(unit)].strip()
        try:
            nbytes = int(float(number) * _UNITS[unit.strip()])
        except (ValueError, KeyError):
            raise InvalidInputError(
                f"size {size!r}: expected a number of bytes or a text such as '5GB' or '500MiB'"
            ) from None
    if nbytes < 1:
        raise InvalidInputError(f"size {size!r}: a part must hold at least 1 byte")
    return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """One file: its header and where each tensor's bytes begin, as absolute file offsets.

    `is_frozen` when all of its tensors are, and so may be equal to those of the save before."""

    name: str
    tensors: Mapping[str, TensorEntry]
    header: bytes
    nbytes: int
    is_frozen: bool = False

    def offset(self, tensor: str) -> int:
        """First byte of `tensor` in the file."""
        return len(self.header) + self.tensors[tensor].start


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsPlan:
    """All parts of one set of tensors and their index; `total_nbytes` counts tensor bytes only."""

    stem: str
    parts: tuple[PartPlan, ...]
    total_nbytes: int
    naming: PartNaming = field(default_factory=Numbered)

    @property
    def index_name(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def index_bytes(self) -> bytes:
        weight_map = {name: part.name for part in self.parts for name in part.tensors}
        metadata = dict(self.naming.metadata)
        return encode_index(
            Index(weight_map=weight_map, total_size=self.total_nbytes, metadata=metadata)
        )


def plan_parts(
    items: Iterable[tuple[str, str, Sequence[int]]],
    *,
    stem: str,
    max_part_nbytes: int = DEFAULT_PART_NBYTES,
    metadata: Mapping[str, str] | None = None,
    naming: PartNaming | None = None,
    frozen: Collection[str] = (),
) -> PartsPlan:
    """Lay out tensors `(name, safetensors dtype, shape)` in the order given, group by group.

    A part takes tensors of one group until the next would make its tensor bytes exceed
    `max_part_nbytes`; a single tensor above the limit has a part of its own (the rule of
    `save_pretrained`). No tensors at all still make one part. Tensor data begins on a 4,096-byte
    border.

    No part has tensors of `frozen` and others, if the frozen ones of its group have at least
    `FROZEN_NBYTES` together; their parts come first in the group.
    """
    naming = naming or Numbered()
    limit = max_part_nbytes if naming.splits else None
    grouped: dict[int, list[Item]] = {}
    seen: set[str] = set()
    for name, dtype, shape in items:
        if name in seen:
            raise UnencodableError(f"{name}: two tensors have this name", key=name)
        seen.add(name)
        grouped.setdefault(naming.group(name), []).append((name, dtype, tuple(shape)))
    marks = {"format": "pt"} if metadata is None else metadata
    planned: list[PartPlan] = []
    for group, members in sorted((grouped or {0: []}).items()):
        kept = _frozen_of(members, frozen) if naming.splits else []
        apart = {item[0] for item in kept}
        others = [item for item in members if item[0] not in apart]
        parts = [(part, True) for part in _split(kept, limit)] if kept else []
        if others or not kept:
            parts += [(part, False) for part in _split(others, limit)]
        names = naming.names(stem, group, len(parts))
        for name, (part, is_frozen) in zip(names, parts, strict=True):
            planned.append(_plan_part(name, part, marks, is_frozen=is_frozen))
    total = sum(_nbytes(item) for members in grouped.values() for item in members)
    return PartsPlan(stem=stem, parts=tuple(planned), total_nbytes=total, naming=naming)


def _nbytes(item: Item) -> int:
    return tensor_nbytes(item[1], item[2])


def _frozen_of(members: Sequence[Item], frozen: Collection[str]) -> list[Item]:
    """The frozen tensors of a group that get parts of their own; none when they are small."""
    found = [item for item in members if item[0] in frozen]
    return found if sum(map(_nbytes, found)) >= FROZEN_NBYTES else []


def _split(members: Iterable[Item], limit: int | None) -> Iterator[list[Item]]:
    """Cut a group at the size limit; at least one part."""
    part: list[Item] = []
    filled = 0
    for item in members:
        nbytes = _nbytes(item)
        if limit is not None and part and filled + nbytes > limit:
            yield part
            part, filled = [], 0
        part.append(item)
        filled += nbytes
    yield part


def _plan_part(
    name: str, group: Iterable[Item], metadata: Mapping[str, str], *, is_frozen: bool
) -> PartPlan:
    tensors = layout_tensors(group)
    header = encode_header(tensors, metadata, align=DATA_ALIGNMENT_NBYTES)
    data_nbytes = max((entry.end for entry in tensors.values()), default=0)
    return PartPlan(
        name=name,
        tensors=tensors,
        header=header,
        nbytes=len(header) + data_nbytes,
        is_frozen=is_frozen,
    )
