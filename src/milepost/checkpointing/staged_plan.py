"""What a rank writes, moved from live tensors into host memory of its own.

Only what this rank will write or send is copied: of replicas, its share, and of frozen weights what
the last save did not have. What finds no room in the buffers stays live; then the save must have
written before training may go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from enum import Enum

from torch import Tensor

from milepost.checkpointing.files import FilesPlan, PlannedFile
from milepost.checkpointing.frozen_parts import FrozenParts
from milepost.engine.exchange import ExchangeStep, Part
from milepost.engine.host_buffers import HostBuffers
from milepost.engine.snapshot import Snapshot, bit_digests, take_snapshot
from milepost.engine.source import RangeSource, TensorSource
from milepost.engine.write import Piece
from milepost.errors import StateChangedError
from milepost.geometry.blocks import Span
from milepost.state.tensors import flat_bytes


class Check(Enum):
    """Whether live tensors and their copies are compared with what was there at the call."""

    NONE = "none"
    BITS = "bits"


class StagedPlans:
    """Plans that read copies. `is_partial` when some tensors had no room and are read live."""

    def __init__(
        self,
        plans: list[FilesPlan],
        snapshot: Snapshot,
        names: list[str],
        before: list[bytes],
        frozen: FrozenParts,
    ) -> None:
        self._snapshot, self._names, self._before = snapshot, names, before
        self._plans, self._frozen = plans, frozen
        self.nbytes = snapshot.nbytes
        self.is_partial = any(copy is None for copy in snapshot.copies)
        self._settled = threading.Event()

    def plans(self) -> list[FilesPlan]:
        """What is to be written; waits for the digests of what is held."""
        return self._frozen.settled(self._plans)

    def settle(self) -> None:
        """Wait for all copies, and compare them if that was asked; `StateChangedError`."""
        if self._settled.is_set():
            return
        try:
            self._snapshot.wait()
            if self._before:
                self._compare()
            self._snapshot.let_go()
        finally:
            self._settled.set()

    def _compare(self) -> None:
        differing = self._snapshot.differing(self._before)
        changed = list(dict.fromkeys(self._names[number] for number in differing))
        if changed:
            raise StateChangedError(
                f"{len(changed)} tensors changed while they were copied: {', '.join(changed[:5])}; "
                "nothing was saved; let nothing write to the state between save_async() and its "
                "return, or, with Overlap.UNTIL_STEP, nothing but optimizer.step() to parameters"
            )

    def hold(self) -> None:
        """Return when live tensors may change; with a check, when that has ended, well or not."""
        if self._before:
            self._settled.wait()
        else:
            self._snapshot.hold()
        self._frozen.hold()

    def release(self) -> None:
        """Give the memory of the copies back."""
        self._settled.set()
        self._snapshot.release()


def stage_plans(
    plans: Sequence[FilesPlan],
    buffers: HostBuffers,
    *,
    frozen: FrozenParts,
    threads: int,
    is_late: Callable[[Tensor], bool],
    check: Check = Check.NONE,
) -> StagedPlans:
    """Copy what `plans` read, but for the `frozen` parts that are held, and let them read the
    copies.

    Copies of tensors for which `is_late` says yes are made while the caller goes on, and are whole
    after `hold`; when there are none, all is settled at return.
    """
    held = [frozen.numbers(copy) for copy in range(len(plans))]
    needs = _Needs(plans, held)
    sources = needs.sources()
    tensors = [_part_of(tensor, span) for tensor, span, _ in sources]
    late = {n for n, (tensor, _, _) in enumerate(sources) if is_late(tensor)}
    before = bit_digests(tensors) if check is Check.BITS else []
    snapshot = take_snapshot(tensors, buffers, threads=threads, later=late)
    copies = {
        (id(tensor), span): copy
        for (tensor, span, _), copy in zip(sources, snapshot.copies, strict=True)
        if copy is not None
    }
    rebound = [_rebound(plan, copies, own) for plan, own in zip(plans, held, strict=True)]
    staged = StagedPlans(rebound, snapshot, [name for _, _, name in sources], before, frozen)
    if not late:
        try:
            staged.settle()
        except BaseException:
            staged.release()
            raise
    return staged


class _Needs:
    """Which bytes of which tensors plans read: whole tensors, or spans of dense ones."""

    def __init__(self, plans: Sequence[FilesPlan], held: Sequence[Collection[int]]) -> None:
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._spans: dict[int, set[Span]] = {}
        self._whole: set[int] = set()
        for plan, without in zip(plans, held, strict=True):
            for number, file in enumerate(plan.files):
                for piece in () if number in without else file.pieces:
                    self._piece(piece)
            for step in plan.steps:
                for part in _own_parts(step):
                    assert part.local is not None, "a part of this rank has its shard"
                    self._tensors.setdefault(id(part.local), (part.local, part.name))
                    self._whole.add(id(part.local))

    def _piece(self, piece: Piece) -> None:
        found = _span_of(piece)
        if found is None:
            return
        source, span = found
        key = id(source.tensor)
        self._tensors[key] = (source.tensor, source.name)
        if source.tensor.is_contiguous():
            self._spans.setdefault(key, set()).add(span)
        else:
            self._whole.add(key)

    def sources(self) -> list[tuple[Tensor, Span | None, str]]:
        """What to copy: a tensor, its span (None for all of it) and its name."""
        found: list[tuple[Tensor, Span | None, str]] = []
        for key, (tensor, name) in self._tensors.items():
            if key in self._whole:
                found.append((tensor, None, name))
            else:
                found += [(tensor, span, name) for span in sorted(self._spans[key])]
        return found


def _own_parts(step: ExchangeStep) -> Iterator[Part]:
    yield from step.own
    for parts in step.sends.values():
        yield from parts


def _span_of(piece: Piece) -> tuple[TensorSource, Span] | None:
    """The tensor that a piece reads, and which bytes of it; None for a document."""
    source = piece.source
    if isinstance(source, TensorSource):
        return source, (0, source.nbytes)
    if isinstance(source, RangeSource) and isinstance(source.source, TensorSource):
        return source.source, (source.start, source.end)
    return None


def _part_of(tensor: Tensor, span: Span | None) -> Tensor:
    return tensor if span is None else flat_bytes(tensor)[slice(*span)]


_Copies = dict[tuple[int, Span | None], Tensor]


def _rebound(plan: FilesPlan, copies: _Copies, held: Collection[int]) -> FilesPlan:
    return replace(
        plan,
        files=tuple(
            file if number in held else _file(file, copies)
            for number, file in enumerate(plan.files)
        ),
        steps=tuple(_step(step, copies) for step in plan.steps),
    )


def _file(file: PlannedFile, copies: _Copies) -> PlannedFile:
    return replace(file, pieces=tuple(_piece(piece, copies) for piece in file.pieces))


def _piece(piece: Piece, copies: _Copies) -> Piece:
    found = _span_of(piece)
    if found is None:
        return piece
    source, span = found
    part = copies.get((id(source.tensor), span))
    if part is not None:
        return Piece(start=piece.start, source=TensorSource(part, source.name))
    whole = copies.get((id(source.tensor), None))
    if whole is None:
        return piece
    return Piece(start=piece.start, source=RangeSource(TensorSource(whole, source.name), *span))


def _step(step: ExchangeStep, copies: _Copies) -> ExchangeStep:
    return replace(
        step,
        own=tuple(_exchanged(part, copies) for part in step.own),
        sends={
            rank: tuple(_exchanged(part, copies) for part in parts)
            for rank, parts in step.sends.items()
        },
    )


def _exchanged(part: Part, copies: _Copies) -> Part:
    whole = copies.get((id(part.local), None))
    return part if whole is None else replace(part, local=whole)
