"""The row exchange: shards that hold columns of the same rows become writers of whole rows.

Peers divide their rows (`milepost.plan.shares`); each sends the others the columns that it holds of
theirs. It runs on a gloo group of Milepost's own, in one thread, in one order on all ranks, step by
step, so memory stays within a few buffers. A rank whose own writing fails goes on answering, so
that nobody hangs; the failure is reported at the rendezvous.
Tensors travel as bytes: gloo knows few dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from milepost.geometry.blocks import Span
from milepost.plan.shares import Box
from milepost.state.tensors import flat_bytes

EXCHANGE_NBYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShare:
    """A peer: its rank, the boxes of columns it holds as (global, local), the shape of its columns
    and the local rows of the tensor that it writes (empty when none)."""

    rank: int
    columns: tuple[tuple[Box, Box], ...]
    column_shape: tuple[int, ...]
    rows: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeJob:
    """One tensor: the local shard (rows by columns, contiguous) and everybody's part in it.

    `peers` are in the same order on all of them and include this rank.
    """

    name: str
    local: torch.Tensor
    global_columns: tuple[int, ...]
    peers: tuple[PeerShare, ...]

    def step_rows(self) -> int:
        """Rows of one step, the same on all peers: whole rows within `EXCHANGE_NBYTES`."""
        row_nbytes = self.local.element_size()
        for length in self.global_columns:
            row_nbytes *= length
        return max(1, EXCHANGE_NBYTES // max(1, row_nbytes))

    def steps(self) -> int:
        longest = max(end - start for start, end in (peer.rows for peer in self.peers))
        return -(-longest // self.step_rows())


Sink = Callable[[ExchangeJob, Span, torch.Tensor], None]
"""Takes whole rows: the job, their local row span, and a contiguous tensor that is its to keep."""


def run_exchange(
    jobs: Sequence[ExchangeJob], sink: Sink, *, group: Any, rank: int
) -> BaseException | None:
    """Do all jobs in order; collective among the peers of each job.

    Every row of this rank's shares goes to `sink` once, in order. Returns the first error of the
    sink, after which the sink is not called any more and the others are still answered.
    """
    failure: BaseException | None = None
    for job in jobs:
        for step in range(job.steps()):
            span, rows = _step(job, step, group=group, rank=rank)
            if rows is None or failure is not None:
                continue
            try:
                sink(job, span, rows)
            except Exception as error:  # noqa: BLE001 - the rank boundary: answered, then reported
                failure = error
    return failure


def _step(
    job: ExchangeJob, step: int, *, group: Any, rank: int
) -> tuple[Span, torch.Tensor | None]:
    """Send and receive one step of every peer's rows; this rank's whole rows, if it has any."""
    own = next(peer for peer in job.peers if peer.rank == rank)
    operations = []
    kept_alive = []
    for peer in job.peers:
        start, end = _rows_of_step(job, peer, step)
        if peer.rank != rank and start < end:
            piece = flat_bytes(job.local[start:end])
            kept_alive.append(piece)
            operations.append(dist.P2POp(dist.isend, piece, group=group, group_peer=peer.rank))
    start, end = _rows_of_step(job, own, step)
    received: list[tuple[PeerShare, torch.Tensor]] = []
    for peer in job.peers if start < end else ():
        if peer.rank == rank:
            received.append((peer, job.local[start:end]))
            continue
        shape = (end - start, *peer.column_shape)
        part = torch.empty(shape, dtype=job.local.dtype)
        received.append((peer, part))
        if part.numel():
            operations.append(
                dist.P2POp(dist.irecv, flat_bytes(part), group=group, group_peer=peer.rank)
            )
    sends = [op for op in operations if op.tensor.numel()]
    if sends:
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    if start >= end:
        return (start, end), None
    return (start, end), _assemble(job, received, end - start)


def _rows_of_step(job: ExchangeJob, peer: PeerShare, step: int) -> Span:
    first, last = peer.rows
    start = min(last, first + step * job.step_rows())
    return start, min(last, start + job.step_rows())


def _assemble(
    job: ExchangeJob, received: Sequence[tuple[PeerShare, torch.Tensor]], rows: int
) -> torch.Tensor:
    out = torch.empty((rows, *job.global_columns), dtype=job.local.dtype)
    for peer, part in received:
        for target, source in peer.columns:
            into = tuple(slice(*span) for span in target)
            taken = tuple(slice(*span) for span in source)
            out[(slice(None), *into)].copy_(part[(slice(None), *taken)])
    return out
