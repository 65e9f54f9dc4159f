"""Which elements of a live model's tensors each tensor on disk consists of.

Models hold some tensors in another shape than hub checkpoints do: fused experts, transposed or
interleaved projections, other names. A `HubMap` says, element by element and without data, how the
one becomes the other. It is used in both directions, and in slices: to write under hub names, and
to read files with hub names straight into live tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from milepost.errors import InvalidInputError
from milepost.geometry.blocks import Shape, Span
from milepost.geometry.placement import IndexSet
from milepost.geometry.strided import StridedCopy, compose, local_copies, whole_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPiece:
    """Elements of a hub tensor that come from the runtime tensor `source`.

    `copy.to_*` count in the hub tensor, `copy.from_*` in the global runtime tensor, both taken
    flat and row-major. The dims of `copy` are merged as far as they go.
    """

    source: str
    copy: StridedCopy

    def held(self, shape: Shape, index_set: IndexSet) -> list[StridedCopy]:
        """The part of the piece that a rank holds, as copies from its flat local tensor.

        `shape` is the global shape of the runtime tensor, `index_set` what the rank holds of it.
        """
        parts = local_copies(shape, index_set)
        return [found for part in parts for found in compose(self.copy, part)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSlice:
    """A box of a hub tensor, and where its elements lie in the global runtime tensor `source`.

    `box` has a span for each dim of `grid`: the shape of the hub tensor, or, where its rows come
    interleaved, that shape with a dim cut in two; the row-major order is the same. The elements
    are `torch.as_strided(flat_source, lengths, strides, offset)`.
    """

    grid: Shape
    box: tuple[Span, ...]
    source: str
    offset: int
    strides: tuple[int, ...]

    @property
    def lengths(self) -> Shape:
        return tuple(end - start for start, end in self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensor:
    """A tensor as hub checkpoints have it; its pieces fill it exactly once.

    A tensor without elements has one empty piece, which names its source.
    """

    name: str
    shape: Shape
    pieces: tuple[HubPiece, ...]

    def slices(self, layouts: Mapping[str, StridedCopy] | None = None) -> list[HubSlice]:
        """The pieces as boxes, in dims as near to those of the hub tensor as can be.

        `layouts` are runtime tensors that do not lie row-major at the beginning of their memory,
        as copies from that memory; offset and strides of their slices then count in it.
        """
        hub = whole_copy(self.shape)
        found = []
        for piece in self.pieces:
            layout = (layouts or {}).get(piece.source)
            for copy in compose(hub, piece.copy):
                for inner in [copy] if layout is None else compose(copy, layout):
                    found.append(_as_slice(piece.source, inner, prod(self.shape)))
        return found


@dataclass(frozen=True)
class HubMap:
    """Hub tensors by name, in the order in which files hold them.

    `sources` has the global shape of every runtime tensor. `ties` gives the hub name that holds
    the values of each further hub name of a tied tensor, which no file holds. `shared` are runtime
    tensors that other names of the model are tied to; they alone may be used more than once.

    `InvalidInputError` unless every hub element is filled once and every runtime element is used
    once, by their counts.
    """

    tensors: Mapping[str, HubTensor]
    sources: Mapping[str, Shape]
    ties: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        used: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            counts = [piece.copy.numel for piece in tensor.pieces]
            for piece, numel in zip(tensor.pieces, counts, strict=True):
                used[piece.source] += numel
            if sum(counts) != prod(tensor.shape):
                raise InvalidInputError(
                    f"{name}: {prod(tensor.shape)} elements on disk would be filled "
                    f"{sum(counts)} times in all; each must be filled once"
                )
        for source, shape in self.sources.items():
            numel = prod(shape)
            if used[source] != numel and not (source in self.shared and used[source] > numel):
                raise InvalidInputError(
                    f"{source}: {used[source]} of its {numel} elements would be saved; each must "
                    f"be saved once"
                )

    @cached_property
    def identity(self) -> frozenset[str]:
        """Names that are the same tensor, as it lies, on disk and in the model."""
        return frozenset(
            name
            for name, tensor in self.tensors.items()
            if self.renamed.get(name) == name and self.sources[name] == tensor.shape
        )

    @cached_property
    def is_identity(self) -> bool:
        return len(self.identity) == len(self.tensors)

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Runtime name by hub name, for hub tensors that are one runtime tensor as it lies."""
        found = {}
        for name, tensor in self.tensors.items():
            if len(tensor.pieces) == 1:
                (piece,) = tensor.pieces
                numel = prod(self.sources[piece.source])
                if piece.copy.is_run and piece.copy.numel == numel:
                    found[name] = piece.source
        return found

    @cached_property
    def by_source(self) -> dict[str, list[tuple[str, StridedCopy]]]:
        """For each runtime tensor the hub tensors that hold its elements, with copies into it."""
        found: dict[str, list[tuple[str, StridedCopy]]] = {source: [] for source in self.sources}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                found[piece.source].append((name, piece.copy.inverse()))
        return found

    def as_stored(self, names: Collection[str]) -> HubMap:
        """The map for files that hold `names`, where some tensors may lie as they do in memory.

        Tensors whose hub names are not all there, but whose runtime names are, are taken under
        those: a directory may hold experts fused that others hold one by one.
        """
        if all(name in names for name in self.tensors):
            return self
        tensors: dict[str, HubTensor] = {}
        for group in self._groups():
            sources = dict.fromkeys(piece.source for t in group for piece in t.pieces)
            as_on_hub = all(tensor.name in names for tensor in group)
            if not as_on_hub and all(source in names for source in sources):
                group = [_same(source, self.sources[source]) for source in sources]
            tensors.update((tensor.name, tensor) for tensor in group)
        return HubMap(tensors, self.sources, self.ties, self.shared)

    def _groups(self) -> list[list[HubTensor]]:
        """Hub tensors in groups, such that no two groups share a runtime tensor."""
        leaders: dict[str, str] = {}

        def leader(source: str) -> str:
            while leaders.setdefault(source, source) != source:
                source = leaders[source]
            return source

        for tensor in self.tensors.values():
            first = leader(tensor.pieces[0].source)
            for piece in tensor.pieces[1:]:
                leaders[leader(piece.source)] = first
        groups: dict[str, list[HubTensor]] = {}
        for tensor in self.tensors.values():
            groups.setdefault(leader(tensor.pieces[0].source), []).append(tensor)
        return list(groups.values())


def same_names(shapes: Mapping[str, Shape], ties: Mapping[str, str] | None = None) -> HubMap:
    """The map of a model whose tensors are on disk as they are in memory."""
    tensors = {name: _same(name, shape) for name, shape in shapes.items()}
    kept = dict(ties or {})
    return HubMap(tensors, dict(shapes), kept, frozenset(kept.values()))


def _same(name: str, shape: Shape) -> HubTensor:
    return HubTensor(name=name, shape=shape, pieces=whole_piece(name, shape))


def whole_piece(source: str, shape: Shape) -> tuple[HubPiece, ...]:
    """The one piece of a hub tensor that is a runtime tensor of this shape."""
    return (HubPiece(source=source, copy=_in_one_run(shape)),)


@lru_cache(maxsize=4096)  # layers repeat their shapes
def _in_one_run(shape: Shape) -> StridedCopy:
    return whole_copy(shape).normalised()


def drop_aliases(
    tensors: Iterable[HubTensor], sources: Mapping[str, Shape], aliases: Mapping[str, str]
) -> HubMap:
    """The map without the hub tensors that only repeat others, since their sources are tied.

    `aliases` gives, for each runtime name that is tied to another, the name that is kept; `tensors`
    were made as if they were separate.
    """
    kept: dict[str, HubTensor] = {}
    repeated: list[HubTensor] = []
    for tensor in tensors:
        if any(piece.source in aliases for piece in tensor.pieces):
            repeated.append(_with_kept_sources(tensor, aliases))
        else:
            kept[tensor.name] = tensor
    known = {(t.shape, t.pieces): name for name, t in kept.items()} if repeated else {}
    ties: dict[str, str] = {}
    for tensor in repeated:
        name = known.setdefault((tensor.shape, tensor.pieces), tensor.name)
        if name == tensor.name:
            kept[name] = tensor
        else:
            ties[tensor.name] = name
    shapes = {name: shape for name, shape in sources.items() if name not in aliases}
    return HubMap(kept, shapes, ties, frozenset(aliases.values()))


def _with_kept_sources(tensor: HubTensor, aliases: Mapping[str, str]) -> HubTensor:
    pieces = tuple(
        HubPiece(source=aliases.get(piece.source, piece.source), copy=piece.copy)
        for piece in tensor.pieces
    )
    return HubTensor(name=tensor.name, shape=tensor.shape, pieces=pieces)


def _as_slice(source: str, copy: StridedCopy, numel: int) -> HubSlice:
    grid, box = [], []
    above, rest = numel, copy.to_offset
    for length, stride in zip(copy.shape, copy.to_strides, strict=True):
        start, rest = divmod(rest, stride)
        grid.append(above // stride)
        box.append((start, start + length))
        above = stride
    return HubSlice(
        grid=tuple(grid),
        box=tuple(box),
        source=source,
        offset=copy.from_offset,
        strides=copy.from_strides,
    )
