"""What ranks must agree on about an optimizer: its record, its slots, what each keeps by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from milepost.checkpointing.capture import Captured, CapturedOptimizer
from milepost.checkpointing.per_rank import PerRank
from milepost.engine.rendezvous import Conversation
from milepost.engine.source import Scratch, TensorSource
from milepost.errors import MismatchError
from milepost.state.names import FQN
from milepost.state.optimizer import OptimizerState
from milepost.state.optimizer_merge import merge_records
from milepost.state.optimizer_own import OwnStates, belongs_to, own_entry
from milepost.state.optimizer_parts import empty_parts
from milepost.state.optimizer_record import (
    Form,
    OptimizerRecord,
    part_name,
    split_tensor_name,
    tensor_name,
    values_by_parameter,
)
from milepost.state.tensors import local_of
from milepost.state.tree_blob import pack_tree, unpack_tree

_SCRATCH_NBYTES = 1024 * 1024
_EMPTY, _ABSENT, _VALUE, _TENSOR = "empty", "absent", "value", "tensor"


def own_key(place: str) -> str:
    """The key under which every rank keeps its own states of an optimizer."""
    return f"{place}~own"


def optimizer_digest(state: OptimizerState, record_digest: str) -> str:
    """A digest of the record, the names of all tensors, and the bytes of unplaced ones."""
    hasher = xxhash.xxh3_128(record_digest.encode())
    hasher.update("\0".join([*state.tensors, "", *state.empty]).encode())
    for name in state.unplaced:
        hasher.update(_unplaced_digest(state, name).encode())
    return hasher.hexdigest()


def settle_optimizer(
    talk: Conversation, captured: Captured, optimizer: CapturedOptimizer
) -> dict[str, Any] | None:
    """Agree on an optimizer that is not the same on all ranks; collective.

    The coordinator joins the records. A slot that some holders of a parameter have and others have
    not is refused. What cannot be one tensor is taken out of the tensors of this rank and returned,
    by name, to be kept per rank; None when there is nothing of the kind on any rank.
    """
    place, state = optimizer.place, optimizer.state
    statement = {"record": state.record.to_tree(), "slots": _slots(state)}
    gathered = talk.gather(f"record/{place}", pack_tree(statement, key=place))
    verdict = b""
    if talk.is_coordinator:
        ranked, slots = [], []
        for rank, blob in enumerate(gathered):
            tree = unpack_tree(blob, where=f"{place} of rank {rank}")
            where = f"{place} of rank {rank}"
            ranked.append((rank, OptimizerRecord.from_tree(tree["record"], where=where)))
            slots.append(tree["slots"])
        found = _judge(place, ranked, slots)
        record = merge_records(ranked, key=place)
        record = replace(
            record,
            wrapped={n: form for n, form in record.wrapped.items() if n not in found.per_rank},
            per_rank=tuple(found.per_rank),
        )
        captured.replace_tree(place, record.to_tree())
        verdict = pack_tree(found.to_tree(record), key=place)
    told = unpack_tree(talk.broadcast(f"verdict/{place}", verdict or None), where=place)
    return _apply(place, state, told)


@dataclass(slots=True)
class _Verdict:
    """Names that are kept per rank, and names of which some ranks hold an empty shard."""

    per_rank: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    def to_tree(self, record: OptimizerRecord) -> dict[str, Any]:
        forms = {n: record.wrapped[n].to_tree() for n in self.empty if n in record.wrapped}
        return {"per_rank": self.per_rank, "forms": forms}


def _slots(state: OptimizerState) -> dict[str, str]:
    """What this rank has of every slot, as a word that is equal where ranks have the same."""
    found = {
        tensor_name(fqn, slot): _VALUE
        for fqn, slots in values_by_parameter(state.record).items()
        for slot in slots
    }
    for name in state.values:
        form = state.record.wrapped.get(name)
        found[name] = _TENSOR if form is None else repr(form)
    found.update(dict.fromkeys(state.empty, _EMPTY))
    found.update({name: _unplaced_digest(state, name) for name in state.unplaced})
    return found


def _judge(
    place: str, ranked: list[tuple[int, OptimizerRecord]], slots: list[Mapping[str, str]]
) -> _Verdict:
    holders: dict[FQN, list[int]] = {}
    for rank, record in ranked:
        for fqn in record.stateful():
            holders.setdefault(fqn, []).append(rank)
    verdict = _Verdict()
    for name in dict.fromkeys(name for own in slots for name in own):
        ranks = holders[split_tensor_name(name)[0]]
        words = {rank: slots[rank].get(name, _ABSENT) for rank in ranks}
        kinds = {word for word in words.values() if word != _EMPTY}
        if len(kinds) > 1 and kinds & {_ABSENT, _VALUE}:
            raise _differs(place, name, words)
        if len(kinds) > 1:
            verdict.per_rank.append(name)
        elif _EMPTY in words.values():
            verdict.empty.append(name)
    return verdict


def _differs(place: str, name: str, words: Mapping[int, str]) -> MismatchError:
    fqn, slot = split_tensor_name(name)
    first = next(iter(words))
    other = next(rank for rank, word in words.items() if word != words[first])

    def told(rank: int) -> str:
        word = words[rank]
        return word if word in (_ABSENT, _VALUE) else _TENSOR

    return MismatchError(
        f"{place}: the slot {slot!r} of {fqn} is {told(first)} on rank {first} and {told(other)} "
        f"on rank {other}, which both hold the parameter; they have taken different steps, nothing "
        "was saved"
    )


def _apply(place: str, state: OptimizerState, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Take what is kept per rank out of the tensors, and describe empty shards as others do."""
    kept = {}
    for name in told["per_rank"]:
        if name in state.values:
            value = state.values[name]
            kept[name] = own_entry(value.tensor, value.param, key=f"{place}: {name}")
            for stored in _stored_names(state, name):
                del state.tensors[stored]
    for name, tree in told["forms"].items():
        if name in state.empty and name in state.tensors:
            form = Form.from_tree(tree, where=f"{place}: {name}")
            like = state.tensors.pop(name)
            state.tensors.update(empty_parts(form, like, name, key=f"{place}: {name}"))
    return kept if told["per_rank"] else None


def _stored_names(state: OptimizerState, name: str) -> list[str]:
    form = state.record.wrapped.get(name)
    return [name] if form is None else [part_name(name, part) for part in form.dtypes]


def _unplaced_digest(state: OptimizerState, name: str) -> str:
    hasher = xxhash.xxh3_128(name.encode())
    for stored in _stored_names(state, name):
        tensor = local_of(state.tensors[stored])
        hasher.update(f"{stored} {tensor.dtype} {tuple(tensor.shape)}".encode())
        update_digest(hasher, tensor)
    return f"own {hasher.hexdigest()}"


def update_digest(hasher: Any, tensor: torch.Tensor) -> None:
    """Add the bytes of a plain tensor to a digest, a piece at a time."""
    source, scratch = TensorSource(tensor), Scratch(_SCRATCH_NBYTES)
    for start in range(0, source.nbytes, _SCRATCH_NBYTES):
        end = min(start + _SCRATCH_NBYTES, source.nbytes)
        for piece in source.pieces(start, end, scratch):
            hasher.update(piece)


def own_states(
    talk: Conversation,
    rows: PerRank,
    place: str,
    record: OptimizerRecord,
    params: Mapping[FQN, torch.Tensor],
) -> OwnStates:
    """What this rank can take back of states that every rank kept by itself; collective.

    A state that one rank cannot take back, because it holds another part of the parameter now, is
    lost on all of them.
    """
    entries: Mapping[str, Any] = {}
    if rows.has(own_key(place)):
        with suppress(MismatchError):  # another number of ranks: nothing is this rank's
            entries = rows.value(own_key(place))
    lost = [
        name
        for name in record.per_rank
        for param in [params.get(split_tensor_name(name)[0])]
        if param is not None and not belongs_to(entries.get(name), param)
    ]
    gathered = talk.gather(f"lost/{place}", json.dumps(lost).encode())
    union = dict.fromkeys(name for raw in gathered for name in json.loads(raw))
    told = talk.broadcast(
        f"all-lost/{place}", json.dumps([*union]).encode() if talk.is_coordinator else None
    )
    return OwnStates(entries=entries, lost=tuple(json.loads(told)))
