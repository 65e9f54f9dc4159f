"""Plain tensors of one name on several ranks are replicas only if they are proven to be.

The first save of a process compares their bytes over all holders, by digest. Ranks that drifted
apart, and slices that nobody declared to be slices, are found and named instead of being mixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from milepost.engine.rendezvous import Conversation
from milepost.engine.source import Scratch, TensorSource
from milepost.errors import MismatchError
from milepost.plan.holding import Holding
from milepost.plan.inventory import SELF
from milepost.state.placements import Held

_SCRATCH_NBYTES = 1024 * 1024
_proven: set[str] = set()


def prove_replicas(
    talk: Conversation,
    sets: Mapping[str, Mapping[str, Held]],
    ties: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Refuse plain tensors whose bytes differ between ranks that hold them; collective.

    So are tensors that stand for a tied one of another stage: `ties` maps alias to kept name for
    each set. Shards of these are compared with the shards of the same place. Done once for each set
    of names in a process; later saves trust what was proven.
    """
    if talk.world_size == 1:
        return
    claims = _claims(sets, ties or {}, talk.rank)
    names = xxhash.xxh3_128("\0".join(claims).encode()).hexdigest()
    digests = {} if names in _proven else {name: _digest(held) for name, held in claims.items()}
    whole = xxhash.xxh3_128(b"".join(digests.values())).hexdigest()
    reports = talk.gather("replicas", json.dumps([names, whole, len(digests)]).encode())
    verdict = json.dumps(_suspects(reports)).encode() if talk.is_coordinator else None
    found: list[list[int]] = json.loads(talk.broadcast("replicas-differ", verdict))
    suspects, speakers = found
    if len(speakers) > 1:
        suspects = _compare_across(talk, digests, speakers)
    if suspects:
        _accuse(talk, digests, suspects, ties or {})
    _proven.add(names)


def _claims(
    sets: Mapping[str, Mapping[str, Held]], ties: Mapping[str, Mapping[str, str]], rank: int
) -> dict[str, Held]:
    """What must be the same wherever it is held, under a name that says what it is."""
    claims = {}
    for key, leaves in sets.items():
        shared = set(ties.get(key, {}).values())
        for name, held in leaves.items():
            if held.info.classes == (SELF,):
                claims[f"{key}: {name}"] = held
            elif name in shared:
                holding = Holding(held.info.classes)
                place = holding.shard_coordinate(rank)
                if place is not None:
                    claims[f"{key}: {name}, shard {place} of {holding.grid}"] = held
    return claims


def _compare_across(
    talk: Conversation, digests: Mapping[str, bytes], speakers: Sequence[int]
) -> list[int]:
    """Compare ranks of different names, one for each set of names, in what they both hold; two that
    differ, or none."""
    if talk.rank in speakers:
        talk.post(f"claims/{talk.rank}", msgspec.msgpack.encode(dict(digests)))
    verdict = None
    if talk.is_coordinator:
        known: dict[str, tuple[int, bytes]] = {}
        suspects: list[int] = []
        for rank in speakers:
            raw = talk.fetch(f"claims/{rank}", rank)
            for name, digest in msgspec.msgpack.decode(raw, type=dict[str, bytes]).items():
                first, other = known.setdefault(name, (rank, digest))
                if other != digest:
                    suspects = suspects or [first, rank]
        verdict = json.dumps(suspects).encode()
    found: list[int] = json.loads(talk.broadcast("claims-differ", verdict))
    return found


def _digest(held: Held) -> bytes:
    hasher = xxhash.xxh3_64()
    scratch = Scratch(_SCRATCH_NBYTES)
    source = TensorSource(held.local)
    end = source.nbytes - source.nbytes % _SCRATCH_NBYTES
    for start in range(0, end, _SCRATCH_NBYTES):
        for piece in source.pieces(start, start + _SCRATCH_NBYTES, scratch):
            hasher.update(piece)
    for piece in source.pieces(end, source.nbytes, scratch):
        hasher.update(piece)
    return hasher.digest()


def _suspects(reports: list[bytes]) -> list[list[int]]:
    """Two ranks that hold the same names with different bytes, or none; and the first rank of each
    set of names that was digested."""
    first: dict[str, tuple[int, str]] = {}
    for rank, raw in enumerate(reports):
        names, whole, count = json.loads(raw)
        if not count:
            continue
        known, digest = first.setdefault(names, (rank, whole))
        if digest != whole:
            return [[known, rank], []]
    return [[], [rank for rank, _ in first.values()]]


def _accuse(
    talk: Conversation,
    digests: Mapping[str, bytes],
    suspects: list[int],
    ties: Mapping[str, Mapping[str, str]],
) -> None:
    if talk.rank in suspects:
        talk.post(f"digests/{talk.rank}", msgspec.msgpack.encode(dict(digests)))
    one, other = (
        msgspec.msgpack.decode(talk.fetch(f"digests/{rank}", rank), type=dict[str, bytes])
        for rank in suspects
    )
    names = [name for name, digest in one.items() if other.get(name, digest) != digest]
    tied = {f"{key}: {kept}" for key, own in ties.items() for kept in own.values()}
    why = (
        "either the ranks have drifted apart, or these are slices, which "
        "milepost.declare_placement must be told of"
    )
    if any(name.partition(",")[0] in tied for name in names):
        why = (
            "a pair that the model's configuration ties across pipeline stages is not equal: make "
            "it equal, or set tie_word_embeddings=False"
        )
    raise MismatchError(
        f"{len(names)} plain tensors differ between ranks {suspects[0]} and {suspects[1]}: "
        f"{', '.join(names[:3])}; {why}; nothing was saved"
    )
