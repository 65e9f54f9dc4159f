"""Which tensor lies in which part, at which byte: a pure function of names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from milepost.errors import InvalidInputError, UnencodableError
from milepost.format.header import TensorEntry, encode_header, layout_tensors, tensor_nbytes
from milepost.format.index import Index, encode_index, part_names

DATA_ALIGNMENT_NBYTES = 4096
DEFAULT_PART_NBYTES = 5 * 10**9
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
    """One file: its header and where each tensor's bytes begin, as absolute file offsets."""

    name: str
    tensors: Mapping[str, TensorEntry]
    header: bytes
    nbytes: int

    def offset(self, tensor: str) -> int:
        """First byte of `tensor` in the file."""
        return len(self.header) + self.tensors[tensor].start


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsPlan:
    """All parts of one set of tensors and their index; `total_nbytes` counts tensor bytes only."""

    stem: str
    parts: tuple[PartPlan, ...]
    total_nbytes: int

    @property
    def index_name(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def index_bytes(self) -> bytes:
        weight_map = {name: part.name for part in self.parts for name in part.tensors}
        return encode_index(Index(weight_map=weight_map, total_size=self.total_nbytes, metadata={}))


def plan_parts(
    items: Iterable[tuple[str, str, Sequence[int]]],
    *,
    stem: str,
    max_part_nbytes: int = DEFAULT_PART_NBYTES,
    metadata: Mapping[str, str] | None = None,
) -> PartsPlan:
    """Lay out tensors `(name, safetensors dtype, shape)` in the order given.

    A part takes tensors until the next would make its tensor bytes exceed `max_part_nbytes`; a
    single tensor above the limit has a part of its own (the rule of `save_pretrained`). No tensors
    at all still make one part. Tensor data begins on a 4,096-byte border.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    seen: set[str] = set()
    filled = total = 0
    for name, dtype, shape in items:
        if name in seen:
            raise UnencodableError(f"{name}: two tensors have this name", key=name)
        seen.add(name)
        nbytes = tensor_nbytes(dtype, tuple(shape))
        if groups[-1] and filled + nbytes > max_part_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, dtype, tuple(shape)))
        filled += nbytes
        total += nbytes
    names = part_names(stem, len(groups))
    marks = {"format": "pt"} if metadata is None else metadata
    parts = tuple(_plan_part(name, group, marks) for name, group in zip(names, groups, strict=True))
    return PartsPlan(stem=stem, parts=parts, total_nbytes=total)


def _plan_part(
    name: str, group: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> PartPlan:
    tensors = layout_tensors(group)
    header = encode_header(tensors, metadata, align=DATA_ALIGNMENT_NBYTES)
    data_nbytes = max((entry.end for entry in tensors.values()), default=0)
    return PartPlan(name=name, tensors=tensors, header=header, nbytes=len(header) + data_nbytes)
