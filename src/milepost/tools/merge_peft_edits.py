"""What an adapter does to one stored tensor, and tensors with all their edits made chunk by chunk.

An edit gives the difference that it makes to the base, in fp32 (fp64 for such weights). With
several adapters the differences to the same base, each times its adapter's weight, are added up.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from milepost.adapters.arithmetic import LowRank, fold, squared_norms
from milepost.errors import InvalidInputError
from milepost.tools.rewrite.dtypes import refuse_overflow, torch_type
from milepost.tools.rewrite.groups import Computed, TensorSpec
from milepost.tools.rewrite.source import SourceTensor

CHUNK_NUMEL = 2**19

Factors: TypeAlias = Mapping[str, Tensor]
Form: TypeAlias = Callable[[Factors], LowRank]
Region: TypeAlias = tuple[int, int, int]
"""Expert, first row, end: the rows of one expert in a bank [experts, rows, columns]."""

Apply: TypeAlias = Callable[[Tensor, Tensor, slice], Tensor]
"""`(base, total, rows)` to the new total: both are these rows of the weight, wide. `base` and what
is not the thread's own memory for sums stay as they are."""


class _Memory(threading.local):
    """Memory of one thread for a chunk, used again for the next: what is allocated anew is cleared
    by the system first, and that takes as long as the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, what: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the shape of `like`, for one purpose. More than a chunk is not kept."""
        if like.numel() > CHUNK_NUMEL:
            return torch.empty(like.shape, dtype=dtype)
        key = (what, dtype)
        if key not in self._held:
            self._held[key] = torch.empty(CHUNK_NUMEL, dtype=dtype)
        return self._held[key][: like.numel()].view(like.shape)

    def for_sum(self, total: Tensor) -> Tensor:
        """Where a sum that continues `total` is made: in its place once it lies in this memory."""
        held = self._held.get(("total", total.dtype))
        if held is not None and held.data_ptr() == total.data_ptr():
            return total
        return self.take("total", total, total.dtype)


_memory = _Memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(ABC):
    """One change of a tensor. `inputs` are what it reads, `by_rows` those of them whose dim 0 is
    that of the tensor; None for an edit that does not go row by row."""

    inputs: Mapping[str, SourceTensor]
    weight: float
    by_rows: tuple[str, ...] | None = None

    @abstractmethod
    def start(self, factors: Factors, base: Tensor) -> Apply:
        """The change of parts of `base`, which is the tensor, or a band of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankEdit(Edit):
    """Factors: of the tensor, or of a bank of which the tensor is `part`, or of `place` in it."""

    form: Form
    part: Region | None = None
    place: Region | None = None

    def low_rank(self, factors: Factors) -> LowRank:
        """The factors in the layout of what is changed; `factors` may be without data."""
        low = self.form(factors)
        if self.part is None:
            return low
        expert, first, end = self.part
        return LowRank(left=low.left[expert, first:end], right=low.right[expert], scale=low.scale)

    def start(self, factors: Factors, base: Tensor) -> Apply:
        low = self.low_rank(factors)
        if self.place is not None:
            return self._in_place(low, self.place)
        squares = None
        if low.magnitude is not None and low.magnitude_dim == 1:
            squares = torch.stack(
                [
                    squared_norms(wide(base[rows]), low.box([rows, slice(None)]))
                    for rows in chunks(base.shape)
                ]
            ).sum(dim=0)

        def apply(base: Tensor, total: Tensor, rows: slice) -> Tensor:
            shape = base.shape
            if base.dim() > low.left.dim():  # a convolution
                base, total = base.flatten(1), total.flatten(1)
            boxed = low.box([rows, *(slice(None) for _ in low.shape[1:])])
            return self._folded(base, total, boxed, squares).reshape(shape)

        return apply

    def _folded(self, base: Tensor, total: Tensor, low: LowRank, squares: Tensor | None) -> Tensor:
        if low.magnitude is None:
            scaled = replace(low, scale=low.scale * self.weight)
            return fold(total, scaled, out=_memory.for_sum(total))
        return blended(base, total, fold(base, low, squares), self.weight)

    def _in_place(self, low: LowRank, place: Region) -> Apply:
        expert, first, end = place

        def apply(base: Tensor, total: Tensor, rows: slice) -> Tensor:
            if not rows.start <= expert < rows.stop:
                return total
            spot = (expert - rows.start, slice(first, end))
            made = total.clone()
            if low.magnitude is None:
                made[spot] = fold(total[spot], replace(low, scale=low.scale * self.weight))
            else:
                made[spot] = blended(base[spot], total[spot], fold(base[spot], low), self.weight)
            return made

        return apply


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeEdit(Edit):
    """A tensor that was trained as it is, in place of the base's."""

    def start(self, factors: Factors, base: Tensor) -> Apply:
        value = factors["value"]
        return lambda base, total, rows: blended(
            base, total, value[rows].to(base.dtype), self.weight
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsEdit(Edit):
    """Rows of an embedding that were trained, in place of the base's."""

    indices: tuple[int, ...]

    def start(self, factors: Factors, base: Tensor) -> Apply:
        indices = torch.tensor(self.indices)

        def apply(base: Tensor, total: Tensor, rows: slice) -> Tensor:
            inside = (indices >= rows.start) & (indices < rows.stop)
            if not bool(inside.any()):
                return total
            adapted = base.clone()
            adapted[indices[inside] - rows.start] = factors["value"][inside].to(base.dtype)
            return blended(base, total, adapted, self.weight)

        return apply


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasEdit(Edit):
    """The bias of a second factor, which goes into that of the layer."""

    scale: float

    def start(self, factors: Factors, base: Tensor) -> Apply:
        value, scale = factors["value"], self.scale * self.weight
        return lambda base, total, rows: total + value[rows].to(base.dtype) * scale


def blended(base: Tensor, total: Tensor, adapted: Tensor, weight: float) -> Tensor:
    """`total` plus `weight` times what `adapted` differs from `base` by; exact for one adapter."""
    if weight == 1.0 and total is base:
        return adapted
    return total + (adapted - base) * weight


def wide(tensor: Tensor) -> Tensor:
    """In the type that sums are made in."""
    return tensor.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)


def chunks(shape: Sequence[int]) -> Iterator[slice]:
    """Rows of about `CHUNK_NUMEL` elements at a time."""
    step = max(1, CHUNK_NUMEL // max(1, prod(shape[1:])))
    length = shape[0] if shape else 1
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a tensor came out: elements, those that adapters move, those whose stored value changed,
    and the square of the norm of the stored difference."""

    numel: int = 0
    moved: int = 0
    changed: int = 0
    square: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            numel=self.numel + other.numel,
            moved=self.moved + other.moved,
            changed=self.changed + other.changed,
            square=self.square + other.square,
        )


@dataclass(slots=True)
class Differences:
    """Those of all tensors that are changed, by name; filled in by any thread."""

    by_name: dict[str, Difference] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, found: Difference) -> None:
        """Add what came of a part of the tensor `name`."""
        with self._guard:
            known = self.by_name.setdefault(name, Difference())
            self.by_name[name] = known + found


def edited_group(
    tensors: Mapping[str, SourceTensor],
    edits: Mapping[str, Sequence[Edit]],
    dtypes: Mapping[str, str],
    differences: Differences,
) -> Computed:
    """Output tensors by name, each a tensor of the base with its `edits`, stored in its dtype.

    Made in bands of rows where there is one and all of its edits go row by row.
    """
    inputs = dict(tensors)
    keys: dict[tuple[int, str], str] = {}
    for tensor in (t for each in edits.values() for e in each for t in e.inputs.values()):
        label = f"{len(keys)} {tensor.name}"
        inputs[keys.setdefault((id(tensor.source), tensor.name), label)] = tensor

    def named(edit: Edit, names: Iterable[str]) -> dict[str, str]:
        return {n: keys[id(edit.inputs[n].source), edit.inputs[n].name] for n in names}

    def factors_of(edit: Edit, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: given[key] for name, key in named(edit, edit.inputs).items()}

    def make(given: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name in tensors:
            base = given[name]
            started = [edit.start(factors_of(edit, given), base) for edit in edits[name]]
            made[name], found = _edited(name, base, started, torch_type(dtypes[name]))
            differences.add(name, found)
        return made

    banded: list[str] = []
    every = [edit for each in edits.values() for edit in each]
    if len(tensors) == 1 and all(e.by_rows is not None for e in every):
        (only,) = tensors.values()
        by_rows = [k for e in every for k in named(e, e.by_rows or ()).values()]
        banded = list(dict.fromkeys([*tensors, *by_rows])) if only.shape and only.nbytes else []
    chunk = max(max(CHUNK_NUMEL, prod(t.shape[1:])) for t in tensors.values())
    return Computed(
        inputs=inputs,
        outputs=tuple(
            TensorSpec(name=name, dtype=dtypes[name], shape=tensor.shape)
            for name, tensor in tensors.items()
        ),
        make=make,
        banded=tuple(banded),
        scratch_nbytes=6 * 4 * chunk,
    )


def _edited(
    name: str, base: Tensor, started: Sequence[Apply], dtype: torch.dtype
) -> tuple[Tensor, Difference]:
    """The tensor after all changes, and what they did; chunk by chunk, each while it is in cache.

    `InvalidInputError` where a value becomes infinite or NaN, in the sum or in the stored dtype.
    """
    out = torch.empty(base.shape, dtype=dtype)
    found = Difference()
    scalar = base.dim() == 0
    source, target = (base.reshape(1), out.view(1)) if scalar else (base, out)
    for rows in chunks(source.shape):
        before, stored = _widened(source[rows]), target[rows]
        total = before
        for apply in started:
            total = apply(before, total, rows)
        stored.copy_(total)
        found += _difference(name, before, total, stored)
    return out, found


def _widened(chunk: Tensor) -> Tensor:
    if chunk.dtype in (torch.float32, torch.float64):
        return chunk
    return _memory.take("base", chunk, torch.float32).copy_(chunk)


def _difference(name: str, before: Tensor, total: Tensor, stored: Tensor) -> Difference:
    """Of a chunk: wide values before and after, and after as they are stored.

    A value that is infinite or NaN makes the square of the norm so, too: only then are values
    looked at one by one.
    """
    delta = _memory.take("delta", before, before.dtype).copy_(stored).sub_(before).view(-1)
    square = float(torch.dot(delta, delta))
    if not math.isfinite(square):
        _refuse_not_finite(name, before, total)
        refuse_overflow(total, stored, name)
        return _difference_of_finite(before, total, stored)
    changed = _count_unequal(delta, np.float32(0))
    moved = changed
    if stored.dtype is not total.dtype and total is not before:
        moved = max(changed, _count_unequal(total.reshape(-1), before.reshape(-1).numpy()))
    return Difference(numel=before.numel(), moved=moved, changed=changed, square=square)


def _refuse_not_finite(name: str, before: Tensor, total: Tensor) -> None:
    """`InvalidInputError` when a sum is infinite or NaN where the base is not."""
    is_new = ~total.isfinite() & (before.isfinite() | (total.isnan() & ~before.isnan()))
    lost = int(is_new.sum())
    if lost:
        raise InvalidInputError(
            f"{name}: {lost} values become infinite or NaN that are not so in the base: what "
            "adapters hold for it is infinite or NaN, too large for sums in "
            f"{str(total.dtype).removeprefix('torch.')}, or (DoRA) the magnitude of a slice of "
            "zeros; nothing was written; look at that tensor in the adapters"
        )


def _difference_of_finite(before: Tensor, total: Tensor, stored: Tensor) -> Difference:
    """As `_difference`, where the base holds infinite values or NaN, or squares are too large.

    NaN that stays NaN is unchanged; the norm is that of the differences that are finite.
    """
    changed = moved = _count_changed(stored, before)
    if stored.dtype is not total.dtype and total is not before:
        moved = max(changed, _count_changed(total, before))
    delta = stored.double().sub_(before).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    square = float(delta.square_().sum())
    return Difference(numel=before.numel(), moved=moved, changed=changed, square=square)


def _count_changed(values: Tensor, before: Tensor) -> int:
    return int(((values != before) & ~(values.isnan() & before.isnan())).sum())


def _count_unequal(values: Tensor, others: np.ndarray | np.float32) -> int:
    """How many `values` are others; numpy compares and counts several times as fast as torch."""
    mask = _memory.take("mask", values, torch.bool).numpy()
    return int(np.count_nonzero(np.not_equal(values.numpy(), others, out=mask)))
