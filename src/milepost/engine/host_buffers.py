"""Host memory that snapshots are copied into: faulted in once, used again by every later save.

Fresh pages cost several times more than the copy itself, so memory is taken from the system in
slabs, touched at once, and kept. Where there is CUDA it is page-locked too, so that copies from the
device run on a stream of their own at the full rate of the bus.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakSet, finalize

import torch

from milepost.errors import InvalidInputError

SLAB_NBYTES = 256 * 2**20
_ALIGNMENT = 4096
_HUGE_PAGE_NBYTES = 2 * 2**20
# <asm-generic/mman-common.h>; the second since Linux 5.14, and absent from `mmap` of Python 3.11.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class _Slab:
    """One piece of memory: mapped, faulted in, page-locked where there is CUDA."""

    def __init__(self, nbytes: int, number: int) -> None:
        self.nbytes, self.number = nbytes, number
        self._map = mmap.mmap(-1, nbytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        _fault_in(self.memory)
        if torch.cuda.is_available():
            _lock(self.memory)
            unlock = finalize(self, _unlock, self.memory.data_ptr())
            unlock.atexit = False


def _fault_in(memory: torch.Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    libc.madvise(address, nbytes, _MADV_HUGEPAGE)  # a wish: nothing depends on it
    if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        memory[:: mmap.PAGESIZE] = 0


def _lock(memory: torch.Tensor) -> None:
    """Page-lock; memory that cannot be locked works as well, at the rate of pageable copies."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class Lease:
    """Memory for one snapshot. `place` hands it out; `release` gives all of it back.

    `expected` is how many bytes are still to be asked for, as far as that is known.
    """

    owner: HostBuffers
    expected: int = 0
    _slabs: list[tuple[_Slab, int]] = field(default_factory=list)  # and how much of it is used

    def place(self, nbytes: int) -> torch.Tensor | None:
        """`nbytes` of uint8, page aligned, or None when the bound leaves no room for them."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        number = next(
            (n for n, (s, used) in enumerate(self._slabs) if used + nbytes <= s.nbytes), -1
        )
        if number < 0:
            slab = self.owner._take(nbytes, max(nbytes, min(self.expected, SLAB_NBYTES)))
            if slab is None:
                return None
            self._slabs.append((slab, 0))
            number = len(self._slabs) - 1
        slab, start = self._slabs[number]
        self._slabs[number] = slab, -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.expected -= nbytes + _ALIGNMENT
        return slab.memory[start : start + nbytes]

    def release(self) -> None:
        """Give the memory back; what `place` returned must not be used any more. Idempotent."""
        slabs, self._slabs = self._slabs, []
        self.owner._give_back([slab for slab, _ in slabs])


class HostBuffers:
    """Slabs of host memory of one process, shared by its saves.

    `max_nbytes` bounds what is ever taken from the system; None is no bound. Nothing is given back
    to the system before `close`.
    """

    def __init__(self, *, max_nbytes: int | None = None) -> None:
        if max_nbytes is not None and max_nbytes < 0:
            raise InvalidInputError(f"max_nbytes={max_nbytes}: expected a number of bytes, or None")
        self.max_nbytes = max_nbytes
        self._free: list[_Slab] = []
        self._nbytes = self._made = self._closed_after = 0
        self._guard = threading.Lock()
        _all.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes taken from the system so far."""
        return self._nbytes

    def lease(self, sizes: Iterable[int] = ()) -> Lease:
        """An empty lease, to be filled by `place` with tensors of these sizes in bytes."""
        return Lease(self, sum(nbytes + _ALIGNMENT for nbytes in sizes))

    def reserve(self, nbytes: int) -> None:
        """Have `nbytes` ready, faulted in, before the first save asks for them."""
        with self._guard:
            missing = nbytes - sum(slab.nbytes for slab in self._free)
            while missing > 0:
                slab = self._grow(min(missing, SLAB_NBYTES))
                if slab is None:
                    return
                self._free.append(slab)
                missing -= slab.nbytes

    def close(self) -> None:
        """Give free memory back to the system; memory on lease follows when it is released."""
        with self._guard:
            self._closed_after = max(self._closed_after, self._made)
            self._drop()

    def _drop(self) -> None:
        old = [slab for slab in self._free if slab.number <= self._closed_after]
        self._free = [slab for slab in self._free if slab.number > self._closed_after]
        self._nbytes -= sum(slab.nbytes for slab in old)

    def _take(self, nbytes: int, wanted: int) -> _Slab | None:
        """A free slab of at least `wanted` bytes, the smallest; else the largest that holds
        `nbytes`; else a new one of `wanted` bytes, or of `nbytes` where the bound leaves no more.
        """
        with self._guard:
            ample = [slab for slab in self._free if slab.nbytes >= wanted]
            fitting = [slab for slab in self._free if slab.nbytes >= nbytes]
            if ample or fitting:
                size = attrgetter("nbytes")
                slab = min(ample, key=size) if ample else max(fitting, key=size)
                self._free.remove(slab)
                return slab
            return self._grow(wanted) or self._grow(nbytes)

    def _grow(self, nbytes: int) -> _Slab | None:
        nbytes = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        if self.max_nbytes is not None and self._nbytes + nbytes > self.max_nbytes:
            return None
        slab = _Slab(nbytes, self._made + 1)
        self._made += 1
        self._nbytes += nbytes
        return slab

    def _give_back(self, slabs: list[_Slab]) -> None:
        with self._guard:
            self._free.extend(slabs)
            self._drop()

    def _start_afresh(self) -> None:
        """In a forked child: the memory is the parent's, which goes on writing to it."""
        self._guard = threading.Lock()
        self._free, self._nbytes = [], 0


_all: WeakSet[HostBuffers] = WeakSet()


def _forget_all() -> None:
    for buffers in list(_all):
        buffers._start_afresh()


os.register_at_fork(after_in_child=_forget_all)
