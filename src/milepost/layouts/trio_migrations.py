"""Versions of the training payload, and the functions that lead from each to the next.

The payload is the dict that the split layout unifies: `model_state`, the four slots of
`extra_state.pt`, and the keys of `meta.json`. Version 1.0 is the one-file layout of v0.0.5 and
before, which carried no number; 2.0 is the split layout. A later version adds a row to `STEPS`, a
golden file and a test; readers of older files then need no change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from milepost.errors import FormatError, UnsupportedVersionError
from milepost.layouts.payload import STATE_SLOTS

FORMAT_VERSION = "2.0"
LEGACY_VERSION = "1.0"

Document: TypeAlias = Mapping[str, Any]


def split_layout(document: Document) -> dict[str, Any]:
    """1.0 to 2.0: the keys that older generations left out get their defaults.

    The first generation had neither `model_config` nor `extra_state`; later ones wrote
    `extra_state` only when there was any.
    """
    defaults: dict[str, Any] = {
        "epoch": 0,
        "loss": None,
        "best_loss": math.inf,
        "model_config": None,
        **dict.fromkeys(STATE_SLOTS),
    }
    return {**defaults, **document}


STEPS: Mapping[str, tuple[str, Callable[[Document], dict[str, Any]]]] = {
    "1.0": ("2.0", split_layout),
}


def migrate(document: Document, *, where: str, version: str | None = None) -> dict[str, Any]:
    """`document` in the current version, by as many steps as it takes.

    `version` is that of the document; by default what it says itself, and 2.0 when it says
    nothing. `UnsupportedVersionError` for a newer major version, `FormatError` for what is no
    version; a newer minor version passes, with the keys it added.
    """
    found = version if version is not None else document.get("format_version", FORMAT_VERSION)
    migrated = dict(document)
    while found in STEPS:
        found, step = STEPS[found]
        migrated = step(migrated)
    _check(found, where)
    migrated["format_version"] = found
    return migrated


def _check(version: Any, where: str) -> None:
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise FormatError(
            f"{where}: format_version is {version!r:.50}, expected text such as '2.0'", path=where
        )
    if int(major) > int(FORMAT_VERSION.partition(".")[0]):
        raise UnsupportedVersionError(
            f"{where}: written in format version {version}, this Milepost reads 2.x and older; "
            "upgrade milepost to load it",
            path=where,
        )
    if int(major) < int(FORMAT_VERSION.partition(".")[0]):
        raise FormatError(
            f"{where}: format_version is {version!r}, which no release ever wrote", path=where
        )
