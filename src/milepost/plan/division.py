"""One file divided among writers, and what each rank writes, sends and receives for that.

`milepost.plan.shares` divides tensors; here their segments meet in a file. Where writers are on
several hosts, a page belongs to the host that writes its first byte: what others have in it travels
to that writer, since a host may write back whole pages and undo what another wrote there. Whatever
travels is cut into chunks, and every chunk belongs to a *step*; all ranks go through the steps in
one order (`RankPlan.steps`), so that each can wait for the others without a circle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from milepost.geometry.blocks import Shape, Span
from milepost.plan.holding import Holding
from milepost.plan.shares import (
    CHUNK_NBYTES,
    DOMAIN_NBYTES,
    FRAGMENT,
    IN_BLOCKS,
    Coordinate,
    Division,
    RowBlock,
    Segment,
    TensorPlace,
    WriteRules,
    blocks_of,
)

StepKey: TypeAlias = tuple[int, int, int, int, int]


class FileTensor(NamedTuple):
    """A tensor that has bytes in a file."""

    name: str
    place: TensorPlace
    holding: Holding


class Item(NamedTuple):
    """Bytes `[start, end)` of the file, of one tensor, as far as a shard holds them."""

    start: int
    end: int
    tensor: int
    coordinate: Coordinate


class Chunk(NamedTuple):
    """Bytes `[start, end)` of the file, of one tensor, that one rank puts together and writes."""

    start: int
    end: int
    tensor: int


@dataclass(slots=True)
class StepPlan:
    """What a rank does in one step; chunks and items are in order of their place in the file.

    `receives` and `sends` have the other rank as the key; `own` is what this rank has itself.
    """

    chunks: list[Chunk] = field(default_factory=list)
    own: list[Item] = field(default_factory=list)
    receives: dict[int, list[Item]] = field(default_factory=dict)
    sends: dict[int, list[Item]] = field(default_factory=dict)

    def ordered(self) -> StepPlan:
        for items in (self.own, *self.receives.values(), *self.sends.values()):
            items.sort()
        self.chunks.sort()
        return self


@dataclass(slots=True)
class RankPlan:
    """What a rank does for one file: chunks that it holds whole, and steps of the exchange."""

    direct: list[Chunk] = field(default_factory=list)
    steps: dict[StepKey, StepPlan] = field(default_factory=dict)

    def step(self, key: StepKey) -> StepPlan:
        return self.steps.setdefault(key, StepPlan())


class FileDivision:
    """A file: its header, written by the leader, and tensors that tile the rest.

    `number` orders the files of a save, and `turn` is as for `Division`; `tensors` are in order of
    their place.
    """

    def __init__(
        self,
        number: int,
        tensors: Sequence[FileTensor],
        rules: WriteRules,
        *,
        header_nbytes: int,
        turn: int = 0,
    ) -> None:
        self.number, self.rules, self.header_nbytes = number, rules, header_nbytes
        self.turn = turn
        self.tensors = tensors
        self.nbytes = tensors[-1].place.end if tensors else header_nbytes
        self._starts = [tensor.place.start for tensor in tensors]
        self._divisions: dict[int, Division] = {}
        self._groups: dict[Holding, int] = {}
        for tensor in tensors:
            self._groups.setdefault(tensor.holding, len(self._groups))

    def division(self, tensor: int) -> Division:
        found = self._divisions.get(tensor)
        if found is None:
            _, place, holding = self.tensors[tensor]
            found = self._divisions[tensor] = Division(place, holding, self.rules, turn=self.turn)
        return found

    def plan(self, rank: int, held: Iterable[int]) -> RankPlan:
        """What `rank` does, which holds something of the tensors with the numbers `held`.

        In proportion to what it holds and writes, not to what all ranks do.
        """
        plan = RankPlan()
        mine = list(held)
        for tensor in mine:
            for block, segment in self._sends(tensor, rank):
                self._plan_send(plan, tensor, block, segment, rank)
        for tensor, segment in self._writes(rank, mine):
            self._plan_write(plan, tensor, segment, rank)
        for step in plan.steps.values():
            step.ordered()
        return plan

    def natural(self, low: int, high: int) -> Iterator[tuple[int, Segment]]:
        """Tensors and segments of `[low, high)` as the tensors are divided, pages not regarded."""
        number = max(0, bisect_right(self._starts, low) - 1)
        while number < len(self.tensors) and self._starts[number] < high:
            for segment in self.division(number).segments(low, high):
                yield number, segment
            number += 1

    def _first_writer(self, page: int) -> int:
        """The rank that writes the first byte of a page."""
        if page < self.header_nbytes:
            return self.rules.leader
        return next(self.natural(page, page + 1))[1].writer

    def _settled(self, segment: Segment) -> Iterator[Segment]:
        """A segment by its final writers: its head may lie in a page of another host."""
        rules = self.rules
        page = segment.start - segment.start % rules.page_nbytes
        if rules.on_one_host or page == segment.start:
            yield segment
            return
        first = self._first_writer(page)
        border = min(segment.end, page + rules.page_nbytes)
        if rules.hosts[first] == rules.hosts[segment.writer]:
            yield segment
            return
        yield _fragment(segment, first, page, border)
        if border < segment.end:
            yield segment._replace(start=border)

    def _tail(self, start: int, end: int, rank: int) -> Iterator[tuple[int, Segment]]:
        """What other hosts have in the last page of `[start, end)`, which `rank` writes."""
        rules = self.rules
        page = end - end % rules.page_nbytes
        if rules.on_one_host or page == end or page < start:
            return
        for tensor, other in self.natural(end, min(page + rules.page_nbytes, self.nbytes)):
            if rules.hosts[other.writer] != rules.hosts[rank]:
                yield tensor, _fragment(other, rank, page, other.end)

    def _writes(self, rank: int, held: Sequence[int]) -> Iterator[tuple[int, Segment]]:
        """Every segment that `rank` writes in the end, with its tensor."""
        if rank not in self.rules.writer_set:
            return
        if rank == self.rules.leader:
            yield from self._tail(0, self.header_nbytes, rank)
        for tensor in held if self.rules.all_write else range(len(self.tensors)):
            for segment in self.division(tensor).segments_of(rank):
                for settled in self._settled(segment):
                    if settled.writer == rank:
                        yield tensor, settled
                yield from self._tail(segment.start, segment.end, rank)

    def _sends(self, tensor: int, rank: int) -> Iterator[tuple[RowBlock, Segment]]:
        """Segments that others write and for which `rank` sends what it holds."""
        division = self.division(tensor)
        coordinate = division.holding.shard_coordinate(rank)
        if coordinate is None or self._stays(division):
            return
        replica = division.holding.replicas(coordinate).index(rank)
        for block in blocks_of(division.holding, division.place.shape, rank):
            for natural in _segments_with(division, block, coordinate):
                if natural.replica not in (-1, replica):
                    continue
                for segment in self._settled(natural):
                    if division.sender(segment, coordinate) == rank:
                        yield block, segment

    def _stays(self, division: Division) -> bool:
        """Whether every writer of a tensor holds what it writes: nothing travels."""
        if not (self.rules.on_one_host and self.rules.all_write):
            return False
        # One block is not enough for that: other ranks of the holding may have an empty shard.
        if prod(division.holding.grid) == 1:
            return True
        return division.holding.peer_count == 1 and not division.by_domains

    def _plan_send(
        self, plan: RankPlan, tensor: int, block: RowBlock, segment: Segment, rank: int
    ) -> None:
        division = self.division(tensor)
        coordinate = division.holding.shard_coordinate(rank)
        assert coordinate is not None, "who sends holds something"
        low, high = division.block_bytes(block)
        for key, start, end in self._chunks(division, segment):
            item = Item(max(start, low), min(end, high), tensor, coordinate)
            if not _has_part(division, item):
                continue
            plan.step(key).sends.setdefault(segment.writer, []).append(item)

    def _plan_write(self, plan: RankPlan, tensor: int, segment: Segment, rank: int) -> None:
        division = self.division(tensor)
        if _holds_all(division, segment, rank):
            plan.direct.append(Chunk(segment.start, segment.end, tensor))
            return
        for key, start, end in self._chunks(division, segment):
            step = plan.step(key)
            step.chunks.append(Chunk(start, end, tensor))
            for block in _blocks_between(division, start, end):
                low, high = division.block_bytes(block)
                first, last = max(start, low), min(end, high)
                for peer in _peers_with(division, block, first, last):
                    item = Item(first, last, tensor, peer)
                    sender = division.sender(segment, peer)
                    items = step.own if sender is None else step.receives.setdefault(sender, [])
                    items.append(item)

    def _chunks(self, division: Division, segment: Segment) -> Iterator[tuple[StepKey, int, int]]:
        """A segment in chunks of at most `CHUNK_NBYTES`, each with its step.

        The borders do not depend on how the segment is clipped, and a writer gets at most
        `CHUNK_NBYTES` in one step.
        """
        place = division.place
        if segment.kind == IN_BLOCKS:
            zero, length = place.start, _chunk_nbytes(place)
            first = (segment.origin - zero) // length
            group = 0
        else:
            zero, length, first = 0, CHUNK_NBYTES, segment.base // CHUNK_NBYTES
            group = self._groups[division.holding] if segment.kind != FRAGMENT else 0
        start = segment.start
        while start < segment.end:
            number = (start - zero) // length
            end = min(segment.end, zero + (number + 1) * length)
            number -= first
            if segment.kind not in (IN_BLOCKS, FRAGMENT):
                number %= DOMAIN_NBYTES // CHUNK_NBYTES
            yield (self.number, segment.base, segment.kind, group, number), start, end
            start = end


def _fragment(segment: Segment, writer: int, page: int, end: int) -> Segment:
    return segment._replace(end=end, writer=writer, kind=FRAGMENT, base=page, origin=page)


def _blocks_between(division: Division, start: int, end: int) -> Iterator[RowBlock]:
    row = (start - division.place.start) // division.place.row_nbytes
    blocks = division.blocks
    number = bisect_right(blocks, row, key=lambda block: block.first) - 1
    while number < len(blocks) and division.block_bytes(blocks[number])[0] < end:
        yield blocks[number]
        number += 1


def _inner_spans(place: TensorPlace, start: int, end: int) -> tuple[Span, ...]:
    """The spans of dim 1 in which bytes `[start, end)` of a file lie, in one row or another."""
    row, length = place.row_nbytes, place.shape[1]
    unit = row // length
    first, last = start - place.start, end - 1 - place.start
    low, high = first % row // unit, last % row // unit + 1
    if first // row == last // row:
        return ((low, high),)
    if last // row - first // row > 1 or high >= low:
        return ((0, length),)
    return ((0, high), (low, length))


def _has_part(division: Division, item: Item) -> bool:
    """Whether a shard may hold bytes of a range of one of its blocks, by rows and dim 1; who sends
    and who receives ask alike."""
    if len(division.place.shape) < 2:
        return True
    held = division.held(item.coordinate)[1]
    return any(
        first < high and last > low
        for low, high in _inner_spans(division.place, item.start, item.end)
        for first, last in held
    )


def _peers_with(division: Division, block: RowBlock, start: int, end: int) -> Iterator[Coordinate]:
    """The peers of a block for which `_has_part` says yes, without asking each."""
    if len(division.place.shape) < 2:
        yield from division.holding.peers(block.coordinate)
        return
    spans = _spans_of_peers(division.holding, division.place.shape, block.coordinate)
    found: dict[Coordinate, None] = {}
    for low, high in _inner_spans(division.place, start, end):
        number = bisect_right(spans, low, key=lambda entry: entry[1])
        while number < len(spans) and spans[number][0] < high:
            found[spans[number][2]] = None
            number += 1
    yield from found


@lru_cache(maxsize=256)
def _spans_of_peers(
    holding: Holding, shape: Shape, coordinate: Coordinate
) -> tuple[tuple[int, int, Coordinate], ...]:
    """The spans of dim 1 that the peers of a block send, in order; they are disjoint or equal."""
    return tuple(
        sorted(
            (first, last, peer)
            for peer in holding.peers(coordinate)
            for first, last in holding.owned(shape, peer)[1]
        )
    )


def _segments_with(
    division: Division, block: RowBlock, coordinate: Coordinate
) -> Iterator[Segment]:
    """The segments of a block in which the shard at `coordinate` has bytes, and perhaps others."""
    place = division.place
    low, high = division.block_bytes(block)
    if len(place.shape) < 2 or place.row_nbytes <= CHUNK_NBYTES:
        yield from division.block_segments(block)
        return
    unit, done = place.row_nbytes // place.shape[1], -1
    spans = sorted(division.holding.owned(place.shape, coordinate)[1])
    for row in range(low, high, place.row_nbytes):
        for first, last in spans:
            for segment in division.block_segments(block, row + first * unit, row + last * unit):
                if segment.start > done:
                    done = segment.start
                    yield segment


def _holds_all(division: Division, segment: Segment, rank: int) -> bool:
    if division.holding.peer_count > 1:
        return False
    coordinate = division.holding.shard_coordinate(rank)
    return coordinate is not None and all(
        block.coordinate == coordinate
        for block in _blocks_between(division, segment.start, segment.end)
    )


def _chunk_nbytes(place: TensorPlace) -> int:
    """Length of a chunk: as many whole rows as fit, or whole rows of a later dim."""
    shape = place.byte_shape
    for dim in range(1, len(shape) + 1):
        unit = prod(shape[dim:])
        if unit <= CHUNK_NBYTES:
            return CHUNK_NBYTES // unit * unit
    return CHUNK_NBYTES
