"""Weights of a source directory that the model class does not hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from milepost.format.header import read_header
from milepost.format.index import parse_index

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DRAFT = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def foreign_weights(source_dir: str | Path, saved_names: Iterable[str]) -> list[str]:
    """Names of the tensors in `source_dir` that are not among `saved_names`, sorted.

    `saved_names` must include the aliases of tied tensors. A base-model prefix that one side has
    and the other has not (`model.`) is no difference. A directory without safetensors gives [].
    """
    source = source_names(Path(source_dir))
    saved = set(saved_names)
    translate = _prefix_rule(source, saved)
    return sorted(name for name in source if translate(name) not in saved)


def foreign_notes(source_dir: str | Path, names: Sequence[str]) -> list[str]:
    """One note that lists what `foreign_weights` found; none when it found nothing."""
    if not names:
        return []
    first = ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        f"{len(names)} tensors of {source_dir} are not part of this model and are not saved: "
        f"{first}; copy them from the source if they are needed"
    ]


def drop_draft_layers(document: dict[str, Any], foreign: Sequence[str]) -> list[str]:
    """Set the counts of prediction layers in config.json to 0 when `foreign` holds such layers.

    A server that reads a count above 0 looks for their weights, and they are not saved. A layer
    is one of prediction by its name (`mtp`, `nextn`) or by a number from `num_hidden_layers` up.
    """
    notes = []
    for place in (document, document.get("text_config")):
        if not isinstance(place, dict):
            continue
        layers = place.get("num_hidden_layers")
        if not any(_is_draft(name, layers) for name in foreign):
            continue
        for key in _DRAFT_COUNTS:
            if place.get(key):
                notes.append(f"config.json: {key} is set to 0 (was {place[key]}): not saved")
                place[key] = 0
    return notes


def _is_draft(name: str, layers: Any) -> bool:
    if _DRAFT.search(name):
        return True
    number = _LAYER.search(name)
    return number is not None and isinstance(layers, int) and int(number[1]) >= layers


def source_names(directory: Path) -> set[str]:
    """Names of all tensors of a Hugging Face directory, read from its index or its headers."""
    index = directory / _INDEX
    if index.is_file():
        return set(parse_index(index.read_bytes(), str(index)).weight_map)
    single = directory / _SINGLE
    return set(read_header(single).tensors) if single.is_file() else set()


class _PrefixRule:
    """Translates source names to saved names by adding or removing one leading component."""

    def __init__(self, *, remove: str = "", add: str = "") -> None:
        self._remove = remove
        self._add = add

    def __call__(self, name: str) -> str:
        if self._remove:
            return name.removeprefix(self._remove)
        return name if name.startswith(self._add) else self._add + name


def _prefix_rule(source: set[str], saved: set[str]) -> _PrefixRule:
    """The rule under which most names agree; changing nothing wins a draw."""
    rules = [_PrefixRule()]
    rules += [_PrefixRule(remove=prefix) for prefix in _prefixes(source)]
    rules += [_PrefixRule(add=prefix) for prefix in _prefixes(saved)]
    return max(rules, key=lambda rule: sum(rule(name) in saved for name in source))


def _prefixes(names: set[str]) -> list[str]:
    counts = Counter(name.partition(".")[0] + "." for name in names if "." in name)
    return [prefix for prefix, _ in counts.most_common(2)]
