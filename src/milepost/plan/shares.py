"""Which rows of a tensor each rank writes, and what it needs from whom for that.

A tensor is rows (dim 0) of equal length in bytes. A shard that cuts only dim 0 holds whole rows and
writes them as they lie. Where other dims are cut, the shards with the same rows are *peers*: they
divide their rows among themselves, and each sends the others the columns of theirs (the row
exchange), so that every writer has whole rows. Replicas divide the rows once more. Small tensors
are written by one rank, chosen by where they lie in the file, so that neighbours have one writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import (
    IndexSet,
    Spans,
    between,
    intersect_spans,
    span_length,
)
from milepost.plan.holding import Holding

SMALL_NBYTES = 256 * 1024
DOMAIN_NBYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor in its file: `start` is its first byte there; `row_nbytes` the bytes of one row."""

    shape: Shape
    start: int
    itemsize: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_nbytes(self) -> int:
        return prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows that one rank writes: `rows` are spans of dim 0; `local` the positions of these
    rows among those that the shard holds."""

    rank: int
    rows: Spans
    local: Span


def rows_held(held: IndexSet) -> Spans:
    """Spans of dim 0; a 0-dim tensor is one row."""
    return held[0] if held else ((0, 1),)


def share_of(holding: Holding, place: TensorPlace, rank: int) -> Share | None:
    """What `rank` writes of a tensor; None when that is nothing."""
    coordinate = holding.shard_coordinate(rank)
    if coordinate is None or place.nbytes == 0:
        return None
    replica = holding.replicas(coordinate).index(rank)
    if replica >= holding.replica_count:
        return None
    return share_at(holding, place, coordinate, replica)


def share_at(
    holding: Holding, place: TensorPlace, coordinate: tuple[int, ...], replica: int
) -> Share | None:
    """The share of one shard's `replica`-th holder; None when that is nothing."""
    rows = rows_held(holding.held(place.shape, coordinate))
    length = span_length(rows)
    peers, replicas = holding.peer_count, holding.replica_count
    number = replica * peers + holding.peer_number(coordinate)
    if length * place.row_nbytes <= SMALL_NBYTES:
        chosen = place.start // DOMAIN_NBYTES % (peers * replicas)
        first, last = (0, length) if number == chosen else (0, 0)
    else:
        first = length * number // (peers * replicas)
        last = length * (number + 1) // (peers * replicas)
    if first == last:
        return None
    return Share(
        rank=holding.replicas(coordinate)[replica],
        rows=tuple(between(rows, first, last)),
        local=(first, last),
    )


Box: TypeAlias = tuple[Span, ...]


def column_boxes(held: IndexSet, shape: Shape) -> Iterator[tuple[Box, Box]]:
    """Boxes of the inner dims that a shard covers, as (global spans, local spans) per dim."""
    whole = tuple(((0, length),) for length in shape[1:])
    parts = [intersect_spans(spans, full) for spans, full in zip(held[1:], whole, strict=True)]

    def walk(dim: int) -> Iterator[tuple[Box, Box]]:
        if dim == len(parts):
            yield (), ()
            return
        for local, position, length in parts[dim]:
            for rest_global, rest_local in walk(dim + 1):
                yield (
                    ((position, position + length), *rest_global),
                    ((local, local + length), *rest_local),
                )

    yield from walk(0)


def file_runs(place: TensorPlace, rows: Spans) -> Iterator[Span]:
    """Byte ranges of the file that whole rows cover, in order."""
    for start, end in rows:
        yield place.start + start * place.row_nbytes, place.start + end * place.row_nbytes
