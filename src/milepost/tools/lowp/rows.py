"""A part of a tensor read as a tensor: one expert's projection within a bank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from milepost.tools.rewrite.groups import ByteRange, Copied
from milepost.tools.rewrite.source import SourceTensor
from milepost.tools.rewrite.streams import MemoryStream, Stream


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
    return _RowsInMemory(
        name=whole.name,
        dtype=whole.dtype,
        shape=spec.shape,
        nbytes=part.nbytes,
        source=whole.source,
        part=part,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsInMemory(SourceTensor):
    """Rows `[a, b)` of `bank[e]`, out of a layout that does not hold a tensor's bytes in place."""

    part: ByteRange

    def read(self, rows: tuple[int, int] | None = None) -> torch.Tensor:
        first, last = rows or (0, self.shape[0])
        whole = self.part.tensor
        expert, offset = divmod(self.part.start, whole.nbytes // whole.shape[0])
        begin = offset // self.row_nbytes
        index = [slice(expert, expert + 1), slice(begin + first, begin + last)]
        return self.source.checkpoint.read(whole.name, index)[0]

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        end = self.nbytes if last is None else last
        rows = slice(first // self.row_nbytes, -(-end // self.row_nbytes))
        values = self.read((rows.start, rows.stop))
        return MemoryStream(values, first - rows.start * self.row_nbytes)
