"""Reports of what does not fit, each as one error that names everything of its kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from milepost.errors import DtypeMismatchError, KeyMismatchError, ShapeMismatchError

SHOWN = 5
KEYS_REMEDY = "load with missing=Missing.KEEP, unexpected=Unexpected.IGNORE"
MAX_CANDIDATES = 2000  # difflib compares each missing name with each candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDifference:
    """`stored` and `live` are global shapes."""

    name: str
    stored: tuple[int, ...]
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeDifference:
    """`stored` and `live` are safetensors dtype words."""

    name: str
    stored: str
    live: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifferences:
    """What differs where live tensors lie on disk in parts or under other names, told in those.

    `missing` are names of parts of live tensors that have others; `spelled` gives the names on disk
    of a live one. `incomplete` are live names of which not everything is stored as it should be.
    `hint` is said with names that do not fit.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    shapes: Sequence[ShapeDifference] = ()
    dtypes: Sequence[DtypeDifference] = ()
    spelled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    incomplete: frozenset[str] = frozenset()
    hint: str | None = None

    def spell(self, names: Iterable[str]) -> list[str]:
        """Live names as they would be on disk."""
        return [found for name in names for found in self.spelled.get(name, [name])]


def first_few(names: Sequence[str]) -> str:
    """The first few of `names` for a message.

    >>> first_few(["a", "b"])
    'a, b'
    """
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def closest_pairs(missing: Sequence[str], unexpected: Sequence[str]) -> list[tuple[str, str]]:
    """(missing, unexpected) names that look alike, for the first few missing names.

    >>> closest_pairs(["layers.0.weight"], ["bias", "model.layers.0.weight"])
    [('layers.0.weight', 'model.layers.0.weight')]
    """
    pairs: list[tuple[str, str]] = []
    for name in missing[:SHOWN]:
        last = name.rpartition(".")[2]
        alike = [other for other in unexpected if other.rpartition(".")[2] == last] or unexpected
        match = difflib.get_close_matches(name, alike[:MAX_CANDIDATES], n=1)
        pairs.extend((name, other) for other in match)
    return pairs


def raise_keys(
    what: str, *, missing: Sequence[str], unexpected: Sequence[str], remedy: str
) -> NoReturn:
    """Raise `KeyMismatchError`: `what` wants `missing`, the checkpoint also holds `unexpected`."""
    parts = [f"{what}: {len(missing)} missing, {len(unexpected)} unexpected in the checkpoint"]
    if missing:
        parts.append(f"missing: {first_few(missing)}")
    if unexpected:
        parts.append(f"unexpected: {first_few(unexpected)}")
    pairs = closest_pairs(missing, unexpected)
    if pairs:
        parts.append("closest pairs: " + ", ".join(f"{a} ~ {b}" for a, b in pairs))
    raise KeyMismatchError("; ".join([*parts, remedy]), missing=missing, unexpected=unexpected)


def raise_shapes(what: str, differences: Sequence[ShapeDifference], *, remedy: str) -> NoReturn:
    """Raise `ShapeMismatchError` for all of `differences`."""
    lines = _lines(
        f"{d.name}: {what} wants {d.live}, the checkpoint holds {d.stored}" for d in differences
    )
    raise ShapeMismatchError(f"{len(differences)} shapes differ; {lines}; {remedy}")


def raise_dtypes(what: str, differences: Sequence[DtypeDifference], *, remedy: str) -> NoReturn:
    """Raise `DtypeMismatchError` for all of `differences`."""
    lines = _lines(
        f"{d.name}: {what} has {d.live}, the checkpoint holds {d.stored}" for d in differences
    )
    raise DtypeMismatchError(f"{len(differences)} dtypes differ; {lines}; {remedy}")


def _lines(texts: Iterable[str]) -> str:
    listed = list(texts)
    rest = len(listed) - SHOWN
    return "; ".join(listed[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
