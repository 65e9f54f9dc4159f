"""Which saved parameter group a live one continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from milepost.errors import MismatchError
from milepost.state.mismatch import first_few
from milepost.state.names import FQN
from milepost.state.optimizer import Member, class_name, group_name
from milepost.state.optimizer_record import Group, OptimizerRecord
from milepost.state.policies import ClassPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMatch:
    """`source` is the saved group of each live group, by index; `new` labels those without."""

    source: dict[int, Group]
    saved_of: dict[FQN, Group]
    new: tuple[str, ...]

    def saved_hyper(self, fqn: FQN) -> Mapping[str, Any]:
        """Hyper-parameters of the group that `fqn` was saved in."""
        group = self.saved_of.get(fqn)
        return {} if group is None else group.hyper


def check_class(
    optimizer: Optimizer, record: OptimizerRecord, *, key: str, classes: ClassPolicy
) -> None:
    """Refuse state of another optimizer class, unless `classes` allows it."""
    live = class_name(optimizer)
    if classes is ClassPolicy.ERROR and record.class_name not in (None, live):
        raise MismatchError(
            f"{key}: the live optimizer is {live}, the checkpoint holds state of "
            f"{record.class_name}; make the same optimizer, or load with "
            f"optimizer_class=ClassPolicy.ALLOW if their states mean the same"
        )


def match_groups(
    optimizer: Optimizer, members: Mapping[FQN, Member], record: OptimizerRecord, *, key: str
) -> GroupMatch:
    """The saved group of each live group: by `name` where both sides have names, else by members.

    A live group whose parameters come from saved groups with different hyper-parameters is
    refused, listing them: it cannot have both.
    """
    named = _by_name(record)
    saved_of = {fqn: group for group in record.groups for fqn in group.params}
    params: list[list[FQN]] = [[] for _ in optimizer.param_groups]
    for fqn, member in members.items():
        params[member.group].append(fqn)
    source: dict[int, Group] = {}
    new: list[str] = []
    conflicts: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        name = group_name(group)
        label = f"group {index}" if name is None else f"group {name!r}"
        if named and name is not None:
            origins = [named[name]] if name in named else []
        else:
            origins = _distinct([saved_of[fqn] for fqn in params[index] if fqn in saved_of])
        if len(origins) > 1:
            conflicts.append(f"{label} {_describe(origins, record)}")
        elif origins:
            source[index] = origins[0]
        else:
            new.append(label)
    if conflicts:
        raise MismatchError(
            f"{key}: {len(conflicts)} live groups join parameters of saved groups with different "
            f"hyper-parameters: {first_few(conflicts)}; group the parameters as they were saved, "
            f"or give the groups a 'name'"
        )
    return GroupMatch(source=source, saved_of=saved_of, new=tuple(new))


def _by_name(record: OptimizerRecord) -> dict[str, Group]:
    """Saved groups by name; empty unless every group has one of its own."""
    named = {group.name: group for group in record.groups if group.name is not None}
    return named if len(named) == len(record.groups) else {}


def _distinct(groups: Sequence[Group]) -> list[Group]:
    """`groups` without those whose hyper-parameters equal those of an earlier one."""
    found: list[Group] = []
    for group in groups:
        if not any(group is other or _same(group.hyper, other.hyper) for other in found):
            found.append(group)
    return found


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _describe(origins: Sequence[Group], record: OptimizerRecord) -> str:
    parts = []
    for group in origins:
        label = group.name or f"saved group {record.groups.index(group)}"
        own = {k: v for k, v in group.hyper.items() if not _same(v, origins[0].hyper.get(k))}
        first = {k: v for k, v in origins[0].hyper.items() if not _same(v, origins[1].hyper.get(k))}
        parts.append(f"{label} {own or first}")
    return "(" + " against ".join(parts) + ")"
