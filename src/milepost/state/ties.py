"""Tied names: which leaves are one region of one storage, and which of their names is kept."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping

from torch import Tensor, nn

from milepost.state.names import FQN, Model, places
from milepost.state.tensors import region


def tied_groups(tensors: Mapping[FQN, Tensor]) -> list[list[FQN]]:
    """Names in groups of two and more that are one region of memory, in the order of `tensors`.

    Views that merely overlap are not tied, nor are empty tensors.
    """
    groups: dict[Hashable, list[FQN]] = {}
    for name, tensor in tensors.items():
        key = region(tensor)
        if key is not None:
            groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def find_ties(model: Model, tensors: Mapping[FQN, Tensor]) -> dict[FQN, FQN]:
    """Alias to kept name, for each tied name of `model` but the kept ones.

    Kept is the first name that no transformers model inside declares as an alias (in
    `all_tied_weights_keys` or `_tied_weights_keys`), else the first in module order.
    """
    ties: dict[FQN, FQN] = {}
    groups = tied_groups(tensors)
    if not groups:
        return ties
    declared = _declared_aliases(model, [name for group in groups for name in group])
    for group in groups:
        kept = next((name for name in group if name not in declared), group[0])
        ties.update({name: kept for name in group if name != kept})
    return ties


def _declared_aliases(model: Model, names: Iterable[FQN]) -> set[FQN]:
    aliases: set[FQN] = set()
    for place in places(model):
        literal, patterns = _declaration(place.module)
        if not literal and not patterns:
            continue
        for name in names:
            inner = name.removeprefix(place.canonical)
            if not name.startswith(place.canonical):
                continue
            if inner in literal or any(re.search(pattern, inner) for pattern in patterns):
                aliases.add(name)
    return aliases


def _declaration(module: nn.Module) -> tuple[set[str], list[str]]:
    """(names, patterns) that `module` itself declares to be aliases of another of its names."""
    expanded = vars(module).get("all_tied_weights_keys")  # transformers 5: {alias: source}
    if isinstance(expanded, Mapping):
        return set(expanded), []
    declared = getattr(type(module), "_tied_weights_keys", None)
    if isinstance(declared, Mapping | list | tuple | set):  # 5: {pattern: ...}, 4: [pattern]
        return set(), [str(pattern) for pattern in declared]
    return set(), []
