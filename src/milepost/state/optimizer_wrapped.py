"""Restore of quantised states: checked, filled part by part, quantised anew where they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from milepost.errors import FormatError, MismatchError
from milepost.geometry.blocks import Shape
from milepost.state.mismatch import first_few
from milepost.state.names import FQN
from milepost.state.optimizer import Member
from milepost.state.optimizer_parts import (
    PartsTarget,
    ReadWhole,
    expected_shapes,
    fits,
    requantised,
)
from milepost.state.optimizer_record import Form, OptimizerRecord, part_name, split_tensor_name
from milepost.state.policies import BlockPolicy
from milepost.state.tensors import local_of, torch_dtype
from milepost.state.wrappers import placed_like

Infos = Mapping[str, tuple[str, Shape]]


@dataclass(slots=True, kw_only=True)
class WrappedStates:
    """The quantised states that a restore fills, by tensor name; nothing is allocated yet.

    `anew` names those whose blocks this rank's cut divides, which are quantised anew.
    """

    key: str
    forms: dict[str, Form]
    params: dict[str, Tensor]
    tables: dict[str, dict[str, Shape]]
    anew: tuple[str, ...]
    _targets: dict[str, PartsTarget] = field(default_factory=dict)

    def targets(self, name: str, live: object) -> dict[str, Tensor]:
        """Shards to fill, by stored name; `live` is the present state."""
        param = self.params[name]
        if name in self.anew or local_of(param).numel() == 0:
            return {}
        target = PartsTarget(
            self.forms[name], param, name, live, self.tables[name], key=f"{self.key}: {name}"
        )
        self._targets[name] = target
        return target.targets

    def result(self, name: str, read: ReadWhole | None) -> Tensor:
        """The state that goes into the optimizer; `read` gives whole stored tensors."""
        param, key = self.params[name], f"{self.key}: {name}"
        if name in self._targets:
            return self._targets[name].result()
        if local_of(param).numel() == 0:  # there are no blocks of nothing
            empty = torch.empty_like(local_of(param.detach()), dtype=torch.float32)
            return placed_like(param, empty, tuple(param.shape))
        assert read is not None, f"{key}: quantising anew reads whole tensors"
        return requantised(self.forms[name], param, name, read, key=key)


def plan_wrapped(
    record: OptimizerRecord,
    infos: Infos,
    members: Mapping[FQN, Member],
    *,
    key: str,
    blocks: BlockPolicy,
) -> WrappedStates:
    """Check the stored parts of live parameters' quantised states.

    `MismatchError` where a live cut divides blocks, unless `blocks` says to quantise anew.
    """
    forms, params, tables, divided = {}, {}, {}, []
    for name, form in record.wrapped.items():
        fqn, _ = split_tensor_name(name)
        if fqn not in members:
            continue
        param = members[fqn].param
        forms[name], params[name] = form, param.detach()
        tables[name] = _checked_tables(form, name, tuple(param.shape), infos, key=key)
        if not fits(form, param):
            divided.append(name)
    if divided and blocks is BlockPolicy.ERROR:
        raise MismatchError(
            f"{key}: {len(divided)} quantised states have blocks that the live cut divides: "
            f"{first_few([_described(n, forms[n], params[n]) for n in divided])}; load on the "
            f"topology that saved them or on one that cuts between blocks, or with "
            f"blocks=BlockPolicy.REQUANTISE, which rounds them once more"
        )
    return WrappedStates(key=key, forms=forms, params=params, tables=tables, anew=tuple(divided))


def _described(name: str, form: Form, param: Tensor) -> str:
    runs = max(form.runs.values(), default=1)
    cut = f" of each shard of {list(form.cut)}" if form.cut else ""
    return (
        f"{name} (blocks of {runs} elements{cut}; shape {tuple(param.shape)}, here "
        f"{tuple(local_of(param).shape)})"
    )


def _checked_tables(
    form: Form, name: str, shape: Shape, infos: Infos, *, key: str
) -> dict[str, Shape]:
    """Shapes of the tables among the stored parts, all of which are checked."""
    tables: dict[str, Shape] = {}
    for part, expected in expected_shapes(form, shape, key=f"{key}: {name}").items():
        full = part_name(name, part)
        if full not in infos or part not in form.dtypes:
            raise FormatError(f"{key}: {name} is stored as {form.class_name}, but {full} is not")
        dtype, found = infos[full]
        if str(torch_dtype(dtype)) != f"torch.{form.dtypes[part]}":
            raise FormatError(f"{key}: {full} is {dtype}, recorded as {form.dtypes[part]}")
        if expected is None:
            tables[part] = tuple(found)
        elif tuple(found) != expected:
            raise MismatchError(
                f"{key}: {full} is stored with shape {tuple(found)}; for a parameter of shape "
                f"{shape} it is {expected}: build the model with the saved sizes, or start the "
                f"optimizer afresh"
            )
    return tables


def names_of_parts(record: OptimizerRecord) -> set[str]:
    """Names of all stored tensors that are parts of others."""
    return {part_name(name, part) for name, form in record.wrapped.items() for part in form.dtypes}
