"""Views of one tensor as another, dim by dim: a slice with a step, a permutation, a fixed index.

One expert of a fused weight, the gate half of a gate-up projection, a transposed projection: every
dim of the view is an evenly spaced part of one dim of its source, and dims of the source that are
not among them are fixed at an index. What a rank holds of the view then follows from what it holds
of the source, span by span, and lies in the local tensor as a strided view.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet, Spans, span_length
from milepost.geometry.strided import StridedCopy, compose, contiguous_strides, whole_copy

NEW_DIM = -1
Fixed: TypeAlias = tuple[int, ...]
"""The index at each fixed dim of a source, in order of the dims."""


class AxisDim(NamedTuple):
    """Index `i < length` of a dim of the view is `offset + i * step` of dim `source`; a dim of
    length 1 that comes from nowhere has the source `NEW_DIM`."""

    source: int
    offset: int
    step: int
    length: int


@dataclass(frozen=True)
class AxisKind:
    """All views of one source shape that differ in their fixed indices only."""

    source_shape: Shape
    dims: tuple[AxisDim, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.source_shape, self.dims))

    def __hash__(self) -> int:  # asked for every tensor of a model
        return self._hash

    @cached_property
    def shape(self) -> Shape:
        return tuple(dim.length for dim in self.dims)

    @cached_property
    def fixed_dims(self) -> tuple[int, ...]:
        """Dims of the source that the view has at one index."""
        used = {dim.source for dim in self.dims}
        return tuple(n for n in range(len(self.source_shape)) if n not in used)


class LocalBox(NamedTuple):
    """A part of a view that a rank holds: its index set, its place in the view's local tensor, and
    the position in the source's local tensor at which each dim of the source begins."""

    held: IndexSet
    place: tuple[Span, ...]
    starts: tuple[int, ...]


class _Run(NamedTuple):
    """Evenly spaced positions of one dim of a local tensor, and the spans of the view there."""

    start: int
    spans: Spans


def find_axis_view(
    copy: StridedCopy, shape: Shape, source_shape: Shape
) -> tuple[AxisKind, Fixed] | None:
    """The view of `shape` that `copy` takes from a source, both flat; None when it is none."""
    if 0 in shape:
        return None
    mapped = _mapped(*_relative(copy), shape, source_shape)
    if mapped is None:
        return None
    index, rest = [], copy.from_offset
    for stride in _contiguous(source_shape):
        position, rest = divmod(rest, stride)
        index.append(position)
    offsets = tuple(0 if source == NEW_DIM else index[source] for source, _ in mapped)
    kind = _kind(shape, source_shape, mapped, offsets)
    return None if kind is None else (kind, tuple(index[n] for n in kind.fixed_dims))


_Mapped: TypeAlias = tuple[tuple[int, int], ...]
"""For each dim of a view the dim of the source that it runs along, and the step."""
_contiguous = lru_cache(maxsize=256)(contiguous_strides)


@lru_cache(maxsize=512)
def _kind(
    shape: Shape, source_shape: Shape, mapped: _Mapped, offsets: tuple[int, ...]
) -> AxisKind | None:
    """The kind of a view that begins at `offsets`; None when it does not fit into its source."""
    dims = tuple(
        AxisDim(source, offset, step, length)
        for (source, step), offset, length in zip(mapped, offsets, shape, strict=True)
    )
    for dim in dims:
        end = dim.offset + dim.step * (dim.length - 1)
        if dim.source != NEW_DIM and end >= source_shape[dim.source]:
            return None
    return AxisKind(source_shape, dims)


def _relative(copy: StridedCopy) -> tuple[Shape, int, tuple[int, ...], tuple[int, ...]]:
    """All of a copy but where it begins in its source."""
    return copy.shape, copy.to_offset, copy.to_strides, copy.from_strides


@lru_cache(maxsize=512)
def _mapped(
    lengths: Shape,
    to_offset: int,
    to_strides: tuple[int, ...],
    from_strides: tuple[int, ...],
    shape: Shape,
    source_shape: Shape,
) -> _Mapped | None:
    """The dims of the source along which those of the view run; None when there are not such."""
    copy = StridedCopy(lengths, to_offset, to_strides, 0, from_strides)
    found = compose(whole_copy(shape), copy)
    if len(found) != 1 or found[0].shape != shape:
        return None
    mapped: list[tuple[int, int]] = []
    for length, stride in zip(shape, found[0].from_strides, strict=True):
        along = (NEW_DIM, 1) if length == 1 else _along(stride, source_shape)
        if along is None:
            return None
        mapped.append(along)
    used = [source for source, _ in mapped if source != NEW_DIM]
    return tuple(mapped) if len(set(used)) == len(used) else None


def _along(stride: int, source_shape: Shape) -> tuple[int, int] | None:
    """The dim that moves when `stride` is added to a flat position, and by how much."""
    for source, (length, own) in enumerate(
        zip(source_shape, contiguous_strides(source_shape), strict=True)
    ):
        if length > 1 and own <= stride:
            return None if stride % own else (source, stride // own)
    return None


@lru_cache(maxsize=4096)
def view_held(kind: AxisKind, held: IndexSet) -> IndexSet:
    """What a rank holds of a view when it holds `held` of the source, fixed indices among it.

    >>> up = AxisKind((4, 6), (AxisDim(1, 3, 1, 3),))
    >>> view_held(up, (((0, 2),), ((2, 6),)))
    (((0, 3),),)
    """
    return tuple(tuple(span for run in _runs(dim, held) for span in run.spans) for dim in kind.dims)


def local_boxes(kind: AxisKind, fixed: Fixed, held: IndexSet) -> list[LocalBox]:
    """Where what a rank holds of a view lies in its local tensor of the source.

    One box, but where a step does not go on evenly from one span of a dim to the next. None at all
    when the rank holds nothing of the view.

    >>> second = AxisKind((4, 6), (AxisDim(1, 0, 1, 6),))
    >>> local_boxes(second, (1,), (((1, 2),), ((2, 6),)))
    [LocalBox(held=(((2, 6),),), place=((0, 4),), starts=(0, 0))]
    """
    positions = [_position(held[n], at) for n, at in zip(kind.fixed_dims, fixed, strict=True)]
    boxes = _mapped_boxes(kind, held)
    if not kind.fixed_dims:
        return list(boxes)
    if None in positions:
        return []
    found = []
    for box in boxes:
        starts = list(box.starts)
        for n, position in zip(kind.fixed_dims, positions, strict=True):
            assert position is not None
            starts[n] = position
        found.append(LocalBox(box.held, box.place, tuple(starts)))
    return found


@lru_cache(maxsize=4096)
def _mapped_boxes(kind: AxisKind, held: IndexSet) -> tuple[LocalBox, ...]:
    """The boxes of a view, with all fixed indices at position 0."""
    choices = []
    for dim in kind.dims:
        placed, position = [], 0
        for run in _runs(dim, held):
            length = span_length(run.spans)
            placed.append((run, (position, position + length)))
            position += length
        choices.append(placed)
    found = []
    for chosen in product(*choices):
        starts = [0] * len(kind.source_shape)
        for dim, (run, _) in zip(kind.dims, chosen, strict=True):
            if dim.source != NEW_DIM:
                starts[dim.source] = run.start
        held_here = tuple(run.spans for run, _ in chosen)
        found.append(LocalBox(held_here, tuple(place for _, place in chosen), tuple(starts)))
    return tuple(found)


def _runs(dim: AxisDim, held: IndexSet) -> list[_Run]:
    if dim.source == NEW_DIM:
        return [_Run(0, ((0, 1),))]
    runs: list[_Run] = []
    position = 0
    for start, end in held[dim.source]:
        first = max(0, -((dim.offset - start) // dim.step))
        last = min(dim.length, -((dim.offset - end) // dim.step))
        if first < last:
            begin = position + dim.offset + first * dim.step - start
            _extend(runs, _Run(begin, ((first, last),)), dim.step)
        position += end - start
    return runs


def _extend(runs: list[_Run], run: _Run, step: int) -> None:
    """Add a run, joined with the one before it where it goes on evenly."""
    if runs and runs[-1].start + span_length(runs[-1].spans) * step == run.start:
        known, (span,) = runs.pop(), run.spans
        spans = known.spans
        if spans[-1][1] == span[0]:
            spans, span = spans[:-1], (spans[-1][0], span[1])
        run = _Run(known.start, (*spans, span))
    runs.append(run)


def has_fixed(kind: AxisKind, fixed: Fixed, held: IndexSet) -> bool:
    """Whether a rank that holds `held` of the source has the fixed indices of a view."""
    return all(
        _position(held[n], at) is not None for n, at in zip(kind.fixed_dims, fixed, strict=True)
    )


def _position(spans: Spans, index: int) -> int | None:
    """Where a local tensor has the index `index` of a dim; None when it does not."""
    position = 0
    for start, end in spans:
        if start <= index < end:
            return position + index - start
        position += end - start
    return None
