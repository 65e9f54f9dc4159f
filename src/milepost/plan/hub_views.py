"""Tensors on disk as views of the runtime tensors that hold them, in slices and in compact form.

A `HubMap` says element by element what becomes what. Where each tensor on disk is an even part of
one runtime tensor, dim by dim, it follows from how the runtime tensor is held who holds what of it:
nothing is gathered to write it. Thousands of experts are a few *view runs*: names that differ in a
number, which is the index of the expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from milepost.errors import InvalidInputError
from milepost.geometry.axis_view import AxisDim, AxisKind, Fixed, find_axis_view
from milepost.geometry.blocks import Shape
from milepost.geometry.strided import StridedCopy, contiguous_strides
from milepost.plan.hub_map import HubMap, HubTensor


class HubView(NamedTuple):
    """A tensor on disk as a view of a runtime tensor."""

    name: str
    kind: AxisKind
    fixed: Fixed


class HubPart(NamedTuple):
    """A part of a tensor on disk: a view of a runtime tensor fills the box that begins at `start`
    of `grid`, the shape on disk or a finer one of the same row-major order."""

    view: HubView
    grid: Shape
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewRun:
    """Views of one kind whose first fixed index counts up from `first` and stands in their names.

    The names are `head + index + tail`; where `tail` is None it is one view, named `head`.
    """

    head: str
    tail: str | None
    kind: AxisKind
    first: Fixed
    count: int = 1

    def views(self) -> Iterator[HubView]:
        if self.tail is None:
            yield HubView(self.head, self.kind, self.first)
            return
        start, *others = self.first
        for index in range(start, start + self.count):
            yield HubView(f"{self.head}{index}{self.tail}", self.kind, (index, *others))


Views: TypeAlias = Mapping[str, tuple[ViewRun, ...]]
"""For runtime names, what lies on disk instead of the tensor under its own name."""


def views_of(hub_map: HubMap) -> dict[str, tuple[ViewRun, ...]]:
    """The views that lie on disk, by runtime tensor; those that lie as they are held are left out.

    `InvalidInputError` naming a tensor that is not an even part of one runtime tensor.
    """
    found: dict[str, list[HubView]] = {}
    for name, tensor in hub_map.tensors.items():
        if name in hub_map.identity:
            continue
        view = _whole_view(hub_map, tensor)
        if view is None:
            sources = ", ".join(dict.fromkeys(piece.source for piece in tensor.pieces))
            raise InvalidInputError(
                f"{name}: its elements do not lie evenly in {sources}, so it cannot be written "
                "from slices"
            )
        found.setdefault(tensor.pieces[0].source, []).append(view)
    for name in hub_map.identity & found.keys():
        shape = hub_map.sources[name]
        found[name].append(HubView(name, whole_kind(shape), ()))
    return {source: tuple(_runs(views)) for source, views in found.items()}


def whole_kind(shape: Shape) -> AxisKind:
    """The view of a tensor as itself."""
    return AxisKind(shape, tuple(AxisDim(n, 0, 1, length) for n, length in enumerate(shape)))


def _whole_view(hub_map: HubMap, tensor: HubTensor) -> HubView | None:
    """The one view that `tensor` is, or None."""
    if len(tensor.pieces) != 1:
        return None
    (piece,) = tensor.pieces
    source_shape = hub_map.sources[piece.source]
    if source_shape == tensor.shape and tensor.name in hub_map.renamed:
        return HubView(tensor.name, whole_kind(source_shape), ())
    found = find_axis_view(piece.copy, tensor.shape, source_shape)
    return None if found is None else HubView(tensor.name, *found)


def parts_of(hub_map: HubMap, tensor: HubTensor) -> list[tuple[str, HubPart]]:
    """The parts of a tensor on disk, each with the runtime tensor that it fills.

    `InvalidInputError` where a part is not an even part of the runtime tensor.
    """
    view = _whole_view(hub_map, tensor)
    if view is not None:
        at_origin = (0,) * len(tensor.shape)
        return [(tensor.pieces[0].source, HubPart(view, tensor.shape, at_origin))]
    found = []
    for part in tensor.slices():
        to_strides = contiguous_strides(part.lengths)
        copy = StridedCopy(part.lengths, 0, to_strides, part.offset, part.strides)
        axis = find_axis_view(copy, part.lengths, hub_map.sources[part.source])
        if axis is None:
            raise InvalidInputError(
                f"{tensor.name}: its elements do not lie evenly in {part.source}, so it cannot "
                "be read in slices"
            )
        start = tuple(first for first, _ in part.box)
        found.append((part.source, HubPart(HubView(tensor.name, *axis), part.grid, start)))
    return found


def _runs(views: Sequence[HubView]) -> Iterator[ViewRun]:
    """Views as runs: those of one kind follow each other, in order of their indices."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(v.kind for v in views))}
    ordered = sorted(views, key=lambda view: (kinds[view.kind], view.fixed[1:], view.fixed[:1]))
    open_run: ViewRun | None = None
    for view in ordered:
        head, tail = _split(view)
        if open_run is not None:
            if _follows(open_run, view, head, tail):
                open_run = ViewRun(head, tail, view.kind, open_run.first, open_run.count + 1)
                continue
            yield open_run
        open_run = ViewRun(head, tail, view.kind, view.fixed)
    if open_run is not None:
        yield open_run


def _split(view: HubView) -> tuple[str, str | None]:
    if view.fixed:
        head, found, tail = view.name.rpartition(f".{view.fixed[0]}.")
        if found:
            return f"{head}.", f".{tail}"
    return view.name, None


def _follows(run: ViewRun, view: HubView, head: str, tail: str | None) -> bool:
    return (
        tail is not None
        and (run.head, run.tail, run.kind) == (head, tail, view.kind)
        and (run.first[0] + run.count, *run.first[1:]) == view.fixed
    )


def encode_views(
    views: Mapping[str, Views], kinds: dict[AxisKind, int]
) -> dict[str, dict[str, list[list[Any]]]]:
    """Views by set, as plain lists; kinds that are new get a number in `kinds`."""
    return {
        key: {
            source: [
                [run.head, run.tail, kinds.setdefault(run.kind, len(kinds)), run.first, run.count]
                for run in runs
            ]
            for source, runs in of_set.items()
        }
        for key, of_set in views.items()
    }


def decode_views(
    data: Mapping[str, Mapping[str, Iterable[Sequence[Any]]]], kinds: Sequence[AxisKind]
) -> dict[str, dict[str, tuple[ViewRun, ...]]]:
    """The inverse of `encode_views`."""
    return {
        key: {
            source: tuple(
                ViewRun(head, tail, kinds[number], tuple(first), count)
                for head, tail, number, first, count in runs
            )
            for source, runs in of_set.items()
        }
        for key, of_set in data.items()
    }


def encode_kind(kind: AxisKind) -> list[Any]:
    return [kind.source_shape, [tuple(dim) for dim in kind.dims]]


def decode_kind(entry: Sequence[Any]) -> AxisKind:
    source_shape, dims = entry
    return AxisKind(tuple(source_shape), tuple(AxisDim(*dim) for dim in dims))
