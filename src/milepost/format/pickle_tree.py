"""Bounds on what a pickle may build, so that no later walk over it can be made to explode.

A few bytes of pickle can describe a tuple nested a million deep (a crash when it is hashed), a
list that contains itself, or a structure that doubles with every byte. Such trees are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from milepost.format.lazy import LazyTensor, Opaque

MAX_DEPTH = 200
MAX_KEY_DEPTH = 16


class Budget:
    """Elements and bytes that constructors may copy, and walks may visit, for this input."""

    def __init__(self, input_nbytes: int) -> None:
        self.left = 2**16 + 16 * input_nbytes
        self.max_values = 2**16 + 100 * input_nbytes

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ValueError("it builds far more data than it holds")

    def spend_copies(self, args: tuple[object, ...]) -> None:
        """Pay for a constructor that copies its arguments."""
        for value in args:
            if isinstance(value, str | bytes | bytearray | list | tuple | dict | set | frozenset):
                self.spend(len(value))


def check_key(key: object, budget: Budget) -> None:
    """Refuse a key whose hash would recurse deeply or take long."""
    if isinstance(key, tuple | frozenset):
        waiting: list[tuple[object, int]] = [(key, 1)]
        while waiting:
            value, depth = waiting.pop()
            budget.spend(1)
            if depth > MAX_KEY_DEPTH:
                raise ValueError("a key is nested too deeply")
            if isinstance(value, tuple | frozenset):
                budget.spend(len(value))
                waiting.extend((item, depth + 1) for item in value)


def check_tree(tree: object, budget: Budget) -> None:
    """Refuse a tree that is too deep, contains itself, or is huge once unfolded."""
    depth: dict[int, int] = {}
    count: dict[int, int] = {}
    open_ids: set[int] = set()
    path: list[tuple[object, Iterator[object]]] = [(tree, iter(children(tree)))]
    open_ids.add(id(tree))
    while path:
        value, rest = path[-1]
        child = next(rest, path)
        if child is path:
            path.pop()
            open_ids.discard(id(value))
            _close(value, depth, count, budget)
        elif id(child) in open_ids:
            raise ValueError("a value contains itself")
        elif id(child) not in depth and is_container(child):
            open_ids.add(id(child))
            path.append((child, iter(children(child))))


def _close(value: object, depth: dict[int, int], count: dict[int, int], budget: Budget) -> None:
    below = list(children(value))
    depth[id(value)] = 1 + max((depth.get(id(child), 0) for child in below), default=0)
    count[id(value)] = 1 + sum(count.get(id(child), 1) for child in below)
    if depth[id(value)] > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if count[id(value)] > budget.max_values:
        raise ValueError(f"it unfolds to more than {budget.max_values} values")


def is_container(value: object) -> bool:
    """Whether `children` of the value can be something."""
    return isinstance(
        value,
        dict | list | tuple | set | frozenset | deque | Opaque | SimpleNamespace | LazyTensor,
    )


def children(value: object) -> Iterable[object]:
    """The values directly inside a value of a tree that the unpickler built."""
    match value:
        case dict():
            attributes: dict[str, object] = getattr(value, "__dict__", {})
            return [*value.keys(), *value.values(), *attributes.values()]
        case list() | tuple() | set() | frozenset() | deque():
            return value
        case Opaque():
            entries = [part for entry in value.entries for part in entry]
            return [*value.args, *value.kwargs.values(), value.state, *value.items, *entries]
        case SimpleNamespace():
            return list(vars(value).values())
        case LazyTensor():
            return list(value.attributes.values())
        case _:
            return ()
