"""A tensor whose values are computed when they are read: a weight with an adapter folded in.

It has the shape, dtype and strides of the weight, and views of it are as cheap as views of memory.
Whatever copies elements out of it gets them from blocks of rows that are folded on the way; a few
of these are kept. So a merged weight is written, sent or hashed without ever being in memory whole.
Blocks do not depend on which part is read, so neither do the values.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.adapters.arithmetic import LowRank, fold
from milepost.state.tensors import flat_bytes

_BLOCK_ELEMENTS = 2**20
_KEPT_BLOCKS = 4


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A weight, and what is folded into it: factors, and rows that replace its own.

    All are of the part that this rank holds. `squares` are the norms that a magnitude needs, for
    the indices of that part. `rows` gives by index rows of the result.
    """

    weight: Tensor
    low_rank: LowRank | None = None
    squares: Tensor | None = None
    rows: Mapping[int, Tensor] = field(default_factory=dict)

    def block(self, expert: int | None, first: int, last: int) -> Tensor:
        """Rows `[first, last)`, of one expert where there are several; contiguous, on the CPU."""
        spans = (slice(first, last), slice(None))
        weight = self.weight[spans] if expert is None else self.weight[expert, first:last]
        value = weight if self.low_rank is None else self._folded(weight, expert, spans)
        changed = {row: new for row, new in self.rows.items() if first <= row < last}
        if changed:
            value = value.clone()
            for row, new in changed.items():
                value[row - first] = new.to(value.dtype)
        return value.cpu().contiguous()

    def _folded(self, weight: Tensor, expert: int | None, spans: tuple[slice, slice]) -> Tensor:
        low_rank = self.low_rank
        assert low_rank is not None, "there are factors to fold"
        if expert is not None:
            low_rank = LowRank(
                left=low_rank.left[expert], right=low_rank.right[expert], scale=low_rank.scale
            )
        squares = self.squares
        if squares is not None and low_rank.magnitude_dim == 0:
            squares = squares[spans[0]]
        return fold(weight, low_rank.box(spans), squares)


class _Span(NamedTuple):
    """A block and the bytes of the whole tensor that it has."""

    expert: int | None
    first: int
    last: int
    start: int
    end: int


class _Blocks:
    """The blocks of one merged weight."""

    def __init__(self, folded: Folded) -> None:
        self._folded = folded
        weight = folded.weight
        shape = tuple(weight.shape)
        self._experts = shape[0] if len(shape) == 3 else None
        self._rows, self._row_nbytes = shape[-2], shape[-1] * weight.element_size()
        self._block_rows = max(1, _BLOCK_ELEMENTS // max(1, shape[-1]))
        self._kept: OrderedDict[_Span, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def parts(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Bytes `[start, end)` of the row-major whole, as runs: where one begins, and its bytes."""
        for span in self._spans(start, end):
            low, high = max(start, span.start), min(end, span.end)
            yield low, self._bytes(span)[low - span.start : high - span.start]

    def _spans(self, start: int, end: int) -> Iterator[_Span]:
        matrix = self._rows * self._row_nbytes
        block = self._block_rows * self._row_nbytes
        position = start
        while position < end:
            number, within = divmod(position, matrix)
            first = within // block * self._block_rows
            last = min(first + self._block_rows, self._rows)
            base = number * matrix
            span = _Span(
                None if self._experts is None else number,
                first,
                last,
                base + first * self._row_nbytes,
                base + last * self._row_nbytes,
            )
            yield span
            position = span.end

    def _bytes(self, span: _Span) -> Tensor:
        with self._lock:
            known = self._kept.get(span)
        if known is None:
            with torch.no_grad():
                block = self._folded.block(span.expert, span.first, span.last)
            known = flat_bytes(block)
            with self._lock:
                self._kept[span] = known
                while len(self._kept) > _KEPT_BLOCKS:
                    self._kept.popitem(last=False)
        return known


class MergedTensor(torch.Tensor):
    """See the module. `place` is a meta tensor that lies in the whole as this view does.

    It says that it is on the meta device, so that nobody looks for its values in memory.
    """

    _place: Tensor
    _blocks: _Blocks

    @staticmethod
    def __new__(cls, place: Tensor, blocks: _Blocks) -> MergedTensor:
        made: MergedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=place.dtype,
            device=torch.device("meta"),
        )
        made._place, made._blocks = place, blocks
        return made

    def __init__(self, place: Tensor, blocks: _Blocks) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"MergedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        first = args[0]
        if name in _VIEWS:
            return MergedTensor(func(first._place, *args[1:], **kwargs), first._blocks)
        if name == "aten::copy_" and not isinstance(first, MergedTensor):
            _copy_into(first, args[1])
            return first
        if name in _COPIES:
            values = torch.empty(first.shape, dtype=first.dtype)
            _copy_into(values, first)
            dtype = kwargs.get("dtype")
            return values if dtype is None else values.to(dtype)
        raise NotImplementedError(f"{name}: a merged weight can only be viewed and copied")


_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "alias",
        "as_strided",
        "detach",
        "expand",
        "permute",
        "select",
        "slice",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "_unsafe_view",
    )
)
_COPIES = frozenset(("aten::clone", "aten::_to_copy"))


def merged(folded: Folded) -> Tensor:
    """The merged weight, contiguous, `[rows, columns]` or `[experts, rows, columns]`."""
    weight = folded.weight
    place = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return MergedTensor(place, _Blocks(folded))


def is_merged(tensor: Tensor) -> bool:
    """Whether `tensor` is computed when it is read."""
    return isinstance(tensor, MergedTensor)


def _copy_into(target: Tensor, source: MergedTensor) -> None:
    """Compute the elements of `source` and copy them to `target`, which has its shape."""
    if not target.numel():
        return
    place, blocks = source._place, source._blocks
    itemsize = place.element_size()
    start = int(place.storage_offset()) * itemsize
    steps = [(n - 1) * s for n, s in zip(place.shape, place.stride(), strict=True)]
    end = start + (sum(steps) + 1) * itemsize
    is_run = place.is_contiguous() and end - start == prod(place.shape) * itemsize
    with torch.no_grad():
        if is_run and target.is_contiguous() and target.dtype is place.dtype:
            _fill(flat_bytes(target), blocks.parts(start, end), start)
            return
        memory = torch.empty(end - start, dtype=torch.uint8)
        _fill(memory, blocks.parts(start, end), start)
        copy = memory.view(place.dtype).as_strided(place.shape, place.stride(), 0)
        target.copy_(copy)


def _fill(memory: Tensor, parts: Iterator[tuple[int, Tensor]], base: int) -> None:
    for start, data in parts:
        memory[start - base : start - base + data.numel()].copy_(data)
