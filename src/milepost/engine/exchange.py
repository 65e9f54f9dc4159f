"""The exchange: what one rank holds and another writes travels between them, step by step.

It runs on a gloo group of Milepost's own, in one thread, through the same steps in the same order
on all ranks (`milepost.plan.division`). The receives of the next step are posted before this one is
done, so two steps are in flight; buffers are made once and used again, whatever the size of the
tensors. A rank whose own writing fails goes on answering, so that nobody hangs, and reports it at
the rendezvous. Tensors travel as bytes: gloo knows few dtypes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.engine.source import byte_box
from milepost.errors import RankError
from milepost.geometry.placement import IndexSet
from milepost.plan.byte_boxes import Placed, placed_boxes
from milepost.plan.division import Chunk
from milepost.plan.shares import CHUNK_NBYTES, TensorPlace

IN_FLIGHT = 2


@dataclass(slots=True)  # not frozen: there are thousands of them in a save
class Part:
    """What a shard has of bytes `[start, end)` of a file; `held` is its index set.

    `local` is the shard where it is this rank's own, else None. `base` is where the range begins
    among the bytes that the writer puts together in this step. `name` is that of the tensor.
    """

    name: str
    place: TensorPlace
    held: IndexSet
    start: int
    end: int
    base: int
    local: Tensor | None

    def boxes(self) -> list[Placed]:
        return list(placed_boxes(self.place, self.held, self.start, self.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStep:
    """One step of this rank: the chunks it writes into `path`, and who gives it what for them.

    Parts from and to a rank are in the same order on both.
    """

    path: Path
    chunks: tuple[Chunk, ...]
    own: tuple[Part, ...]
    receives: Mapping[int, tuple[Part, ...]]
    sends: Mapping[int, tuple[Part, ...]]

    @property
    def nbytes(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)


Sink = Callable[[ExchangeStep, Tensor], None]
"""Takes the bytes of a step's chunks, one after the other, in a buffer that it gives back to the
pool of the exchange when it is done with it."""


class BufferPool:
    """A few buffers of one chunk each, made when they are first needed and used in turn."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    def take(self) -> Tensor:
        """A buffer; waits until one is given back when all are in use."""
        if self._free.empty() and self._left:
            self._left -= 1
            return torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        return self._free.get()

    def give_back(self, buffer: Tensor) -> None:
        self._free.put(buffer)


def run_exchange(
    steps: Sequence[ExchangeStep], sink: Sink, pool: BufferPool, *, group: Any
) -> BaseException | None:
    """Do all steps in order; collective among all ranks that have something to do.

    The chunks of each step go to `sink` once, in a buffer of `pool`. Returns the first error of the
    sink, after which the sink is not called any more and the others are still answered. `RankError`
    when the connection to another rank breaks.
    """
    try:
        return _Exchange(group, sink, pool).run(steps)
    except RuntimeError as error:  # what torch raises for its groups
        if isinstance(error, RankError):
            raise
        raise RankError(
            f"the exchange between ranks broke off ({str(error).splitlines()[0][:200]}): a rank "
            "died, or the network between them failed"
        ) from error


class _Exchange:
    """The state of an exchange under way: what was posted, and the memory behind it."""

    def __init__(self, group: Any, sink: Sink, pool: BufferPool) -> None:
        self._group, self._sink, self._pool = group, sink, pool
        self._outbox = _Outbox(group)
        self._stages = BufferPool(IN_FLIGHT)
        self._failure: BaseException | None = None

    def run(self, steps: Sequence[ExchangeStep]) -> BaseException | None:
        posted: deque[_Inbox] = deque()
        for number, step in enumerate(steps):
            for ahead in steps[number + len(posted) : number + IN_FLIGHT]:
                posted.append(_Inbox(ahead, self._group, self._stages))
            for rank, parts in step.sends.items():
                self._outbox.send(rank, parts)
            self._finish(posted.popleft())
            self._outbox.settle()
        self._outbox.close()
        return self._failure

    def _finish(self, inbox: _Inbox) -> None:
        inbox.wait()
        if inbox.step.chunks and self._failure is None:
            buffer = self._pool.take()
            try:
                inbox.unpack(buffer)
                self._sink(inbox.step, buffer)
            except Exception as error:  # noqa: BLE001 - the rank boundary: answered, then reported
                self._failure = error
        inbox.close()


class _Inbox:
    """The messages of one step, on their way into one buffer."""

    def __init__(self, step: ExchangeStep, group: Any, stages: BufferPool) -> None:
        self.step, self._stages = step, stages
        self._stage: Tensor | None = None
        self._messages: list[tuple[Any, list[tuple[Part, list[Placed]]], Tensor]] = []
        position = 0
        for rank, parts in step.receives.items():
            boxed = [(part, part.boxes()) for part in parts]
            nbytes = _nbytes_of(boxed)
            if not nbytes:
                continue
            if self._stage is None:
                self._stage = stages.take()
            message = self._stage[position : position + nbytes]
            work = dist.irecv(message, group=group, group_src=rank)
            self._messages.append((work, boxed, message))
            position += nbytes

    def wait(self) -> None:
        for work, _, _ in self._messages:
            work.wait()

    def unpack(self, buffer: Tensor) -> None:
        """Put what has come, and what is this rank's own, at its place in `buffer`."""
        for part in self.step.own:
            assert part.local is not None, "what is our own is at hand"
            copy_boxes(part, buffer[part.base :])
        for _, boxed, message in self._messages:
            position = 0
            for part, boxes in boxed:
                for box in boxes:
                    target = _target(buffer[part.base :], box)
                    target.copy_(message[position : position + box.nbytes].view(target.shape))
                    position += box.nbytes

    def close(self) -> None:
        if self._stage is not None:
            self._stages.give_back(self._stage)


def copy_boxes(part: Part, target: Tensor) -> None:
    """Copy what this rank holds of a part to its place in `target`, which begins where it does."""
    assert part.local is not None, "what is copied is at hand"
    for box in part.boxes():
        _target(target, box).copy_(byte_box(part.local, box.source))


def _target(memory: Tensor, box: Placed) -> Tensor:
    whole = memory[box.offset : box.offset + prod(box.shape)].view(box.shape)
    return whole[tuple(slice(*span) for span in box.into)]


def _nbytes_of(boxed: Sequence[tuple[Part, list[Placed]]]) -> int:
    return sum(box.nbytes for _, boxes in boxed for box in boxes)


class _Outbox:
    """Messages on their way out: from where they lie, or packed into one of two buffers."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._buffers: dict[int, Tensor] = {}
        self._works: list[list[tuple[Any, Tensor]]] = [[] for _ in range(IN_FLIGHT)]
        self._turn = self._filled = 0

    def send(self, rank: int, parts: Sequence[Part]) -> None:
        """Send all that the parts hold as one message; returns before it has arrived."""
        boxes = list(_source_boxes(parts))
        nbytes = sum(box.numel() for box in boxes)
        if not nbytes:
            return
        if len(boxes) == 1 and boxes[0].is_contiguous() and boxes[0].device.type == "cpu":
            message = boxes[0].view(-1)
        else:
            message = self._room(nbytes)
            position = 0
            for box in boxes:
                target = message[position : position + box.numel()]
                target.view(box.shape).copy_(box)
                position += box.numel()
        work = dist.isend(message, group=self._group, group_dst=rank)
        self._works[self._turn].append((work, message))

    def _room(self, nbytes: int) -> Tensor:
        if self._filled + nbytes > CHUNK_NBYTES:
            self.settle()
        if self._turn not in self._buffers:
            self._buffers[self._turn] = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        start = self._filled
        self._filled += nbytes
        return self._buffers[self._turn][start : self._filled]

    def settle(self) -> None:
        """Turn to the other buffer, once what was sent from it has arrived."""
        self._turn, self._filled = (self._turn + 1) % IN_FLIGHT, 0
        self._wait(self._works[self._turn])

    def close(self) -> None:
        for works in self._works:
            self._wait(works)

    @staticmethod
    def _wait(works: list[tuple[Any, Tensor]]) -> None:
        for work, _ in works:
            work.wait()
        works.clear()


def _source_boxes(parts: Sequence[Part]) -> Iterator[Tensor]:
    for part in parts:
        assert part.local is not None, "what is sent is at hand"
        for box in part.boxes():
            yield byte_box(part.local, box.source)
