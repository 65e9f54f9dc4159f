"""Which bytes of a tensor each rank writes: segments with one writer each, in closed form.

A tensor is rows (dim 0) of equal length in bytes, and the shards cut its rows into *blocks*. Where
blocks are large, the ranks that hold one divide it among themselves; a shard that cuts only dim 0
then writes its own memory as it lies. Where blocks are small, the file is cut into *domains* and
each has one writer, whoever holds the pieces. What a writer does not hold comes to it by the
exchange (`milepost.plan.division`). Only ranks that see the output are writers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from milepost.geometry.blocks import Shape
from milepost.geometry.placement import IndexSet, hide
from milepost.plan.holding import Holding

SMALL_NBYTES = 256 * 1024
DOMAIN_NBYTES = 16 * 1024 * 1024
CHUNK_NBYTES = 4 * 1024 * 1024
PAGE_NBYTES = 4096

Coordinate: TypeAlias = tuple[int, ...]


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

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def byte_shape(self) -> Shape:
        """The shape with the last dim counted in bytes; a 0-dim tensor has one dim."""
        if not self.shape:
            return (self.itemsize,)
        return (*self.shape[:-1], self.shape[-1] * self.itemsize)


@dataclass(frozen=True, kw_only=True)
class WriteRules:
    """What decides who writes, besides the tensors; the same on all ranks.

    `writers` are the ranks that see the output, ascending; the lowest one writes headers. `hosts`
    is the number of the host of every rank. No page of `page_nbytes` has writers on two hosts.
    Tensors whose blocks have fewer bytes than `aggregate_below` are written by domains. With
    `is_mapped`, what travels is copied into the mapped file by whoever holds it.
    """

    writers: tuple[int, ...]
    hosts: tuple[int, ...]
    page_nbytes: int = PAGE_NBYTES
    aggregate_below: int = 0
    is_mapped: bool = False

    @property
    def leader(self) -> int:
        return self.writers[0]

    @cached_property
    def writer_set(self) -> frozenset[int]:
        return frozenset(self.writers)

    @cached_property
    def all_write(self) -> bool:
        return len(self.writers) == len(self.hosts)

    @cached_property
    def on_one_host(self) -> bool:
        """Whether all writers are on one host, which sees its own pages as they are."""
        return len({self.hosts[rank] for rank in self.writers}) == 1

    def ranks_beside(self, rank: int) -> int:
        """How many ranks the host of `rank` has."""
        return self.hosts.count(self.hosts[rank])

    @cached_property
    def _hash(self) -> int:
        return hash((self.writers, self.hosts, self.page_nbytes, self.aggregate_below))

    def __hash__(self) -> int:  # asked for every tensor, and there may be thousands of ranks
        return self._hash


@lru_cache(maxsize=65536)
def _held(holding: Holding, shape: Shape, coordinate: Coordinate) -> IndexSet:
    held = holding.held(shape, coordinate)
    if not holding.is_shared:
        return held
    return hide(held, holding.owned(shape, coordinate), shape)


class RowBlock(NamedTuple):
    """Rows `[first, last)` of a tensor, held by the shards at `coordinate` and its peers.

    `coordinate` is that of the peer with number 0; `local` is the position of `first` among the
    rows that the shard holds.
    """

    first: int
    last: int
    coordinate: Coordinate
    local: int


@lru_cache(maxsize=256)
def row_blocks(holding: Holding, shape: Shape) -> tuple[RowBlock, ...]:
    """The blocks of a tensor in order of rows: they are all its rows, each once."""
    blocks = []
    for coordinate in sorted({_first_peer(holding, rank) for rank in holding.ranks}):
        held = _held(holding, shape, coordinate)
        local = 0
        for first, last in held[0] if held else ((0, 1),):
            if not shape or first < shape[0]:
                blocks.append(RowBlock(first, last, coordinate, local))
            local += last - first
    return tuple(sorted(blocks))


def _first_peer(holding: Holding, rank: int) -> Coordinate:
    coordinate = holding.shard_coordinate(rank)
    assert coordinate is not None, f"rank {rank} holds a part"
    return next(holding.peers(coordinate))


@lru_cache(maxsize=256)
def _blocks_at(holding: Holding, shape: Shape) -> dict[Coordinate, list[RowBlock]]:
    found: dict[Coordinate, list[RowBlock]] = {}
    for block in row_blocks(holding, shape):
        found.setdefault(block.coordinate, []).append(block)
    return found


def blocks_of(holding: Holding, shape: Shape, rank: int) -> list[RowBlock]:
    """The blocks of which `rank` holds all or some columns, in order of rows."""
    return _blocks_at(holding, shape).get(_first_peer(holding, rank), [])


class Candidate(NamedTuple):
    """A rank that may write a block, and which replica of its shard it is."""

    rank: int
    replica: int


@lru_cache(maxsize=4096)
def block_writers(
    holding: Holding, coordinate: Coordinate, rules: WriteRules
) -> tuple[Candidate, ...]:
    """The ranks that divide a block: its peers, replica by replica, as far as they may write."""
    return tuple(
        Candidate(rank, replica)
        for replica in range(holding.replica_count)
        for peer in holding.peers(coordinate)
        if (rank := holding.replicas(peer)[replica]) in rules.writer_set
    )


@lru_cache(maxsize=256)
def domain_writers(holding: Holding, rules: WriteRules) -> tuple[int, ...]:
    """The ranks that take turns at the domains of a tensor: holders, if any of them may write."""
    if rules.all_write:
        return tuple(holding.ranks)
    return tuple(rank for rank in holding.ranks if rank in rules.writer_set) or rules.writers


@lru_cache(maxsize=256)
def _turns(writers: tuple[int, ...]) -> dict[int, int]:
    """The place of each rank among those that take turns."""
    return {rank: number for number, rank in enumerate(writers)}


class Segment(NamedTuple):
    """Bytes `[start, end)` of a file with one writer.

    `replica` says which replica of each shard sends what the writer lacks; -1 lets them take turns
    by domain. `kind`, `base` and `origin` place the segment in the order of the exchange.
    """

    start: int
    end: int
    writer: int
    replica: int
    kind: int
    base: int
    origin: int

    def clipped(self, low: int, high: int) -> Segment:
        return self._replace(start=max(self.start, low), end=min(self.end, high))


IN_BLOCKS, IN_DOMAINS, ORPHANED, FRAGMENT = range(4)


class Division:
    """One tensor divided among writers: `segments` tile its bytes.

    `turn` is the number of domains in the files before, so that files begin with other writers.
    """

    def __init__(
        self, place: TensorPlace, holding: Holding, rules: WriteRules, *, turn: int = 0
    ) -> None:
        self.place, self.holding, self.rules, self.turn = place, holding, rules, turn
        self.blocks = row_blocks(holding, place.shape)
        self._row_nbytes = place.row_nbytes
        self._held_at: dict[Coordinate, IndexSet] = {}
        self.is_whole = len(self.blocks) == 1 and holding.peer_count == 1
        limit = SMALL_NBYTES if self.is_whole else rules.aggregate_below
        self.by_domains = place.nbytes // max(1, len(self.blocks)) < limit

    def block_bytes(self, block: RowBlock) -> tuple[int, int]:
        row, start = self._row_nbytes, self.place.start
        return start + block.first * row, start + block.last * row

    def segments(self, low: int, high: int) -> Iterator[Segment]:
        """The segments of bytes `[low, high)` of the file, in order, clipped to it."""
        low, high = max(low, self.place.start), min(high, self.place.end)
        if low >= high:
            return
        if self.by_domains:
            writers = domain_writers(self.holding, self.rules)
            yield from self._domains(low, high, writers, IN_DOMAINS)
            return
        row = (low - self.place.start) // self._row_nbytes
        number = bisect_right(self.blocks, row, key=lambda block: block.first) - 1
        while number < len(self.blocks) and self.block_bytes(self.blocks[number])[0] < high:
            for segment in self.block_segments(self.blocks[number], low, high):
                yield segment.clipped(low, high)
            number += 1

    def block_segments(
        self, block: RowBlock, low: int = 0, high: int | None = None
    ) -> Iterator[Segment]:
        """How one block is divided: its segments with bytes in `[low, high)`, all of each."""
        start, end = self.block_bytes(block)
        high = end if high is None else high
        if self.by_domains:
            writers = domain_writers(self.holding, self.rules)
            yield from self._whole_domains(start, end, low, high, writers, IN_DOMAINS)
            return
        candidates = block_writers(self.holding, block.coordinate, self.rules)
        if not candidates:
            yield from self._whole_domains(start, end, low, high, self.rules.writers, ORPHANED)
            return
        count = min(len(candidates), max(1, (end - start) // SMALL_NBYTES))
        shift = 0 if count == len(candidates) else self.turn + start // DOMAIN_NBYTES
        skipped = 0
        if low > start:
            borders = range(1, count)
            skipped = bisect_right(borders, low, key=lambda n: self._border(block, n, count))
        first = self._border(block, skipped, count)
        for part in range(skipped, count):
            if first >= high:
                return
            last = self._border(block, part + 1, count)
            candidate = candidates[(shift + part) % len(candidates)]
            if max(first, low) < last:
                yield Segment(
                    first, last, candidate.rank, candidate.replica, IN_BLOCKS, start, first
                )
            first = last

    def _border(self, block: RowBlock, part: int, count: int) -> int:
        """End of the first `part` of `count` parts: whole rows where there are enough of them."""
        start, end = self.block_bytes(block)
        rows = block.last - block.first
        if rows >= count or part == count:
            return start + rows * part // count * self._row_nbytes
        return start + (end - start) * part // count // PAGE_NBYTES * PAGE_NBYTES

    def _whole_domains(
        self, start: int, end: int, low: int, high: int, writers: tuple[int, ...], kind: int
    ) -> Iterator[Segment]:
        """The part in `[start, end)` of each domain that has bytes in `[low, high)`."""
        first = max(start, low // DOMAIN_NBYTES * DOMAIN_NBYTES)
        last = min(end, -(-high // DOMAIN_NBYTES) * DOMAIN_NBYTES)
        if first < last:
            yield from self._domains(first, last, writers, kind)

    def _domains(
        self, low: int, high: int, writers: tuple[int, ...], kind: int
    ) -> Iterator[Segment]:
        for number in range(low // DOMAIN_NBYTES, (high - 1) // DOMAIN_NBYTES + 1):
            start = number * DOMAIN_NBYTES
            round_, writer = divmod(self.turn + number, len(writers))
            base = round_ * len(writers) * DOMAIN_NBYTES
            segment = Segment(start, start + DOMAIN_NBYTES, writers[writer], -1, kind, base, start)
            yield segment.clipped(low, high)

    def segments_of(self, rank: int) -> Iterator[Segment]:
        """The segments that `rank` writes, found without looking at those of others."""
        if self.by_domains:
            yield from self._own_domains(rank)
            return
        if self.holding.shard_coordinate(rank) is not None:
            for block in blocks_of(self.holding, self.place.shape, rank):
                yield from (s for s in self.block_segments(block) if s.writer == rank)
        if self.rules.all_write:
            return
        for block in self.blocks:  # those that no writer holds
            if not block_writers(self.holding, block.coordinate, self.rules):
                yield from (s for s in self.block_segments(block) if s.writer == rank)

    def _own_domains(self, rank: int) -> Iterator[Segment]:
        writers, place = domain_writers(self.holding, self.rules), self.place
        number = _turns(writers).get(rank)
        if number is None:
            return
        first = place.start // DOMAIN_NBYTES
        first += (number - self.turn - first) % len(writers)
        for domain in range(first, (place.end - 1) // DOMAIN_NBYTES + 1, len(writers)):
            start = domain * DOMAIN_NBYTES
            yield from self.segments(start, start + DOMAIN_NBYTES)

    def held(self, coordinate: Coordinate) -> IndexSet:
        """What a shard has for the file: what it shares with a shard before it is hidden."""
        found = self._held_at.get(coordinate)
        if found is None:
            found = _held(self.holding, self.place.shape, coordinate)
            self._held_at[coordinate] = found
        return found

    def sender(self, segment: Segment, coordinate: Coordinate) -> int | None:
        """Who sends its columns of a segment to the writer; None when the writer has them."""
        replicas = self.holding.replicas(coordinate)
        if segment.writer in replicas:
            return None
        turn = segment.start // DOMAIN_NBYTES if segment.replica < 0 else segment.replica
        return replicas[turn % len(replicas)]
