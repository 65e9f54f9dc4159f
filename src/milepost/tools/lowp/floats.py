"""A checkpoint whose quantised weights are read as the floats that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from milepost.engine.source import memory_of
from milepost.errors import InvalidInputError
from milepost.tools.carried import Carried, carried_files
from milepost.tools.lowp.bitsandbytes import bitsandbytes_tensors
from milepost.tools.lowp.coded import Coded, CodedTensors
from milepost.tools.lowp.schemes import KEY, Scheme, scheme_of, without_scheme
from milepost.tools.rewrite.dtypes import FLOATS, refuse_overflow, torch_type
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source, SourceTensor
from milepost.tools.rewrite.streams import MemoryStream, RowsStream, Stream, rows_at_a_time

_DOCUMENTS = (f"{KEY}.json", "hf_quant_config.json")
_LOW = ("F8_E4", "F8_E5", "F4", "F6")
_STATED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTensor(SourceTensor):
    """A quantised weight as fp32 values, made of a few rows of codes and scales at a time.

    Reading it raises `InvalidInputError` for values that are infinite or NaN.
    """

    coded: Coded

    @property
    def stored_dtype(self) -> str:
        dtype = self.coded.inputs["codes"].dtype
        return "U8" if dtype in FLOATS else dtype  # bytes of codes can be stored as floats

    @property
    def held_nbytes(self) -> int:
        inputs, rows = self.coded.inputs, self.coded.rows
        whole = sum(tensor.nbytes for key, tensor in inputs.items() if key not in rows)
        row, step = self._grid[1], self.coded.step
        run = min(self.nbytes, rows_at_a_time(max(1, row), step) * row)
        return whole + (self.coded.scratch // 4 + 2) * run

    @property
    def _grid(self) -> tuple[int, int]:
        """How many rows are decoded one after the other, and the bytes of one."""
        if self.coded.is_flat:
            return prod(self.shape), 4
        return (self.shape[0] if self.shape else 1), self.row_nbytes

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        first, last = rows or (0, self.shape[0] if self.shape else 1)
        made = torch.empty((last - first, *self.shape[1:]) if self.shape else ())
        self.stream(first * self.row_nbytes, last * self.row_nbytes).read_into(memory_of(made))
        return made

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        end = self.nbytes if last is None else last
        if not self.shape or not self.nbytes:
            inputs = {key: tensor.read() for key, tensor in self.coded.inputs.items()}
            return MemoryStream(self._finite(self.coded.decode(inputs)), first)
        (count, row), step = self._grid, self.coded.step
        decoder = _Decoder(self, first // (row * step) * step)
        return RowsStream(
            decoder.rows, start=first, end=end, count=count, row_nbytes=row, step=step
        )

    def _finite(self, values: Tensor) -> Tensor:
        if not values.numel():
            return values
        low, high = values.aminmax()
        if not bool(low.isfinite() & high.isfinite()):
            raise InvalidInputError(
                f"{self.source.path}: {self.name}: its codes or scales stand for infinite values "
                "or NaN; nothing was written; the checkpoint is damaged, or was quantised from "
                "weights that were"
            )
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedTensor(SourceTensor):
    """A quantised weight in the float type that it is kept in once it is dequantised."""

    wide: DecodedTensor

    @property
    def stored_dtype(self) -> str:
        return self.wide.stored_dtype

    @property
    def held_nbytes(self) -> int:
        run = min(self.nbytes, rows_at_a_time(max(1, self.row_nbytes)) * self.row_nbytes)
        return self.wide.held_nbytes + 4 * run

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        return self._rounded(self.wide.read(rows))

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        if not self.shape or not self.nbytes:
            return MemoryStream(self.read(), first)
        row, end = self.row_nbytes, self.nbytes if last is None else last
        wide = self.wide.stream(first // row * self.wide.row_nbytes)

        def rows(begin: int, stop: int) -> Tensor:
            """Rows where the last call ended."""
            values = torch.empty(stop - begin, *self.shape[1:])
            wide.read_into(memory_of(values))
            return self._rounded(values)

        return RowsStream(rows, start=first, end=end, count=self.shape[0], row_nbytes=row)

    def _rounded(self, values: Tensor) -> Tensor:
        made = values.to(torch_type(self.dtype))
        refuse_overflow(values, made, f"{self.source.path}: {self.name}")
        return made


class _Decoder:
    """Reads the inputs of a weight in order, from the row `begin` on."""

    def __init__(self, tensor: DecodedTensor, begin: int) -> None:
        self._tensor, self._coded = tensor, tensor.coded
        inputs, per = self._coded.inputs, self._coded.rows
        self._whole = {key: each.read() for key, each in inputs.items() if key not in per}
        self._streams = {
            key: inputs[key].stream(begin // n * inputs[key].row_nbytes) for key, n in per.items()
        }

    def rows(self, first: int, last: int) -> Tensor:
        """Rows `[first, last)`, where the last call ended."""
        given = dict(self._whole)
        for key, stream in self._streams.items():
            tensor, per = self._coded.inputs[key], self._coded.rows[key]
            stored = tensor.stored
            count = -(-last // per) - first // per
            given[key] = torch.empty((count, *stored.torch_shape()[1:]), dtype=stored.torch_dtype())
            stream.read_into(memory_of(given[key]))
        # A last byte of codes can be for one element more than there are.
        return self._tensor._finite(self._coded.decode(given)[: last - first])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPart(SourceTensor):
    """Rows of `bank[expert]`, from the row `begin` on, of which an expert is decoded whole."""

    bank: DecodedTensor
    expert: int
    begin: int

    @property
    def stored_dtype(self) -> str:
        return self.bank.stored_dtype

    @property
    def held_nbytes(self) -> int:
        return self.bank.held_nbytes + self.bank.row_nbytes

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        first, last = rows or (0, self.shape[0])
        expert = self.bank.read((self.expert, self.expert + 1))[0]
        return expert[self.begin + first : self.begin + last]

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        return MemoryStream(self.read(), first)


class FloatSource(Source):
    """`stored` with its quantised weights as floats, under the names that they have then.

    `decoded` are those names; it is empty for a checkpoint that is not quantised. `dropped` are
    tensors that only matter to a quantised model, with the reason.
    """

    def __init__(
        self, stored: Source, found: CodedTensors | None, *, is_rounded: bool = False
    ) -> None:
        self.stored = stored
        self.checkpoint, self.path, self.files = stored.checkpoint, stored.path, stored.files
        self.set, self.is_ep_sharded = stored.set, stored.is_ep_sharded
        self.dropped: dict[str, str] = {} if found is None else found.dropped
        self.method = None if found is None else found.scheme.method
        gone = set() if found is None else {*found.used, *found.dropped}
        tensors: dict[str, SourceTensor] = {}
        for tensor in stored.tensors.values():
            coded = None if found is None else found.weights.get(tensor.name)
            if coded is not None:
                wide = self._as_floats(coded)
                tensors[coded.name] = self._rounded(wide) if is_rounded else wide
            elif tensor.name not in gone:
                tensors[tensor.name] = replace(tensor, source=self)
        self.tensors = tensors
        self.decoded = frozenset(
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, DecodedTensor | RoundedTensor)
        )
        self._is_quantised = found is not None

    def _as_floats(self, coded: Coded) -> DecodedTensor:
        nbytes = 4 * prod(coded.shape)
        return DecodedTensor(
            name=coded.name, dtype="F32", shape=coded.shape, nbytes=nbytes, source=self, coded=coded
        )

    def _rounded(self, wide: DecodedTensor) -> RoundedTensor | DecodedTensor:
        dtype = wide.coded.dtype or self._stated_dtype
        if dtype == wide.dtype:
            return wide
        nbytes = wide.nbytes // 2
        return RoundedTensor(
            name=wide.name, dtype=dtype, shape=wide.shape, nbytes=nbytes, source=self, wide=wide
        )

    @property
    def _stated_dtype(self) -> str:
        """The float type of the model, as config.json has it; bf16 where it has none."""
        places = (self.stored.text_config, self.stored.config)
        stated = [str(place.get(key)) for place in places for key in ("dtype", "torch_dtype")]
        return next((_STATED[d] for d in stated if d in _STATED), "BF16")

    @cached_property
    def config(self) -> dict[str, Any]:
        """That of the checkpoint without what says that weights are quantised."""
        document = deepcopy(self.stored.config)
        self.edit_config(document)
        return document

    def edit_config(self, document: dict[str, Any]) -> list[str]:
        """Take what says that weights are quantised out of the content of config.json."""
        return without_scheme(document) if self._is_quantised else []

    def carried(self) -> Carried:
        """Files beside the weights but those that say how they were quantised."""
        carried = carried_files(self.checkpoint)
        for name in _DOCUMENTS if self._is_quantised else ():
            carried.paths.pop(name, None)
        return carried

    def identity(self) -> dict[str, Any]:
        return self.stored.identity()


def as_floats(stored: Source, problems: Problems, *, is_rounded: bool = False) -> FloatSource:
    """A source whose quantised weights are read as fp32: codes times scales, not rounded. With
    `is_rounded`, as the type that they were quantised from, where their format or else config.json
    says it; else as bf16.

    Problems, all of them: methods whose codes are no floats, a weight without its scale, a scale
    without its weight, scales of another shape than they must have, float8 of the fnuz kind. A
    checkpoint that is not quantised is as it was.
    """
    method = stored.config.get(KEY)
    if isinstance(method, Mapping) and method.get("quant_method") == "gguf":
        return FloatSource(stored, None)  # read from GGUF, and dequantised by that
    scheme = problems.attempt(lambda: scheme_of(stored))
    if scheme is None:
        return FloatSource(stored, None)
    own = Problems()
    found = bitsandbytes_tensors(stored, scheme, own)
    if found is None:
        found = CodedTensors(stored.tensors, scheme, own)
    if not _is_quantised(stored, scheme, found):
        return FloatSource(stored, None)
    for problem in own:
        problems.add(problem)
    _refuse_names_twice(stored, found, problems)
    return FloatSource(stored, found, is_rounded=is_rounded)


def _is_quantised(stored: Source, scheme: Scheme, found: CodedTensors) -> bool:
    has_codes = any(tensor.dtype.startswith(_LOW) for tensor in stored.tensors.values())
    return bool(scheme.document or found.weights or has_codes)


def _refuse_names_twice(stored: Source, found: CodedTensors, problems: Problems) -> None:
    for first, coded in found.weights.items():
        if coded.name != first and coded.name in stored.tensors:
            problems.refuse(f"{coded.name}: is there as floats and as {first}; only one can be it")
