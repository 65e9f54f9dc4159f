"""Which ranks share the reading of which rows, so that no byte of a file is read twice.

Ranks that want the same rows of a stored tensor, whole (replicas) or each in columns of its own,
are a group. Its rows are divided in blocks; each block is read by one of the group, which sends
every other what that one wants of it. What only one rank wants, and what is small, is no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet, Spans, numel, span_length

SMALL_NBYTES = 64 * 1024
GROUP_NBYTES = 8 * 1024 * 1024
BLOCK_NBYTES = 4 * 1024 * 1024
SHORTEST_BLOCK_NBYTES = 64 * 1024


class Want(NamedTuple):
    """What one rank wants: the index set `held` of the stored tensor `key`, of `shape`."""

    key: str
    shape: Shape
    itemsize: int
    held: IndexSet


class ReadGroup(NamedTuple):
    """Ranks that want the same rows of a stored tensor; `columns` are the inner dims of each."""

    key: str
    shape: Shape
    itemsize: int
    rows: Spans
    ranks: tuple[int, ...]
    columns: tuple[IndexSet, ...]

    @property
    def row_nbytes(self) -> int:
        return prod(self.shape[1:]) * self.itemsize

    def block_rows(self) -> int:
        """Rows of one block: what the group has in flight in a step stays within a bound."""
        nbytes = max(SHORTEST_BLOCK_NBYTES, min(BLOCK_NBYTES, GROUP_NBYTES // len(self.ranks)))
        return max(1, nbytes // self.row_nbytes)

    def steps(self) -> Iterator[tuple[Span, ...]]:
        """The local rows that each rank of the group reads, step by step; empty ones at the end."""
        total, length = span_length(self.rows), self.block_rows()
        for first in range(0, total, length * len(self.ranks)):
            starts = range(first, first + length * len(self.ranks), length)
            yield tuple((min(start, total), min(start + length, total)) for start in starts)


def read_groups(wants: Sequence[Sequence[Want]]) -> list[ReadGroup]:
    """The groups among all ranks, in the order in which the lowest ranks want their tensors.

    `wants[rank]` has each key once. Where the columns of a group are not disjoint pieces of whole
    rows, reading whole rows would read too much: these ranks read for themselves.
    """
    together: dict[tuple[str, Shape, int, Spans], list[tuple[int, IndexSet]]] = {}
    for rank, own in enumerate(wants):
        for want in own:
            if not want.held or numel(want.held) == 0:
                continue
            place = (want.key, want.shape, want.itemsize, want.held[0])
            together.setdefault(place, []).append((rank, want.held[1:]))
    groups = []
    for (key, shape, itemsize, rows), members in together.items():
        columns = tuple(held for _, held in members)
        row_numel = prod(shape[1:])
        nbytes = span_length(rows) * row_numel * itemsize
        covered = sum(numel(held) for held in set(columns))
        if len(members) > 1 and nbytes >= SMALL_NBYTES and covered == row_numel:
            ranks = tuple(rank for rank, _ in members)
            groups.append(ReadGroup(key, shape, itemsize, rows, ranks, columns))
    return groups
