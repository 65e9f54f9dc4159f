"""What one rank does for one part: pieces that it writes itself, and steps of the exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from milepost.engine.exchange import ExchangeStep, Part
from milepost.engine.source import BytesSource, RangeSource, TensorSource
from milepost.engine.write import Piece
from milepost.plan.division import (
    Chunk,
    FileDivision,
    FileTensor,
    Item,
    RankPlan,
    StepKey,
    StepPlan,
)
from milepost.plan.inventory import LeafInfo, holding_of
from milepost.plan.parts import PartPlan
from milepost.plan.shares import TensorPlace, WriteRules, blocks_of
from milepost.state.placements import Held


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A part, how it is divided, and what `rank` does for it; says nothing of live tensors."""

    part: PartPlan
    file: FileDivision
    plan: RankPlan
    rank: int


def lay_out_part(
    key: str,
    part: PartPlan,
    leaves: Mapping[str, LeafInfo],
    held: Collection[str],
    rules: WriteRules,
    *,
    rank: int,
    number: int,
    turn: int,
) -> PartLayout:
    """Divide the part `part` of the set `key`, the `number`-th of the save.

    `held` are the names of the tensors of which `rank` holds something; `turn` counts the domains
    of the files before.
    """
    tensors = [
        FileTensor(fqn, place, holding_of(leaves[fqn], f"{key}: {fqn}"))
        for fqn in part.tensors
        if (place := _place_of(leaves[fqn], part.offset(fqn))).nbytes
    ]
    file = FileDivision(number, tensors, rules, header_nbytes=len(part.header), turn=turn)
    mine = (n for n, tensor in enumerate(tensors) if tensor.name in held)
    return PartLayout(part, file, file.plan(rank, mine), rank)


class PartWriter:
    """Binds a layout to the live tensors of a rank."""

    def __init__(self, layout: PartLayout, held: Mapping[str, Held]) -> None:
        self._part, self._file, self._plan = layout.part, layout.file, layout.plan
        self._rank, self._rules = layout.rank, layout.file.rules
        self._held = held
        self._sources: dict[int, TensorSource] = {}

    def pieces(self) -> Iterator[Piece]:
        """What this rank writes by itself, in order of the place."""
        if self._rank == self._rules.leader:
            yield Piece(start=0, source=BytesSource(self._part.header))
        for chunk in sorted(self._plan.direct):
            yield from self._direct(chunk)

    def steps(self, path: Path) -> Iterator[tuple[StepKey, ExchangeStep]]:
        """The steps of the exchange, with `path` as the file's."""
        for key, step in self._plan.steps.items():
            yield key, self._bound(step, path)

    def _source(self, tensor: int) -> TensorSource:
        found = self._sources.get(tensor)
        if found is None:
            name = self._file.tensors[tensor].name
            found = self._sources[tensor] = TensorSource(self._held[name].local, name)
        return found

    def _direct(self, chunk: Chunk) -> Iterator[Piece]:
        division = self._file.division(chunk.tensor)
        source = self._source(chunk.tensor)
        for block in blocks_of(division.holding, division.place.shape, self._rank):
            low, high = division.block_bytes(block)
            start, end = max(low, chunk.start), min(high, chunk.end)
            if start < end:
                local = block.local * division.place.row_nbytes - low
                yield Piece(start=start, source=RangeSource(source, local + start, local + end))

    def _bound(self, step: StepPlan, path: Path) -> ExchangeStep:
        return ExchangeStep(
            path=path,
            chunks=tuple(step.chunks),
            own=tuple(self._parts(step, step.own, is_own=True)),
            receives={
                rank: tuple(self._parts(step, items, is_own=False))
                for rank, items in step.receives.items()
            },
            sends={
                rank: tuple(self._parts(step, items, is_own=True))
                for rank, items in step.sends.items()
            },
        )

    def _parts(self, step: StepPlan, items: Iterable[Item], *, is_own: bool) -> Iterator[Part]:
        bases, total = [], 0
        for start, end, _ in step.chunks:
            bases.append((start, end, total))
            total += end - start
        number, last = 0, len(bases)
        file = self._file
        for start, end, tensor, coordinate in items:
            base = 0
            while number < last and bases[number][1] <= start:
                number += 1
            if number < last:
                base = bases[number][2] + start - bases[number][0]
            division = file.division(tensor)
            yield Part(
                file.tensors[tensor].name,
                division.place,
                division.held(coordinate),
                start,
                end,
                base,
                self._source(tensor).tensor if is_own else None,
            )


def _place_of(leaf: LeafInfo, start: int) -> TensorPlace:
    return TensorPlace(shape=leaf.shape, start=start, itemsize=leaf.itemsize)
