"""The bytes of a tensor in row-major order, in pieces, and without a copy where that can be."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch

from milepost.geometry.blocks import Span, blocks_of_range
from milepost.state.tensors import flat_bytes


class ByteSource(Protocol):
    """Bytes `[0, nbytes)` of something that goes into a file."""

    @property
    def nbytes(self) -> int: ...

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        """The bytes `[start, end)` in order. A piece is valid until the next one is asked for."""
        ...


class Scratch:
    """Host memory of one thread into which pieces are gathered; pinned where there is CUDA."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """`nbytes` of uint8, allocated at the first use."""
        if self._tensor is None:
            self._tensor = torch.empty(
                self.nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        return self._tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable, as bytes; not a copy.

    The caller keeps the tensor alive while it uses the view.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class BytesSource:
    """Bytes that are in memory as such: headers, documents."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        yield self._view[start:end]


class RangeSource:
    """The bytes `[start, end)` of another source."""

    def __init__(self, source: ByteSource, start: int, end: int) -> None:
        self.source, self.start, self.end = source, start, end

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        yield from self.source.pieces(self.start + start, self.start + end, scratch)


class TensorSource:
    """A dense tensor of any strides and device.

    A contiguous CPU tensor is read where it lies. Any other is gathered box by box into the
    thread's scratch memory, so no second copy of the whole tensor ever exists. `name` is for
    messages.
    """

    def __init__(self, tensor: torch.Tensor, name: str = "") -> None:
        self.name = name
        self.tensor = tensor.detach()
        # Conjugate and negative views hold other bytes than their values say; resolving copies.
        if self.tensor.is_conj() or self.tensor.is_neg():
            self.tensor = self.tensor.resolve_conj().resolve_neg()
        if self.tensor.element_size() == 1:
            # Types of one byte are moved as bytes: torch need not know how to copy each of them.
            self.tensor = self.tensor.view(torch.uint8)
        self._itemsize = self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self._itemsize

    def pieces(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        if start >= end:
            return
        tensor = self.tensor
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            yield memory_of(tensor)[start:end]
            return
        yield from self._gathered(start, end, scratch)

    def _gathered(self, start: int, end: int, scratch: Scratch) -> Iterator[memoryview]:
        itemsize = self._itemsize
        stage = scratch.tensor()
        limit = stage.numel() // itemsize
        shape = tuple(self.tensor.shape)
        position = start // itemsize * itemsize  # a page may end within an element
        for box in blocks_of_range(shape, start // itemsize, -(-end // itemsize), limit):
            block = self.tensor[tuple(slice(*span) for span in box)]
            nbytes = block.numel() * itemsize
            stage[:nbytes].view(self.tensor.dtype).view(block.shape).copy_(block)
            yield memory_of(stage[:nbytes])[max(0, start - position) : end - position]
            position += nbytes


def byte_box(tensor: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """The box `spans` of a tensor as uint8, its last dim counted in bytes; a view where it can be.

    A tensor whose last dim is not dense in memory is copied, as far as the box needs.
    """
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    itemsize = tensor.element_size()
    outer = tuple(slice(*span) for span in spans[:-1])
    first, last = spans[-1]
    if itemsize == 1 or tensor.stride(-1) == 1:
        return tensor.view(torch.uint8)[(*outer, slice(first, last))]
    start = first // itemsize
    dense = tensor[(*outer, slice(start, -(-last // itemsize)))].clone(
        memory_format=torch.contiguous_format
    )
    shape = (*dense.shape[:-1], dense.shape[-1] * itemsize)
    skipped = first - start * itemsize
    return flat_bytes(dense).view(shape)[..., skipped : skipped + last - first]
