"""A copy of live tensors in host memory, written while training goes on.

Tensors in CPU memory are copied by several threads that do not hold the interpreter lock. Tensors
on a device are copied on a stream of their own, which waits for the work already queued. Some can
be left for later: they are copied while training computes gradients, and whoever is about to change
them asks `hold` first.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
import xxhash

from milepost.engine.host_buffers import HostBuffers, Lease
from milepost.state.tensors import flat_bytes

_COPY_NBYTES = 16 * 2**20
_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_Copied: TypeAlias = tuple[torch.device, torch.cuda.Event]


class Snapshot:
    """Host copies of tensors, in order; None stands for one that had no room.

    `wait` returns when all of them are whole. `release` gives the memory back when the copies have
    been written.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        copies: list[torch.Tensor | None],
        lease: Lease,
        threads: int,
    ) -> None:
        self.tensors, self.copies = list(tensors), copies
        self._lease, self._threads = lease, threads
        self._events: list[_Copied] = []
        self._later: list[_Pair] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are, or will be, copied."""
        return sum(c.numel() * c.element_size() for c in self.copies if c is not None)

    def start(self, later: Collection[int]) -> None:
        """Copy what is not left for later, and begin with the rest."""
        pairs = [
            (number, (tensor.detach(), copy))
            for number, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True))
            if copy is not None and copy.numel()
        ]
        on_device = [(n, pair) for n, pair in pairs if pair[0].device.type == "cuda"]
        in_memory = [(n, pair) for n, pair in pairs if pair[0].device.type != "cuda"]
        waited_for = _from_devices([pair for n, pair in on_device if n not in later])
        self._events = _from_devices([pair for n, pair in on_device if n in later])
        _from_memory([pair for n, pair in in_memory if n not in later], self._threads)
        for _, event in waited_for:
            event.synchronize()
        self._later = [pair for n, pair in in_memory if n in later]
        if self._later:
            thread = threading.Thread(target=self._copy_later, name="milepost-staging")
            thread.start()
            self._thread = thread

    def _copy_later(self) -> None:
        try:
            _from_memory(self._later, self._threads)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._failure = error
        self._later = []

    def wait(self) -> None:
        """Return when every copy is whole; until then what was left for later must not change."""
        self._finish()
        if self._failure is not None:
            raise self._failure

    def hold(self) -> None:
        """Let nothing that is done from now on come before the copies are whole.

        Waits for the threads that copy; on a device only its current stream waits. What went wrong
        is raised by `wait`.
        """
        if self._thread is not None:
            self._thread.join()
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        for _, event in self._events:
            event.synchronize()

    def differing(self, before: Sequence[bytes]) -> list[int]:
        """Positions of tensors whose bits, or those of their copies, are not those of `before`.

        `before` are `bit_digests` of the tensors from before the copies were begun.
        """
        self.wait()
        return [
            number
            for number, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=False))
            if copy is not None and set(bit_digests([tensor, copy])) != {before[number]}
        ]

    def let_go(self) -> None:
        """Keep no reference to tensors that were copied; `differing` finds nothing after that."""
        self._finish()
        self.tensors = []

    def release(self) -> None:
        """Give the memory back; the copies must not be used any more."""
        self._finish()
        self.tensors, self.copies = [], []
        self._lease.release()


def bit_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Of each tensor the XXH3-128 digest of its elements, in order and bit by bit."""
    whole = (t.detach().resolve_conj().resolve_neg().cpu().contiguous() for t in tensors)
    return [xxhash.xxh3_128_digest(flat_bytes(tensor).numpy().data) for tensor in whole]


def take_snapshot(
    tensors: Sequence[torch.Tensor],
    buffers: HostBuffers,
    *,
    threads: int,
    later: Collection[int] = (),
) -> Snapshot:
    """Copy dense tensors of any strides and device into host memory, contiguous, bit by bit.

    All copies are whole at return but those of the positions `later`.
    """
    lease = buffers.lease(tensor.numel() * tensor.element_size() for tensor in tensors)
    snapshot = Snapshot(tensors, [], lease, threads)
    try:
        snapshot.copies = [_place(tensor, lease) for tensor in tensors]
        snapshot.start(later)
    except BaseException:
        snapshot.release()
        raise
    return snapshot


def _place(tensor: torch.Tensor, lease: Lease) -> torch.Tensor | None:
    memory = lease.place(tensor.numel() * tensor.element_size())
    return None if memory is None else memory.view(tensor.dtype).view(tensor.shape)


def _from_devices(pairs: Sequence[_Pair]) -> list[_Copied]:
    events = []
    for device in {tensor.device for tensor, _ in pairs}:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.no_grad():
            for tensor, copy in pairs:
                if tensor.device == device:
                    copy.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
        events.append((device, stream.record_event()))
    return events


def _from_memory(pairs: Sequence[_Pair], threads: int) -> None:
    tasks = [task for tensor, copy in pairs for task in _pieces(tensor, copy)]
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            _copy(*task)
        return
    with ThreadPoolExecutor(min(threads, len(tasks)), "milepost-snapshot") as pool:
        for future in [pool.submit(_copy, *task) for task in tasks]:
            future.result()


def _pieces(
    tensor: torch.Tensor, copy: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    if (
        tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return [(tensor, copy, 0, 0)]
    nbytes = tensor.numel() * tensor.element_size()
    return [
        (tensor, copy, start, min(_COPY_NBYTES, nbytes - start))
        for start in range(0, nbytes, _COPY_NBYTES)
    ]


def _copy(tensor: torch.Tensor, copy: torch.Tensor, start: int, nbytes: int) -> None:
    """Bytes `[start, start + nbytes)` of a contiguous tensor, or all of one that is not."""
    if nbytes:  # without the interpreter lock, at the rate of the memory
        ctypes.memmove(copy.data_ptr() + start, tensor.data_ptr() + start, nbytes)
        return
    with torch.no_grad():
        if tensor.element_size() == 1:  # torch need not know how to copy each type of one byte
            copy.view(torch.uint8).copy_(tensor.view(torch.uint8))
        else:
            copy.copy_(tensor)
