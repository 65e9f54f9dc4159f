"""What a rewrite consists of: groups of tensors that are made together, known from headers alone.

A group is `Copied`, one output tensor whose bytes are byte ranges of inputs (a tensor that passes
through, a slice along dim 0, several joined along dim 0); `Computed`, output tensors that a
function makes of input tensors; or `Streamed`, one output tensor that a function makes in order, of
inputs that it reads itself, as often as it wants. Copies take no memory to speak of; what is
computed takes that of its inputs and outputs, or of one band of rows at a time where the function
goes row by row; what is streamed takes what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TypeAlias

from torch import Tensor

from milepost.format.dtypes import DTYPES
from milepost.format.header import tensor_nbytes
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import SourceTensor

BAND_NBYTES = 2 * 2**20

Make: TypeAlias = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""From input tensors by the group's keys to output tensors by name; both on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An output tensor: its name, safetensors dtype and header shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape as torch counts it (two F4 are one element)."""
        pack = DTYPES[self.dtype].elements_per_torch
        return (*self.shape[:-1], self.shape[-1] // pack) if pack > 1 else self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """The bytes `[start, end)` of an input tensor."""

    tensor: SourceTensor
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """One output tensor, byte for byte the `ranges` of inputs, one after the other."""

    output: TensorSpec
    ranges: tuple[ByteRange, ...]

    def __post_init__(self) -> None:
        found = sum(part.nbytes for part in self.ranges)
        assert found == self.output.nbytes, f"{self.output.name}: {found} bytes were given"

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (self.output,)

    @property
    def sources(self) -> Iterator[SourceTensor]:
        return (part.tensor for part in self.ranges)

    @property
    def is_unchanged(self) -> bool:
        """Whether it is an input tensor as it was: name, dtype, shape and bytes."""
        if len(self.ranges) != 1:
            return False
        tensor = self.ranges[0].tensor
        same = (tensor.name, tensor.stored_dtype, tensor.shape)
        out = self.output
        return same == (out.name, out.dtype, out.shape) and self.ranges[0].nbytes == tensor.nbytes

    @property
    def memory_nbytes(self) -> int:
        """What it holds at a time: the most that a stream of its inputs does."""
        return max((part.tensor.held_nbytes for part in self.ranges), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Output tensors that `make` makes of the `inputs`, which it gets under their keys.

    `banded` are keys of inputs that are read a band of rows (dim 0) at a time: `make` is then
    called once for each band, and its outputs are the same rows of all `outputs`. The other inputs
    are read once and given whole to each call. Of outputs in `rows_for`, one row is made of so many
    rows of a band (the last one of fewer): bands are multiples of all of them. `scratch_nbytes` is
    what `make` needs besides its inputs and outputs (in a band, besides those of the band).

    `make` runs in any thread, under `torch.no_grad()`. It may return its inputs, views of them,
    and tensors of any strides; they must have the dtypes and shapes that were declared.
    """

    inputs: Mapping[str, SourceTensor]
    outputs: tuple[TensorSpec, ...]
    make: Make
    banded: tuple[str, ...] = ()
    rows_for: Mapping[str, int] = field(default_factory=dict)
    scratch_nbytes: int = 0
    rows_per_band: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.banded:
            return
        lengths = {self.inputs[key].shape[:1] for key in self.banded}
        assert len(lengths) == 1 and () not in lengths, "bands run along one dim 0"
        length = self._length
        for spec in self.outputs:
            assert spec.shape and spec.shape[0] == self.made_of(spec, length), "rows of a band"
        step = lcm(*self.rows_for.values())
        group = step * max(1, self._banded_nbytes // max(1, length))
        band = step * max(1, BAND_NBYTES // group)
        object.__setattr__(self, "rows_per_band", min(band, max(1, length)))

    @property
    def _length(self) -> int:
        """Rows that go through in bands."""
        return self.inputs[self.banded[0]].shape[0]

    def made_of(self, spec: TensorSpec, rows: int) -> int:
        """How many rows of an output are made of so many rows of a band."""
        return -(-rows // self.rows_for.get(spec.name, 1))

    @property
    def _banded_nbytes(self) -> int:
        """All bytes that go through in bands."""
        read = sum(self.inputs[key].nbytes for key in self.banded)
        return read + sum(spec.nbytes for spec in self.outputs)

    @property
    def sources(self) -> Iterable[SourceTensor]:
        return self.inputs.values()

    def bands(self) -> list[tuple[int, int]]:
        """The rows of each call, in order."""
        length, step = self._length, self.rows_per_band
        return [(first, min(first + step, length)) for first in range(0, length, step)]

    @property
    def memory_nbytes(self) -> int:
        """What it holds at a time."""
        read = sum(tensor.nbytes for tensor in self.inputs.values())
        held = sum(tensor.held_nbytes for tensor in self.inputs.values()) + self.scratch_nbytes
        if not self.banded:
            return read + sum(spec.nbytes for spec in self.outputs) + held
        whole = read - sum(self.inputs[key].nbytes for key in self.banded)
        band = -(-self._banded_nbytes * self.rows_per_band // max(1, self._length))
        return whole + band + held


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One output tensor that `make` makes in order, of `inputs` that it reads itself.

    `make()` gives contiguous pieces, flat, in the output's dtype, that are all of it one after the
    other. Each is written before the next is asked for, so they may lie in the same memory. It runs
    in any thread, under `torch.no_grad()`, and holds `memory_nbytes` at a time.
    """

    inputs: tuple[SourceTensor, ...]
    output: TensorSpec
    make: Callable[[], Iterator[Tensor]]
    memory_nbytes: int

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (self.output,)

    @property
    def sources(self) -> tuple[SourceTensor, ...]:
        return self.inputs


Group: TypeAlias = Copied | Computed | Streamed


def passed(tensor: SourceTensor, *, name: str | None = None) -> Copied:
    """The tensor as it is, under its own name or another."""
    spec = TensorSpec(name=name or tensor.name, dtype=tensor.dtype, shape=tensor.shape)
    return Copied(output=spec, ranges=(whole_range(tensor),))


def whole_range(tensor: SourceTensor) -> ByteRange:
    """All bytes of a tensor."""
    return ByteRange(tensor=tensor, start=0, end=tensor.nbytes)


def block_of(tensor: SourceTensor, name: str, *indices: int, rows: tuple[int, int]) -> Copied:
    """`tensor[i, j, ..., a:b]` for leading `indices` and `rows` (a, b): bytes that lie together.

    The dims of `indices` are gone in the output: `block_of(fused, name, 3, rows=(0, 8))` of shape
    [E, R, H] is `fused[3, 0:8]`, of shape [8, H].
    """
    start, left = 0, tensor.nbytes
    for dim, index in enumerate(indices):
        left //= tensor.shape[dim]
        start += left * index
    dims = tensor.shape[len(indices) :]
    row = left // dims[0] if dims[0] else 0
    spec = TensorSpec(name=name, dtype=tensor.dtype, shape=(rows[1] - rows[0], *dims[1:]))
    part = ByteRange(tensor=tensor, start=start + rows[0] * row, end=start + rows[1] * row)
    return Copied(output=spec, ranges=(part,))


def joined(name: str, shape: tuple[int, ...], tensors: Iterable[SourceTensor]) -> Copied:
    """The bytes of the tensors one after the other, as one tensor of this shape.

    Joins along dim 0, and stacks. The tensors must have one dtype.
    """
    parts = tuple(whole_range(tensor) for tensor in tensors)
    (dtype,) = {part.tensor.dtype for part in parts}
    return Copied(output=TensorSpec(name=name, dtype=dtype, shape=shape), ranges=parts)


def in_parts(tensor: SourceTensor, names: Sequence[str], problems: Problems) -> Iterator[Copied]:
    """The tensor under one name, or its equal parts along dim 0 under several."""
    if len(names) == 1:
        yield passed(tensor, name=names[0])
    elif not tensor.shape or tensor.shape[0] % len(names):
        problems.refuse(
            f"{tensor.name}: shape {tensor.shape}, expected {len(names)} equal parts on dim 0"
        )
    else:
        rows = tensor.shape[0] // len(names)
        for number, name in enumerate(names):
            yield rows_of(passed(tensor), name, (number * rows, (number + 1) * rows))


def rows_of(copied: Copied, name: str, rows: tuple[int, int]) -> Copied:
    """Rows `[a, b)` of what is copied, along its dim 0."""
    whole = copied.output
    row = whole.nbytes // whole.shape[0]
    first, last = (row * number for number in rows)
    parts, passed_by = [], 0
    for part in copied.ranges:
        start, end = max(first - passed_by, 0), min(last - passed_by, part.nbytes)
        if start < end:
            parts.append(
                ByteRange(tensor=part.tensor, start=part.start + start, end=part.start + end)
            )
        passed_by += part.nbytes
    spec = TensorSpec(name=name, dtype=whole.dtype, shape=(rows[1] - rows[0], *whole.shape[1:]))
    return Copied(output=spec, ranges=tuple(parts))


def by_rows(
    tensor: SourceTensor, make: Callable[[Tensor], Tensor], *, dtype: str, name: str | None = None
) -> Computed:
    """A tensor of the same shape, made of this one row by row: a cast, a scaling."""
    spec = TensorSpec(name=name or tensor.name, dtype=dtype, shape=tensor.shape)
    banded = (tensor.name,) if tensor.shape and tensor.nbytes else ()
    return Computed(
        inputs={tensor.name: tensor},
        outputs=(spec,),
        make=lambda tensors: {spec.name: make(tensors[tensor.name])},
        banded=banded,
    )
