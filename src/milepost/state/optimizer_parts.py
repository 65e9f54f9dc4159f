"""Quantised optimizer state as parts: taken apart, cut, put together, quantised anew.

A part with an entry for every run of elements is stored as an array over the whole tensor where the
runs of all shards are runs of the whole. Where they are not (rows cut in the middle of a block),
every shard's runs are stored by themselves, padded to equal length, and the form says how the
tensor was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from milepost.errors import FormatError, MismatchError, UnencodableError
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import (
    IndexSet,
    Placement,
    Shard,
    boxes_of,
    index_set,
    local_shape,
    numel,
    whole,
)
from milepost.geometry.runs import runs_held, runs_shape
from milepost.plan.holding import Holding
from milepost.state.declared import declaration
from milepost.state.optimizer_record import Cut, Form, part_name
from milepost.state.placements import class_of, own_rank
from milepost.state.tensors import is_dtensor, local_of, torch_dtype
from milepost.state.wrappers import (
    PartRole,
    TensorClass,
    attributes_of,
    class_by_name,
    class_of_wrapper,
    placed,
    placed_like,
    put_together,
)

ReadWhole = Callable[[str], Tensor]


def take_apart(tensor: Tensor, name: str, *, key: str) -> tuple[Form, dict[str, Tensor]]:
    """The form of a quantised state and its parts as they are stored, by name; not copied.

    `tensor` is a subclass, or a DTensor around one, that is not empty on this rank.
    """
    local = local_of(tensor)
    known = class_of_wrapper(local, key=key)
    attributes = attributes_of(known, local, key=key)
    parts = {part: getattr(local, part).detach() for part in known.parts}
    runs = {}
    for part, role in known.parts.items():
        if role is PartRole.RUNS:
            count = parts[part].numel()
            if count == 0 or local.numel() % count or parts[part].ndim != 1:
                raise UnencodableError(
                    f"{key}: {part} of {known.name} has shape {tuple(parts[part].shape)}, which "
                    f"are no runs of equal length of the {local.numel()} elements here",
                    key=key,
                )
            runs[part] = local.numel() // count
    cut = _cut(tensor, key=key)
    form = Form(
        class_name=known.name,
        attributes=attributes,
        dtypes={part: str(t.dtype).removeprefix("torch.") for part, t in parts.items()},
        runs=runs,
        cut=() if runs_are_global(tuple(tensor.shape), tuple(runs.values()), cut) else cut,
        shape=_hidden_shape(known, tuple(tensor.shape), runs),
    )
    return form, stored_parts(form, tensor, name, parts, key=key)


def _hidden_shape(known: TensorClass, shape: Shape, runs: Mapping[str, int]) -> Shape:
    """The shape of a tensor whose parts are all flat; nothing where a part shows it."""
    is_shown = PartRole.ELEMENTS in known.parts.values() or any(
        len(runs_shape(shape, run)) == len(shape) for run in runs.values()
    )
    return () if is_shown else shape


def is_cut(param: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter, by its DTensor or its declaration."""
    declared = declaration(param)
    return bool(_cut(param, key="a parameter") if declared is None else declared.placement.cut)


def _cut(tensor: Tensor, *, key: str) -> Cut:
    if not is_dtensor(tensor):
        return ()
    signature = class_of(tensor, key=key).cut
    return tuple((n, p.dim, p.split_factor) for _, n, p in signature if isinstance(p, Shard))


def _held(like: Tensor, shape: Shape) -> IndexSet:
    """What this rank has of a tensor of `shape` that is placed as `like` is."""
    if not is_dtensor(like):
        return whole(shape)
    placement_class = class_of(like, key="a state tensor")
    coordinate = placement_class.shard_coordinate(own_rank())
    return Holding((placement_class,)).held(shape, coordinate)


def _placements(cut: Cut) -> tuple[Placement, ...]:
    return tuple(Shard(dim, factor) for _, dim, factor in cut)


@lru_cache(maxsize=4096)
def runs_are_global(shape: Shape, runs: tuple[int, ...], cut: Cut) -> bool:
    """Whether the runs of every shard are runs of the whole tensor, cut in the same way."""
    grid, placements = tuple(length for length, _, _ in cut), _placements(cut)
    for coordinate in product(*map(range, grid)):
        held = index_set(shape, grid, coordinate, placements)
        for run in set(runs):
            found = runs_held(shape, run, held)
            array = runs_shape(shape, run)
            if found is None or any(dim >= len(array) for _, dim, _ in cut):
                return False
            if numel(held) and found != index_set(array, grid, coordinate, placements):
                return False
    return True


def fits(form: Form, param: Tensor) -> bool:
    """Whether this rank's shard consists of runs as they are stored; always when it is empty."""
    cut = _cut(param, key="a parameter")
    if form.cut:
        return form.cut == cut
    return runs_are_global(tuple(param.shape), tuple(form.runs.values()), cut)


def stored_parts(
    form: Form, like: Tensor, name: str, parts: Mapping[str, Tensor], *, key: str
) -> dict[str, Tensor]:
    """The parts of this rank as shards of what is stored, by name.

    `like` has the shape, mesh and placements. A part that is missing is left out.
    """
    known, _ = class_by_name(form.class_name, key=key)
    shape = tuple(like.shape)
    found: dict[str, Tensor] = {}
    for part, value in parts.items():
        role = known.parts[part]
        if role is PartRole.TABLE:
            stored = value
        elif role is PartRole.ELEMENTS:
            stored = placed_like(like, value, shape)
        elif form.cut:
            stored = _padded(form, like, value, form.runs[part])
        else:
            array = runs_shape(shape, form.runs[part])
            stored = placed_like(like, value.view(local_shape(_held(like, array))), array)
        found[part_name(name, part)] = stored
    return found


def shard_slots(form: Form, shape: Shape, run: int) -> int:
    """Entries that a shard has in a part that is stored by shard: those of the largest, the first
    one."""
    grid = tuple(length for length, _, _ in form.cut)
    first = index_set(shape, grid, tuple(0 for _ in grid), _placements(form.cut))
    return -(-numel(first) // run)


def _padded(form: Form, like: Any, value: Tensor, run: int) -> Tensor:
    """The runs of one shard in a row of their own: global shape `[*grid, slots]`."""
    slots = shard_slots(form, tuple(like.shape), run)
    if value.numel() < slots:
        value = torch.cat([value, value.new_zeros(slots - value.numel())])
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    grid = tuple(length for length, _, _ in form.cut)
    placements, axis = [], 0
    for placement in like.placements:
        cuts = not placement.is_replicate()
        placements.append(TorchShard(axis) if cuts else TorchReplicate())
        axis += cuts
    row = value.view(*(1 for _ in grid), slots)
    return placed(like, row, (*grid, slots), placements)


def empty_parts(form: Form, like: Tensor, name: str, *, key: str) -> dict[str, Tensor]:
    """What a rank with an empty shard holds of every part but the tables."""
    known, _ = class_by_name(form.class_name, key=key)
    parts = {
        part: _empty(form, part, tuple(local_of(like).shape) if elements else (0,), like)
        for part, role in known.parts.items()
        if role is not PartRole.TABLE
        for elements in (role is PartRole.ELEMENTS,)
    }
    return stored_parts(form, like, name, parts, key=key)


def _empty(form: Form, part: str, shape: Shape, like: Tensor) -> Tensor:
    dtype = torch_dtype(form.dtypes[part])
    if dtype is None:
        raise FormatError(f"the part {part} is stored as {form.dtypes[part]}, which torch has not")
    return torch.empty(shape, dtype=dtype, device=local_of(like).device)


def expected_shapes(form: Form, shape: Shape, *, key: str) -> dict[str, Shape | None]:
    """Stored shape of every part of a tensor of global `shape`; None for tables, which have any."""
    known, _ = class_by_name(form.class_name, key=key)
    grid = tuple(length for length, _, _ in form.cut)
    found: dict[str, Shape | None] = {}
    for part, role in known.parts.items():
        if role is PartRole.TABLE:
            found[part] = None
        elif role is PartRole.ELEMENTS:
            found[part] = shape
        elif form.cut:
            found[part] = (*grid, shard_slots(form, shape, form.runs[part]))
        else:
            found[part] = runs_shape(shape, form.runs[part])
    return found


class PartsTarget:
    """A quantised state that a load fills part by part."""

    def __init__(
        self,
        form: Form,
        param: Tensor,
        name: str,
        live: object,
        tables: Mapping[str, Shape],
        *,
        key: str,
    ) -> None:
        self._form, self._param, self._key = form, param, key
        self._live = live if isinstance(live, Tensor) else None
        known, tensor_class = class_by_name(form.class_name, key=key)
        self._shape = tuple(local_of(param).shape)
        shapes = {
            part: self._shape
            if role is PartRole.ELEMENTS
            else tables[part]
            if role is PartRole.TABLE
            else (prod(self._shape) // form.runs[part],)
            for part, role in known.parts.items()
        }
        self._parts = self._live_parts(tensor_class, shapes)
        self._is_live = self._parts is not None
        if self._parts is None:
            self._parts = {part: _empty(form, part, s, param) for part, s in shapes.items()}
        self.targets = stored_parts(form, param, name, self._parts, key=key)
        self._name = name

    def _live_parts(
        self, tensor_class: type, shapes: Mapping[str, Shape]
    ) -> dict[str, Tensor] | None:
        """The inner tensors of the live state, where they can take what is stored."""
        if self._live is None or is_dtensor(self._param) != is_dtensor(self._live):
            return None
        local = local_of(self._live)
        if type(local) is not tensor_class:
            return None
        known = class_of_wrapper(local, key=self._key)
        if attributes_of(known, local, key=self._key) != self._form.attributes:
            return None
        parts = {part: getattr(local, part).detach() for part in shapes}
        same = all(
            tuple(parts[part].shape) == shape
            and str(parts[part].dtype) == f"torch.{self._form.dtypes[part]}"
            and parts[part].device == local_of(self._param).device
            for part, shape in shapes.items()
        )
        return parts if same else None

    def result(self) -> Tensor:
        """The filled state: the live object itself where its own parts were filled."""
        assert self._parts is not None
        for part, value in self._parts.items():
            target = local_of(self.targets[part_name(self._name, part)])
            if target.data_ptr() != value.data_ptr():  # a padded row
                value.copy_(target.flatten()[: value.numel()])
        if self._is_live and self._live is not None:
            return self._live
        local = put_together(
            self._form.class_name, self._form.attributes, self._parts, self._shape, key=self._key
        )
        return placed_like(self._param, local, tuple(self._param.shape))


def requantised(form: Form, param: Tensor, name: str, read: ReadWhole, *, key: str) -> Tensor:
    """A stored state with this rank's own blocks: dequantised whole, cut, quantised anew.

    Plain float32 where the elements of this rank make up no whole blocks. `read` gives a stored
    tensor; one state is in memory at a time, whole.
    """
    known, _ = class_by_name(form.class_name, key=key)
    stored = {part: read(part_name(name, part)).to(local_of(param).device) for part in known.parts}
    values = dequantised(form, tuple(param.shape), stored, key=key)
    held = _held(param, tuple(param.shape))
    local = _gather(values, held)
    shape = local_shape(held)
    if local.numel() == 0 or any(local.numel() % run for run in form.runs.values()):
        return placed_like(param, local, tuple(param.shape))
    parts = {
        part: stored[part]
        if role is PartRole.TABLE
        else _empty(
            form,
            part,
            shape if role is PartRole.ELEMENTS else (local.numel() // form.runs[part],),
            param,
        )
        for part, role in known.parts.items()
    }
    found = put_together(form.class_name, form.attributes, parts, shape, key=key)
    with torch.no_grad():
        found.copy_(local)
    return placed_like(param, found, tuple(param.shape))


def whole_state(form: Form, stored: Mapping[str, Tensor], *, key: str) -> Tensor:
    """A stored state as one process has it; `MismatchError` when its blocks are those of shards."""
    known, _ = class_by_name(form.class_name, key=key)
    if form.cut:
        raise MismatchError(
            f"{key}: its blocks are those of shards ({list(form.cut)}), not of the whole tensor; "
            f"load it into the live optimizer with blocks=BlockPolicy.REQUANTISE"
        )
    elements = [part for part, role in known.parts.items() if role is PartRole.ELEMENTS]
    if elements:
        shape = tuple(stored[elements[0]].shape)
    else:
        arrays = [(tuple(stored[part].shape), run) for part, run in form.runs.items()]
        array, run = max(arrays, key=lambda item: len(item[0]))
        shape = form.shape or (*array[:-1], array[-1] * run)
    parts = {
        part: stored[part].flatten() if role is PartRole.RUNS else stored[part]
        for part, role in known.parts.items()
    }
    return put_together(form.class_name, form.attributes, parts, shape, key=key)


def dequantised(form: Form, shape: Shape, stored: Mapping[str, Tensor], *, key: str) -> Tensor:
    """The float32 values of a whole stored state."""
    known, _ = class_by_name(form.class_name, key=key)
    first = next(iter(stored.values()))
    values = torch.empty(shape, dtype=torch.float32, device=first.device)
    for coordinate, held in _shards(form, shape):
        count = numel(held)
        if count == 0:
            continue
        parts = {
            part: stored[part]
            if role is PartRole.TABLE
            else _gather(stored[part], held)
            if role is PartRole.ELEMENTS
            else stored[part][coordinate].flatten()[: count // form.runs[part]]
            for part, role in known.parts.items()
        }
        local: Any = put_together(
            form.class_name, form.attributes, parts, local_shape(held), key=key
        )
        floats = local.dequantize().float()
        for box, inner in boxes_of(held):
            values[_slices(box)] = floats[_slices(inner)]
    return values


def _shards(form: Form, shape: Shape) -> Iterator[tuple[tuple[int, ...], IndexSet]]:
    """The shards whose runs are stored by themselves; one, the whole, where they are not."""
    grid = tuple(length for length, _, _ in form.cut)
    for coordinate in product(*map(range, grid)):
        yield coordinate, index_set(shape, grid, coordinate, _placements(form.cut))


def _gather(values: Tensor, held: IndexSet) -> Tensor:
    """The elements of an index set, in local order; a copy."""
    found = torch.empty(local_shape(held), dtype=values.dtype, device=values.device)
    for box, inner in boxes_of(held):
        found[_slices(inner)] = values[_slices(box)]
    return found


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)
