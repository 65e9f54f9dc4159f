"""One record out of those of several ranks: pipeline stages see their own parameters only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from milepost.errors import MismatchError
from milepost.state.names import FQN
from milepost.state.optimizer import most_common, same_value
from milepost.state.optimizer_record import (
    Group,
    OptimizerRecord,
    SlotValue,
    SlotValues,
    split_tensor_name,
    values_by_parameter,
)

Ranked = Sequence[tuple[int, OptimizerRecord]]


def merge_records(ranked: Ranked, *, key: str) -> OptimizerRecord:
    """The record of the optimizer that all ranks together have; `ranked` are (rank, record).

    Groups are joined by name, or by position where they have none, and must agree in their
    hyper-parameters. Class, defaults and shared state must agree. A parameter that several ranks
    have must have the same values on all. What differs is refused, naming both ranks.
    """
    first_rank, first = ranked[0]
    for rank, record in ranked[1:]:
        for what in ("class_name", "defaults", "shared"):
            ours, theirs = getattr(first, what), getattr(record, what)
            if repr(ours) != repr(theirs):
                raise _differs(key, what.replace("_", " "), first_rank, ours, rank, theirs)
    values = _merged_values(ranked, key)
    return OptimizerRecord(
        class_name=first.class_name,
        defaults=first.defaults,
        groups=_merged_groups(ranked, key),
        slots=_slots(values),
        stateless=_stateless(ranked, values, key),
        ungrouped=_union(record.ungrouped for _, record in ranked),
        odd_shaped=_union(record.odd_shaped for _, record in ranked),
        offloaded=_union(record.offloaded for _, record in ranked),
        shared=first.shared,
        wrapped={name: form for _, record in ranked for name, form in record.wrapped.items()},
        per_rank=_union(record.per_rank for _, record in ranked),
    )


def _merged_groups(ranked: Ranked, key: str) -> tuple[Group, ...]:
    found: dict[str | int, tuple[int, Group]] = {}
    for rank, record in ranked:
        for number, group in enumerate(record.groups):
            place = number if group.name is None else group.name
            if place not in found:
                found[place] = (rank, group)
                continue
            other, known = found[place]
            if repr(known.hyper) != repr(group.hyper):
                raise _differs(key, f"group {place!r}", other, known.hyper, rank, group.hyper)
            params = tuple(dict.fromkeys((*known.params, *group.params)))
            found[place] = (other, Group(name=group.name, params=params, hyper=known.hyper))
    return tuple(group for _, group in found.values())


def _merged_values(ranked: Ranked, key: str) -> dict[FQN, dict[str, SlotValue]]:
    merged: dict[FQN, dict[str, SlotValue]] = {}
    origin: dict[FQN, int] = {}
    for rank, record in ranked:
        for fqn, slots in values_by_parameter(record).items():
            known = merged.setdefault(fqn, slots)
            first = origin.setdefault(fqn, rank)
            if repr(known) != repr(slots):
                raise _differs(key, fqn, first, known, rank, slots)
    return merged


def _slots(values: dict[FQN, dict[str, SlotValue]]) -> dict[str, SlotValues]:
    names = dict.fromkeys(slot for slots in values.values() for slot in slots)
    found = {}
    for slot in names:
        own = {fqn: slots[slot] for fqn, slots in values.items() if slot in slots}
        default = most_common(own.values())
        found[slot] = SlotValues(
            default=default,
            exceptions={fqn: v for fqn, v in own.items() if not same_value(v, default)},
            absent=tuple(fqn for fqn in values if fqn not in own),
        )
    return found


def _stateless(
    ranked: Ranked, values: dict[FQN, dict[str, SlotValue]], key: str
) -> tuple[FQN, ...]:
    stateless = _union(record.stateless for _, record in ranked)
    both = [fqn for fqn in stateless if fqn in values]
    if both:
        raise MismatchError(
            f"{key}: {both[0]} has optimizer state on some of the ranks that hold it and none on "
            f"others ({len(both)} such parameters); they have taken different steps"
        )
    return stateless


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _differs(
    key: str, what: str, first: int, ours: object, second: int, theirs: object
) -> MismatchError:
    return MismatchError(
        f"{key}: {what} is {ours!r:.200} on rank {first} and {theirs!r:.200} on rank {second}; it "
        "must be the same on all ranks"
    )


def without(record: OptimizerRecord, names: Collection[FQN]) -> OptimizerRecord:
    """The record as if it had never known some parameters: those that other ranks hold."""
    gone = set(names)

    def kept(listed: tuple[FQN, ...]) -> tuple[FQN, ...]:
        return tuple(fqn for fqn in listed if fqn not in gone)

    return replace(
        record,
        groups=tuple(replace(group, params=kept(group.params)) for group in record.groups),
        slots={
            slot: SlotValues(
                default=values.default,
                exceptions={f: v for f, v in values.exceptions.items() if f not in gone},
                absent=kept(values.absent),
            )
            for slot, values in record.slots.items()
        },
        stateless=kept(record.stateless),
        ungrouped=kept(record.ungrouped),
        wrapped={
            name: form
            for name, form in record.wrapped.items()
            if split_tensor_name(name)[0] not in gone
        },
        per_rank=tuple(n for n in record.per_rank if split_tensor_name(n)[0] not in gone),
    )


def without_state(record: OptimizerRecord, names: Collection[FQN]) -> OptimizerRecord:
    """The record as if some of its parameters had never had a state."""
    found = without(record, names)
    return replace(found, groups=record.groups, stateless=_union([record.stateless, tuple(names)]))
