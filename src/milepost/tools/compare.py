"""Comparing the values of two checkpoints tensor by tensor, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

import torch

from milepost.layouts.checkpoint import Checkpoint, TensorInfo

PIECE_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a tensor differs from one checkpoint to the other.

    `same` means equal bits and dtype. `relative` is |b - a| / |a| in the 2-norm, `largest` the
    largest |b - a|; both are None where no difference can be taken, and `note` says why.
    `differing` of `elements` have other values (NaN equals NaN).
    """

    name: str
    same: bool
    relative: float | None = None
    largest: float | None = None
    differing: int = 0
    elements: int = 0
    note: str | None = None


def compare_values(first: Checkpoint, second: Checkpoint) -> Iterator[Change]:
    """One `Change` for each weight that both hold under one name, in the order of the first.

    At most a few pieces of 4 Mi elements are in memory at a time. A name that one side ties is
    compared with what the other stores under it.
    """
    mine, theirs = first.tensors(), second.tensors()
    for name in [*mine, *(alias for alias in first.tied if alias in theirs)]:
        info = mine.get(first.tied.get(name, name))
        other = theirs.get(second.tied.get(name, name))
        if info is not None and other is not None:
            yield _change(first, second, name, info, other)


def _change(
    first: Checkpoint, second: Checkpoint, name: str, mine: TensorInfo, other: TensorInfo
) -> Change:
    elements = prod(mine.shape)
    if mine.shape != other.shape:
        return Change(name=name, same=False, elements=elements, note="shapes differ")
    total = _Total(same=mine.dtype == other.dtype)
    for index in _pieces(mine.shape):
        total.add(first.read(name, index), second.read(name, index))
    return total.change(name, elements)


def _pieces(shape: tuple[int, ...]) -> Iterator[list[slice] | None]:
    """Slices of the first dim that hold about `PIECE_ELEMENTS`; None for all of a small tensor."""
    elements = prod(shape)
    if elements <= PIECE_ELEMENTS or not shape:
        yield None
        return
    rows = max(1, PIECE_ELEMENTS * shape[0] // elements)
    for start in range(0, shape[0], rows):
        yield [slice(start, min(start + rows, shape[0]))]


class _Total:
    """Sums over the pieces of one tensor."""

    def __init__(self, *, same: bool) -> None:
        self.same = same
        self.note: str | None = None
        self.squares = self.base_squares = self.largest = 0.0
        self.differing = 0

    def add(self, mine: torch.Tensor, other: torch.Tensor) -> None:
        if self.same and torch.equal(_bits(mine), _bits(other)):
            self.base_squares += float(_numbers(mine).abs().square().sum()) if _can(mine) else 0.0
            return
        self.same = False
        if not (_can(mine) and _can(other)):
            self.note = f"{mine.dtype} and {other.dtype} are compared bit by bit only"
            return
        a, b = _numbers(mine), _numbers(other)
        both_nan = a.isnan() & b.isnan()
        self.differing += int(((a != b) & ~both_nan).sum())
        gap = torch.where(both_nan | (a == b), torch.zeros_like(a), b - a).abs()
        self.squares += float(gap.square().sum())
        self.base_squares += float(a.abs().square().sum())
        self.largest = max(self.largest, float(gap.max())) if gap.numel() else self.largest

    def change(self, name: str, elements: int) -> Change:
        if self.same or self.note:
            note = None if self.same else self.note
            relative = 0.0 if self.same else None
            return Change(
                name=name,
                same=self.same,
                relative=relative,
                largest=relative,
                elements=elements,
                note=note,
            )
        zero_base = self.base_squares == 0.0
        relative = sqrt(self.squares / self.base_squares) if not zero_base else float("inf")
        only_dtype = self.differing == 0
        return Change(
            name=name,
            same=False,
            relative=0.0 if only_dtype else relative,
            largest=self.largest,
            differing=self.differing,
            elements=elements,
            note="equal values, other bits" if only_dtype else None,
        )


def _can(tensor: torch.Tensor) -> bool:
    """Whether torch can turn this dtype into numbers (packed 4-bit types it cannot)."""
    try:
        _numbers(tensor.reshape(-1)[:1])
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
