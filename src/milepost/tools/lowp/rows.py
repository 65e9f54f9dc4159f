"""A part of a tensor read as a tensor: one expert's projection within a bank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from milepost.tools.lowp.floats import DecodedPart, DecodedTensor
from milepost.tools.rewrite.groups import ByteRange, Copied
from milepost.tools.rewrite.source import SourceTensor
from milepost.tools.rewrite.streams import RowsStream, Stream


def tensor_of(copied: Copied) -> SourceTensor:
    """The input tensor of which a group's one range is all, or a run of its rows.

    It keeps the name of the tensor that it lies in, and has the shape of the group's output.
    """
    (part,) = copied.ranges
    whole, spec = part.tensor, copied.output
    if part.nbytes == whole.nbytes and spec.shape == whole.shape:
        return whole
    if whole.start is not None:
        return replace(whole, shape=spec.shape, nbytes=part.nbytes, start=whole.start + part.start)
    expert, begin = _place(part)
    if isinstance(whole, DecodedTensor):
        return DecodedPart(
            name=whole.name,
            dtype=whole.dtype,
            shape=spec.shape,
            nbytes=part.nbytes,
            source=whole.source,
            bank=whole,
            expert=expert,
            begin=begin,
        )
    return _RowsInMemory(
        name=whole.name,
        dtype=whole.dtype,
        shape=spec.shape,
        nbytes=part.nbytes,
        source=whole.source,
        expert=expert,
        begin=begin,
    )


def _place(part: ByteRange) -> tuple[int, int]:
    """The index along dim 0 of a bank, and the first row within."""
    bank = part.tensor
    expert, offset = divmod(part.start, bank.row_nbytes)
    return expert, offset // (bank.row_nbytes // bank.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsInMemory(SourceTensor):
    """Rows of `bank[expert]`, from the row `begin` on, out of a layout that does not hold a
    tensor's bytes in place."""

    expert: int
    begin: int

    def read(self, rows: tuple[int, int] | None = None) -> torch.Tensor:
        first, last = rows or (0, self.shape[0])
        inner = slice(self.begin + first, self.begin + last)
        index = [slice(self.expert, self.expert + 1), inner]
        return self.source.checkpoint.read(self.name, index)[0]

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        return RowsStream(
            lambda begin, end: self.read((begin, end)),
            start=first,
            end=self.nbytes if last is None else last,
            count=self.shape[0],
            row_nbytes=self.row_nbytes,
        )
