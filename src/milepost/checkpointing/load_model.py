"""Phase 1 for one model: its leaves against a stored set, and what fills what in phase 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from milepost.checkpointing.agree import names_elsewhere
from milepost.checkpointing.load_names import live_names, stored_names
from milepost.checkpointing.names_on_disk import view_of_box
from milepost.engine.rendezvous import Conversation
from milepost.geometry.axis_view import local_boxes
from milepost.geometry.blocks import Shape
from milepost.geometry.placement import IndexSet, boxes_of, whole
from milepost.plan.hub_views import HubPart
from milepost.state.leaves import collect_leaves
from milepost.state.model_plan import RestorePlan, StoredInfo, plan_restore_model
from milepost.state.names import FQN, Model
from milepost.state.placements import local_part
from milepost.state.tensors import global_shape, same_bits

if TYPE_CHECKING:
    from milepost.checkpointing.load_request import LoadPolicies


class Fill(NamedTuple):
    """The index set `held` of the stored tensor `name` goes into `target`.

    It counts in `grid`, the stored shape or a finer one of the same row-major order, in torch's
    elements; None for the stored shape.
    """

    name: str
    grid: Shape | None
    held: IndexSet
    target: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A checked load of one model. `ties` are all of the stored set, in live names."""

    restore: RestorePlan
    parts: Mapping[FQN, list[HubPart]]
    ties: Mapping[FQN, FQN]
    note: str | None

    def fills(self) -> Iterator[Fill]:
        """All that is to be read; a live tensor on several ranks is filled with its own part."""
        for name, targets in self.restore.targets.items():
            for target in targets:
                held, local = local_part(target)
                yield from self._fills(name, held, local)

    def stored_names(self) -> list[str]:
        """The stored tensors that are read, each once."""
        names: dict[str, None] = {}
        for name in self.restore.targets:
            names.update(dict.fromkeys(self._names(name)))
        return list(names)

    def check_ties(self, read: Callable[[str], Tensor]) -> None:
        """Refuse where tensors differ that the live model ties; `read` gives a stored tensor."""

        def equal(first: FQN, second: FQN) -> bool:
            if self._names(first) == self._names(second):
                return True
            return same_bits(self._assembled(first, read), self._assembled(second, read))

        self.restore.check_ties(equal)

    def _names(self, name: FQN) -> list[str]:
        parts = self.parts.get(name)
        return [name] if parts is None else [part.view.name for part in parts]

    def _assembled(self, name: FQN, read: Callable[[str], Tensor]) -> Tensor:
        if name not in self.parts:
            return read(name)
        live = self.restore.leaves.tensors[name]
        value = torch.zeros(global_shape(live), dtype=live.dtype)
        for fill in self._fills(name, whole(tuple(value.shape)), value):
            copy_part(fill, read(fill.name))
        return value

    def _fills(self, name: FQN, held: IndexSet, local: Tensor) -> Iterator[Fill]:
        if name not in self.parts:
            yield Fill(name, None, held, local)
            return
        for part in self.parts[name]:
            kind, fixed = part.view.kind, part.view.fixed
            for box in local_boxes(kind, fixed, held):
                target = view_of_box(local, kind, box)
                yield Fill(part.view.name, part.grid, _shifted(box.held, part.start), target)


def copy_part(fill: Fill, value: Tensor) -> None:
    """Fill a target from the whole stored tensor `value`."""
    source = value if fill.grid is None else value.reshape(fill.grid)
    with torch.no_grad():
        for box, place in boxes_of(fill.held):
            part = source[tuple(slice(*span) for span in box)]
            fill.target[tuple(slice(*span) for span in place)].copy_(part)


def _shifted(held: IndexSet, start: tuple[int, ...]) -> IndexSet:
    if not any(start):
        return held
    return tuple(
        tuple((first + offset, last + offset) for first, last in spans)
        for spans, offset in zip(held, start, strict=True)
    )


def plan_model(
    talk: Conversation,
    key: str,
    model: Model,
    stored: Mapping[str, StoredInfo],
    tied: Mapping[str, str],
    policies: LoadPolicies,
    extra: Mapping[str, Any] | None = None,
) -> ModelLoad:
    """Check that a stored set fits `model`; `tied` is alias to kept name on disk.

    Collective: what other ranks have is not unexpected here. Differences are raised under the
    policies, each kind once, in the names on disk.
    """
    live = live_names(model, collect_leaves(model).tensors, stored)
    elsewhere = names_elsewhere(talk, key, live.wanted, [*stored, *tied])
    ties = {a: kept for a, kept in tied.items() if a not in elsewhere}
    here = {n: i for n, i in stored.items() if n not in elsewhere or n in ties.values()}
    names = stored_names(live, here, ties)
    restore = plan_restore_model(
        model,
        names.infos,
        names.ties,
        extra=extra,
        missing=policies.missing,
        unexpected=policies.unexpected,
        dtype=policies.dtype,
        shape=policies.shape,
        device=policies.device,
        parts=names.differences,
    )
    return ModelLoad(restore=restore, parts=names.parts, ties=live.ties(tied), note=live.note)
