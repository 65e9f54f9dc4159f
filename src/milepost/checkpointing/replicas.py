"""Plain tensors of one name on several ranks are replicas only if they are proven to be.

The first save of a process compares their bytes over all holders, by digest. Ranks that drifted
apart, and slices that nobody declared to be slices, are found and named instead of being mixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
import xxhash

from milepost.engine.rendezvous import Conversation
from milepost.engine.source import Scratch, TensorSource
from milepost.errors import MismatchError
from milepost.plan.inventory import SELF
from milepost.state.placements import Held

_SCRATCH_NBYTES = 1024 * 1024
_proven: set[str] = set()


def prove_replicas(talk: Conversation, sets: Mapping[str, Mapping[str, Held]]) -> None:
    """Refuse plain tensors whose bytes differ between ranks that hold them; collective.

    Done once for each set of names in a process; later saves trust what was proven.
    """
    if talk.world_size == 1:
        return
    plain = {
        f"{key}: {name}": held
        for key, leaves in sets.items()
        for name, held in leaves.items()
        if held.info.classes == (SELF,)
    }
    names = xxhash.xxh3_128("\0".join(plain).encode()).hexdigest()
    digests = {} if names in _proven else {name: _digest(held) for name, held in plain.items()}
    whole = xxhash.xxh3_128(b"".join(digests.values())).hexdigest()
    reports = talk.gather("replicas", json.dumps([names, whole, len(digests)]).encode())
    verdict = json.dumps(_suspects(reports)).encode() if talk.is_coordinator else None
    suspects: list[int] = json.loads(talk.broadcast("replicas-differ", verdict))
    if suspects:
        _accuse(talk, digests, suspects)
    _proven.add(names)


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


def _suspects(reports: list[bytes]) -> list[int]:
    """Two ranks that hold the same names with different bytes; empty when there are none."""
    first: dict[str, tuple[int, str]] = {}
    for rank, raw in enumerate(reports):
        names, whole, count = json.loads(raw)
        if not count:
            continue
        known, digest = first.setdefault(names, (rank, whole))
        if digest != whole:
            return [known, rank]
    return []


def _accuse(talk: Conversation, digests: Mapping[str, bytes], suspects: list[int]) -> None:
    if talk.rank in suspects:
        talk.post(f"digests/{talk.rank}", msgspec.msgpack.encode(dict(digests)))
    one, other = (
        msgspec.msgpack.decode(talk.fetch(f"digests/{rank}", rank), type=dict[str, bytes])
        for rank in suspects
    )
    names = [name for name, digest in one.items() if other.get(name) != digest]
    raise MismatchError(
        f"{len(names)} plain tensors differ between ranks {suspects[0]} and {suspects[1]}: "
        f"{', '.join(names[:3])}; either the ranks have drifted apart, or these are slices and "
        "need a declared placement; nothing was saved"
    )
