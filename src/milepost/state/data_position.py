"""Where a training stands in its data: for each rank, and for the whole job.

What a rank has read means nothing to another number of ranks. An object that knows where the whole
job stands says so by `global_state_dict`, and can be set there by `load_global_state_dict`; a data
loader does when its sampler is such an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, Sampler

from milepost.errors import InvalidInputError


@runtime_checkable
class GlobalPosition(Protocol):
    """An object that knows the position of the whole job, whatever the number of ranks."""

    def global_state_dict(self) -> Any:
        """The same on all ranks that have made the same steps, and plain values."""
        ...

    def load_global_state_dict(self, state_dict: Any) -> None:
        """Go on from there, as one of the ranks that there are now: nothing is repeated and nothing
        left out."""
        ...


@runtime_checkable
class LoaderPosition(GlobalPosition, Protocol):
    """The same, inside a data loader, which reads ahead of what it has given.

    `position_key` is a key of its `state_dict()` that nothing else has; `position_of(state)` is the
    position of the whole job by such a state, which the loader took at its last batch.
    """

    position_key: str

    def position_of(self, state_dict: Mapping[str, Any]) -> Any: ...


def position_of(obj: object, own_state: Any) -> Any:
    """The position of the whole job by `obj`, whose state is `own_state`; None if it has none."""
    if isinstance(obj, GlobalPosition):
        return obj.global_state_dict()
    inner = _inner(obj)
    if inner is None:
        return None
    found = list(_states(own_state, inner.position_key))
    return inner.position_of(found[-1]) if found else None


def can_seek(obj: object) -> bool:
    """Whether `seek` can set `obj` to a position of the whole job."""
    return isinstance(obj, GlobalPosition) or _inner(obj) is not None


def seek(obj: Any, position: Any) -> None:
    """Go on from a position of the whole job, as one of the ranks that there are now."""
    if isinstance(obj, GlobalPosition):
        obj.load_global_state_dict(position)
        return
    inner = _inner(obj)
    if inner is None:
        raise InvalidInputError(f"a {type(obj).__name__} cannot be set to a position of the job")
    inner.load_global_state_dict(position)
    obj.load_state_dict({})  # torchdata's loader forgets its iterator, and begins a new one


def is_position(obj: object) -> bool:
    """Whether the state of `obj` is a place in data, which belongs to one number of ranks."""
    return can_seek(obj) or isinstance(obj, DataLoader | Sampler | Dataset)


def _inner(obj: object) -> LoaderPosition | None:
    """What knows the position inside a data loader."""
    if not isinstance(obj, DataLoader):
        return None
    places = (obj.sampler, getattr(obj.batch_sampler, "sampler", None))
    return next((place for place in places if isinstance(place, LoaderPosition)), None)


def _states(tree: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every mapping in a nested state that has `key`."""
    if isinstance(tree, Mapping):
        if key in tree:
            yield tree
        for value in tree.values():
            yield from _states(value, key)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _states(value, key)
