"""What lies on disk, told in the names and shapes of a live model, part by part.

A live tensor may lie on disk as many: experts one by one, under the names of the hub. Or as it is
in memory, which other writers do too. Both are found here, and each tensor on disk fills its part
of the live one in slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from milepost.checkpointing.names_on_disk import derive
from milepost.errors import InvalidInputError
from milepost.format.dtypes import DTYPES
from milepost.hf.tied_names import declared_ties
from milepost.plan.hub_map import HubMap, same_names
from milepost.plan.hub_views import HubPart, parts_of
from milepost.state.mismatch import DtypeDifference, PartDifferences, ShapeDifference
from milepost.state.model_plan import StoredInfo
from milepost.state.names import FQN, Model
from milepost.state.tensors import global_shape, stored_dtype, stored_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """A stored set of tensors as a live model sees it.

    `infos` and `ties` are in live names, as the comparison with the model wants them. `parts` says
    which tensors on disk fill the live ones that do not lie there under their own names, and
    `differences` what of these does not fit.
    """

    infos: Mapping[FQN, StoredInfo]
    ties: Mapping[FQN, FQN]
    parts: Mapping[FQN, list[HubPart]]
    differences: PartDifferences


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNames:
    """How the tensors of a live model are called in one stored set; `wanted` are those names.

    `note` says why hub names could not be derived, if they could not.
    """

    tensors: Mapping[FQN, Tensor]
    hub_map: HubMap
    parts: Mapping[str, list[tuple[FQN, HubPart]]]
    runtime: Mapping[str, FQN]
    note: str | None

    @property
    def wanted(self) -> Iterable[str]:
        return [
            name
            for name, tensor in self.hub_map.tensors.items()
            if any(piece.source in self.tensors for piece in tensor.pieces)
        ]

    def ties(self, tied: Mapping[str, str]) -> dict[FQN, FQN]:
        """`tied`, alias to kept name on disk, in live names as far as they are known."""
        return {self.runtime.get(a, a): self.runtime.get(kept, kept) for a, kept in tied.items()}


def live_names(model: Model, tensors: Mapping[FQN, Tensor], names: Iterable[str]) -> LiveNames:
    """How `tensors`, the leaves of `model`, are called in a set of tensors `names`."""
    # A stage may have a tensor under an alias while the name that is kept is another stage's.
    named = dict(tensors)
    for alias, kept in declared_ties(model).items():
        if alias in tensors:
            named.setdefault(kept, tensors[alias])
    derived = derive(model, named)
    hub_map, note = derived.hub_map.as_stored(frozenset(names)), derived.unknown
    try:
        parts = {
            name: parts_of(hub_map, tensor)
            for name, tensor in hub_map.tensors.items()
            if name not in hub_map.identity
        }
    except InvalidInputError as error:
        hub_map = same_names({name: global_shape(t) for name, t in named.items()})
        parts, note = {}, f"not in hub spelling: {error}"
    return LiveNames(
        tensors=tensors, hub_map=hub_map, parts=parts, runtime=hub_map.renamed, note=note
    )


def stored_names(
    live: LiveNames, stored: Mapping[str, StoredInfo], tied: Mapping[str, str]
) -> StoredNames:
    """`stored`, by name on disk, in the names of the live model; `tied` is alias to kept name."""
    found = _Comparison(live, stored, tied)
    for name, parts in live.parts.items():
        for source, part in parts:
            if source in live.tensors:
                found.add(name, source, part)
    return found.result()


class _Comparison:
    """Collects the tensors on disk that are parts of live ones."""

    def __init__(
        self, live: LiveNames, stored: Mapping[str, StoredInfo], tied: Mapping[str, str]
    ) -> None:
        self._live, self._stored, self._tied = live, stored, tied
        self._parts: dict[FQN, list[HubPart]] = {}
        self._spelled: dict[FQN, list[str]] = {}
        self._absent: dict[str, FQN] = {}
        self._shapes: dict[str, ShapeDifference] = {}
        self._dtypes: dict[str, DtypeDifference] = {}
        self._incomplete: set[FQN] = set()

    def add(self, name: str, source: FQN, part: HubPart) -> None:
        """Look for the tensor `name` on disk, which fills `part` of the live tensor `source`."""
        self._spelled.setdefault(source, []).append(name)
        # A tied tensor of one part is found by the comparison of names; others here.
        at = name if name in self._live.runtime else self._tied.get(name, name)
        at = name if name in self._stored else at
        if at not in self._stored:
            self._absent[name] = source
            self._incomplete.add(source)
            return
        parts = self._parts.setdefault(source, [])
        if self._fits(name, self._stored[at], self._live.tensors[source]):
            parts.append(part._replace(view=part.view._replace(name=at)))
        else:
            self._incomplete.add(source)

    def _fits(self, name: str, info: StoredInfo, live: Tensor) -> bool:
        """Note how a tensor on disk differs from what the model wants; whether it can be read."""
        (dtype, shape), word = info, stored_dtype(live)
        wanted = self._live.hub_map.tensors[name].shape
        pack = DTYPES[word].elements_per_torch if word in DTYPES else 1
        if pack > 1 and wanted:
            wanted = (*wanted[:-1], wanted[-1] * pack)
        if tuple(shape) != wanted:
            self._shapes[name] = ShapeDifference(name=name, stored=tuple(shape), live=wanted)
        elif dtype != word:
            self._dtypes[name] = DtypeDifference(name=name, stored=dtype, live=word)
        return name not in self._shapes

    def result(self) -> StoredNames:
        live, stored = self._live, self._stored
        used = {part.view.name for parts in self._parts.values() for part in parts}
        infos = {n: i for n, i in stored.items() if n not in used and n not in self._shapes}
        unexpected = [source for source in self._parts if source in infos]
        for source in self._parts:
            tensor = live.tensors[source]
            infos[source] = (stored_dtype(tensor), stored_shape(tensor))
        tied = {a: k for a, k in self._tied.items() if a not in live.parts or a in live.runtime}
        differences = PartDifferences(
            missing=[name for name, source in self._absent.items() if source in self._parts],
            unexpected=unexpected,
            shapes=list(self._shapes.values()),
            dtypes=list(self._dtypes.values()),
            spelled=self._spelled,
            incomplete=frozenset(self._incomplete & self._parts.keys()),
            hint=live.note,
        )
        return StoredNames(
            infos=infos, ties=live.ties(tied), parts=self._parts, differences=differences
        )
