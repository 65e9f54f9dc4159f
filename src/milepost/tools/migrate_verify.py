"""Proof that a written checkpoint holds what the source holds, bit by bit.

Both are read from their files again, tensor by tensor; nothing that the writer had in memory is
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from milepost.tools.migrate_compare import Comparison
from milepost.tools.migrate_content import DESCRIBED, Content

SHOWN = 5


def differences(source: Content, written: Content) -> list[str]:
    """What of the source the written checkpoint does not hold, and what it holds besides.

    Names, ties, dtypes, shapes and bits of all weights, every value of the training state, and all
    metadata. Raises `DamagedError` when the written files fail their own digests.
    """
    written.check()
    compare = Comparison(left=source.read, right=written.read)
    return [
        *_weights(source, written, compare),
        *_ties(source, written),
        *compare.differences(dict(source.extras), dict(written.extras), "model_state"),
        *compare.differences(_versions(source), _versions(written), "model_state._metadata"),
        *compare.differences(dict(source.slots), dict(written.slots), ""),
        *_metadata(source, written, compare),
    ]


def _weights(source: Content, written: Content, compare: Comparison) -> Iterator[str]:
    for name, leaf in source.weights.items():
        if name not in written.weights:
            yield f"model_state.{name}: is missing"
            continue
        yield from compare.tensors_differ(leaf, written.weights[name], f"model_state.{name}")
    for name in written.weights:
        if name not in source.weights:
            yield f"model_state.{name}: was not there"


def _ties(source: Content, written: Content) -> Iterator[str]:
    mine, theirs = _groups(source), _groups(written)
    for group in mine - theirs:
        yield f"model_state: {', '.join(sorted(group))} are not tied any more"
    for group in theirs - mine:
        yield f"model_state: {', '.join(sorted(group))} were not tied"


def _groups(content: Content) -> set[frozenset[str]]:
    groups: dict[str, set[str]] = {}
    for name, kept in content.tied.items():
        groups.setdefault(kept, {kept}).add(name)
    return {frozenset(group) for group in groups.values()}


def _versions(content: Content) -> dict[str, Any]:
    return dict(content.versions or {})


def _metadata(source: Content, written: Content, compare: Comparison) -> Iterator[str]:
    """A value may stand among the metadata, or as the field of its name."""
    for name in DESCRIBED:
        if name == "metrics":
            continue  # read off the metadata, which is compared
        yield from compare.differences(source.described[name], written.described[name], name)
    fields: Mapping[str, Any] = {n: v for n, v in written.described.items() if v is not None}
    for key, value in source.metadata.items():
        if key in written.metadata:
            yield from compare.differences(value, written.metadata[key], f"metadata.{key}")
        elif key in fields:
            yield from compare.differences(value, fields[key], f"metadata.{key}")
        elif key not in written.described or value is not None:
            yield f"metadata.{key}: is missing"
