"""Inert records of classes that were allowed by name, as plain dicts of their fields.

Only an instance whose state is its attributes can be shown so. What was made from arguments, or is
a list or mapping of its own, would lose that and is refused, with its class and place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

from milepost.errors import CheckpointMigrationError
from milepost.format.lazy import Opaque
from milepost.format.pickle_tree import children
from milepost.layouts.archive_names import join

_SHOWN = 5


def plain_record_tree(tree: Any, *, where: str) -> tuple[Any, list[str]]:
    """`tree` with records as dicts, and a note on each class. What is shared stays shared.

    `CheckpointMigrationError` lists the records that no dict can stand for.
    """
    if not _holds_record(tree, {}):
        return tree, []
    plainer = _Plainer()
    result = plainer.value(tree, "")
    if plainer.refused:
        more = len(plainer.refused) - _SHOWN
        raise CheckpointMigrationError(
            f"{where}: {'; '.join(plainer.refused[:_SHOWN])}"
            f"{f'; and {more} more' if more > 0 else ''}; no plain record can stand for that: "
            "save the file again with plain values in its place, by the program that wrote it",
            path=where,
        )
    notes = [f"{name}: {n} stored as plain fields" for name, n in plainer.count.items()]
    return result, notes


def _holds_record(value: Any, known: dict[int, bool]) -> bool:
    if isinstance(value, Opaque):
        return True
    if id(value) not in known:
        known[id(value)] = False
        known[id(value)] = any(_holds_record(item, known) for item in children(value))
    return known[id(value)]


class _Plainer:
    """One walk that rebuilds the containers with a record somewhere below."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.count: Counter[str] = Counter()
        self.known: dict[int, bool] = {}
        self.made: dict[int, Any] = {}

    def value(self, value: Any, key: str) -> Any:
        if not _holds_record(value, self.known):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = self._rebuilt(value, key)
        return self.made[id(value)]

    def _rebuilt(self, value: Any, key: str) -> Any:
        match value:
            case Opaque():
                return self._record(value, key)
            case dict() if not any(_holds_record(name, self.known) for name in value):
                return self._mapping(value, key)
            case list():
                return [self.value(item, join(key, n)) for n, item in enumerate(value)]
            case tuple():
                return tuple(self.value(item, join(key, n)) for n, item in enumerate(value))
            case deque():
                return deque((self.value(item, key) for item in value), value.maxlen)
            case SimpleNamespace():
                fields = vars(value).items()
                return SimpleNamespace(**{n: self.value(v, join(key, n)) for n, v in fields})
            case _:
                self.refused.append(f"{key}: a record inside a {type(value).__name__}")
                return value

    def _mapping(self, value: dict[Any, Any], key: str) -> dict[Any, Any]:
        result: dict[Any, Any] = (
            defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        )
        for name, item in value.items():
            result[name] = self.value(item, join(key, name))
        if isinstance(value, OrderedDict):
            attributes = {n: self.value(item, join(key, n)) for n, item in vars(value).items()}
            vars(result).update(attributes)
        return result

    def _record(self, record: Opaque, key: str) -> Any:
        why = _why_not_plain(record)
        if why is not None:
            self.refused.append(f"{key or 'the root'}: an instance of {record.class_name} {why}")
            return record
        self.count[record.class_name] += 1
        return {n: self.value(item, join(key, n)) for n, item in record.fields().items()}


def _why_not_plain(record: Opaque) -> str | None:
    if record.args or record.kwargs:
        return f"was made from arguments ({record.args!r:.40})"
    if record.items or record.entries:
        return "is a container of its own"
    parts = record.state if isinstance(record.state, tuple) else (record.state,)
    if len(parts) > 2 or not all(part is None or isinstance(part, dict) for part in parts):
        return f"has a state of its own kind ({type(record.state).__name__})"
    if not all(isinstance(name, str) for part in parts if isinstance(part, dict) for name in part):
        return "has attributes whose names are no text"
    return None
