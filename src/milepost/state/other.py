"""State that is neither a model nor an optimizer: schedulers, scalers, loaders, plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.state.optimizer import inner_optimizers


class Kind(Enum):
    """How an entry of `state` is saved and restored."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    VALUE = "value"


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a nested container and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def kind_of(obj: object) -> Kind:
    """What `obj` is; a non-empty list or tuple of modules is one model."""
    if isinstance(obj, nn.Module) or _all_modules(obj):
        return Kind.MODEL
    if inner_optimizers(obj):
        return Kind.OPTIMIZER
    if isinstance(obj, Stateful) and not isinstance(obj, type):
        return Kind.STATEFUL
    return Kind.VALUE


def capture_stateful(obj: Stateful) -> Any:
    """The state of `obj`, by reference: encode or copy it before the object moves on."""
    return obj.state_dict()


def restore_stateful(obj: Stateful, value: Any) -> None:
    """Give `value` to `obj`, which may keep references to what is inside."""
    obj.load_state_dict(value)


def restore_value(live: Any, saved: Any) -> Any:
    """`saved`, put into the containers and tensors of `live` as far as these can hold it.

    The caller stores the result where `live` was, since a number cannot be changed in place.
    Entries that were not saved are removed, lists get the saved length, and a tensor of another
    shape or dtype is replaced by one on the device of the live one.

    >>> state = {"step": 0, "seen": [0]}
    >>> restore_value(state, {"step": 37, "seen": [3, 4]}) is state
    True
    >>> state
    {'step': 37, 'seen': [3, 4]}
    """
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        return _restore_tensor(live, saved)
    if isinstance(live, dict) and isinstance(saved, Mapping):
        merged = {
            key: restore_value(live[key], value) if key in live else value
            for key, value in saved.items()
        }
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        kept = [restore_value(old, new) for old, new in zip(live, saved, strict=False)]
        live[:] = kept + saved[len(kept) :]
        return live
    return saved


def _restore_tensor(live: Tensor, saved: Tensor) -> Tensor:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        return saved.to(live.device)
    with torch.no_grad():
        live.copy_(saved)
    return live


def _all_modules(obj: object) -> bool:
    return (
        isinstance(obj, Sequence)
        and not isinstance(obj, str | bytes)
        and len(obj) > 0
        and all(isinstance(part, nn.Module) for part in obj)
    )


def require_fillable(live: Any, value: Any, key: str) -> None:
    """Refuse a live value that cannot take the saved one in place."""
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        if live.shape == value.shape and live.dtype == value.dtype:
            return
        raise InvalidInputError(
            f"state[{key!r}]: saved as {value.dtype} {tuple(value.shape)}, the live tensor is "
            f"{live.dtype} {tuple(live.shape)}; make it like the saved one, or put it into a dict"
        )
    if isinstance(live, dict) and isinstance(value, Mapping):
        return
    if isinstance(live, list) and isinstance(value, list):
        return
    raise InvalidInputError(
        f"state[{key!r}] is a {type(live).__name__} and was saved as a {type(value).__name__}, "
        "which cannot be filled in place; save and load it in a dict, such as "
        "{'progress': {'tokens': 0}}"
    )
