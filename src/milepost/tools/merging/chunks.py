"""Tensors of several models in order, a bounded number of elements at a time, in fp32.

A tensor is read as often as a method wants to go over it. Reading it again from the page cache into
memory that is in the processor's cache already costs less than keeping all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from milepost.engine.source import memory_of
from milepost.tools.rewrite.streams import MemoryStream, Stream

CHUNK_NUMEL = 2**18
"""About so many elements are a chunk: short enough for the cache that cores share, long enough that
threads seldom wait for each other between operations."""


def longest_numel() -> int:
    """Most elements of a chunk, unless a row is longer."""
    return CHUNK_NUMEL * 3 // 2


class _Rooms(threading.local):
    """Memory of one thread by use and dtype."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}


_rooms = _Rooms()


def room(use: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory of this thread for one `use`: the same every time, and what was in it is lost.

    Fresh memory would cost more, page by page, than most operations on it. What chunks above
    `longest_numel()` needed is given back when a pass over them ends.
    """
    numel = prod(shape)
    held = _rooms.held.get((use, dtype))
    if held is None or len(held) < numel:
        held = _rooms.held[use, dtype] = torch.empty(numel, dtype=dtype)
    return held[:numel].view(shape)


class Flat(NamedTuple):
    """One tensor, flattened: its dtype, and its bytes in order as often as they are asked for."""

    dtype: torch.dtype
    open: Callable[[], Stream]


def flat(tensor: Tensor) -> Flat:
    """A tensor that is in memory."""
    return Flat(tensor.dtype, lambda: MemoryStream(tensor, 0))


class Chunk(NamedTuple):
    """The next elements: `values` `[models, elements]`, less those of the base if there is one, and
    those of the base `[elements]`. Both are fp32, may be changed, and are gone with the next."""

    values: Tensor
    base: Tensor | None

    @property
    def origin(self) -> Tensor:
        assert self.base is not None, "a method with a base was given none"
        return self.base


class _Stage:
    """Where `count` elements of every tensor come: as stored in `raw`, one tensor after the other,
    and every `every`-th of them in a row of fp32. Views of it are made once for many chunks."""

    def __init__(self, flats: Sequence[Flat], raw: Tensor, count: int, every: int) -> None:
        self.rows = room("values", len(flats), -(-count // every))
        stored = [raw[: count * each.dtype.itemsize].view(each.dtype) for each in flats]
        self._memories = [memory_of(each) for each in stored]
        self._taken = [each[::every] for each in stored]
        self._rows = list(self.rows)

    def fill(self, streams: Sequence[Stream]) -> None:
        """Read what comes next."""
        for stream, memory, taken, row in zip(
            streams, self._memories, self._taken, self._rows, strict=True
        ):
            stream.read_into(memory)
            row.copy_(taken)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One tensor of every model, all of one shape; `base` is None where there is none.

    `key` seeds what is random: it differs for every tensor of a merge.
    """

    models: Sequence[Flat]
    shape: torch.Size
    base: Flat | None = None
    key: str = ""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def length(self, multiple: int = 1) -> int:
        """Elements of a chunk: a multiple of `multiple`, and of 8 if that is 1, unless all fit.

        Chunks of a tensor are about as long as each other, since an element costs more in a short
        one: there are as many as makes their length closest to `CHUNK_NUMEL`.
        """
        unit = multiple if multiple > 1 else 8
        units, usual = -(-self.numel // unit), max(1, CHUNK_NUMEL // unit)
        count = max(1, (2 * units + usual) // (2 * usual))
        return min(self.numel, -(-units // count) * unit)

    def chunks(self, multiple: int = 1, every: int = 1) -> Iterator[Chunk]:
        """All elements from the first on, in chunks of `length(multiple)`; the last may be shorter.

        Of each chunk only the first and every `every`-th after it, where that is more than 1.
        """
        numel, length = self.numel, self.length(multiple)
        flats = [*self.models, *([] if self.base is None else [self.base])]
        streams = [each.open() for each in flats]
        itemsize = max(each.dtype.itemsize for each in flats)
        raw = room("stored", length * itemsize, dtype=torch.uint8)
        stage = _Stage(flats, raw, length, every)
        try:
            for start in range(0, numel, max(1, length)):
                if numel - start < length:
                    stage = _Stage(flats, raw, numel - start, every)
                stage.fill(streams)
                rows = stage.rows
                if self.base is None:
                    yield Chunk(rows, None)
                else:
                    yield Chunk(rows[:-1].sub_(rows[-1]), rows[-1])
        finally:
            if length > longest_numel():
                _rooms.held.clear()  # no other tensor needs as much, and other threads may


def added(rows: Tensor, out: Tensor) -> Tensor:
    """The sum of `rows` `[n, elements]`, rounded as `rows.sum(0)` is; in `out`."""
    if len(rows) >= _CASCADE:
        return torch.sum(rows, 0, out=out)
    if len(rows) == 1:
        return out.copy_(rows[0])
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)
    return out


_CASCADE = 16
"""As many rows or more are not added up one after the other by `torch.sum`."""


def rounded(made: Iterator[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """fp32 pieces cast once to `dtype`; each is gone with the next."""
    for piece in made:
        if dtype is torch.float32:
            yield piece
            continue
        yield room("rounded", len(piece), dtype=dtype).copy_(piece)
