"""Optimizer state that every rank keeps by itself, because no whole tensor can be made of it.

A plain state tensor beside a parameter that is cut belongs to this rank's part of it, unless all
ranks have the same; so does a state that some ranks keep quantised and others do not. Such a state
is stored with the part of the parameter that it belongs to, and comes back for that part only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from milepost.errors import FormatError, MismatchError
from milepost.state.mismatch import first_few
from milepost.state.names import FQN
from milepost.state.optimizer_merge import without_state
from milepost.state.optimizer_record import Form, OptimizerRecord, split_tensor_name
from milepost.state.placements import local_part
from milepost.state.policies import Missing
from milepost.state.tensors import is_dtensor, local_of
from milepost.state.wrappers import (
    attributes_of,
    class_of_wrapper,
    is_wrapper,
    placed_like,
    put_together,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStates:
    """What this rank has kept by itself, by tensor name; `lost` are those that some rank cannot
    take back, the same on all ranks."""

    entries: Mapping[str, Mapping[str, Any]]
    lost: tuple[str, ...] = ()

    def drop_lost(
        self, record: OptimizerRecord, *, key: str, missing: Missing
    ) -> tuple[OptimizerRecord, tuple[FQN, ...]]:
        """The record with parameters whose own state is lost as if they never had one, and these.

        `MismatchError` for any, unless `missing` says to keep what is live.
        """
        if self.lost and missing is Missing.ERROR:
            raise MismatchError(
                f"{key}: {len(self.lost)} states belong to the parts of parameters that the saving "
                f"ranks held, and no whole can be made of them: {first_few(self.lost)}; load on "
                f"the topology that saved them, or with missing=Missing.KEEP to start these "
                f"parameters' states afresh"
            )
        fresh = tuple(dict.fromkeys(split_tensor_name(name)[0] for name in self.lost))
        return (without_state(record, fresh) if fresh else record), fresh


NO_OWN_STATES = OwnStates(entries={})


def own_entry(tensor: Tensor, param: Tensor, *, key: str) -> dict[str, Any]:
    """A state tensor of this rank as a tree, with the part of `param` that it belongs to."""
    local = local_of(tensor)
    entry: dict[str, Any] = {"part": part_of(param), "placed": is_dtensor(tensor)}
    if not is_wrapper(tensor):
        return entry | {"tensor": local.detach()}
    known = class_of_wrapper(local, key=key)
    parts = {part: getattr(local, part).detach() for part in known.parts}
    form = Form(
        class_name=known.name,
        attributes=attributes_of(known, local, key=key),
        dtypes={part: str(t.dtype).removeprefix("torch.") for part, t in parts.items()},
        runs={},
    )
    return entry | {"form": form.to_tree(), "parts": parts, "shape": list(local.shape)}


def part_of(param: Tensor) -> dict[str, Any]:
    """Which part of which shape this rank holds of a parameter, as numbers."""
    held, _ = local_part(param)
    return {"of": list(param.shape), "spans": [[list(span) for span in dim] for dim in held]}


def belongs_to(entry: object, param: Tensor) -> bool:
    """Whether a stored entry is the state of the part of `param` that this rank holds now."""
    return isinstance(entry, Mapping) and entry.get("part") == part_of(param)


def own_state(entry: Mapping[str, Any], param: Tensor, *, key: str) -> Tensor:
    """The live tensor for a stored entry, on the device of `param`."""
    device = local_of(param).device
    if "tensor" in entry:
        local: Tensor = entry["tensor"].to(device)
    else:
        form = Form.from_tree(entry.get("form"), where=key)
        parts = entry.get("parts")
        if not isinstance(parts, Mapping) or set(parts) != set(form.dtypes):
            raise FormatError(f"{key}: expected the parts {sorted(form.dtypes)}, found {parts!r}")
        moved = {part: value.to(device) for part, value in parts.items()}
        shape = tuple(entry["shape"])
        local = put_together(form.class_name, form.attributes, moved, shape, key=key)
    return placed_like(param, local, tuple(param.shape)) if entry.get("placed") else local
