"""Small stateful objects (schedulers, scalers): checked before, rolled back after a failure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from milepost.errors import MismatchError

# What advances by itself; all other entries of a scheduler are settings.
_COUNTERS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}
    | {"best", "num_bad_epochs", "cooldown_counter", "base_lrs", "_schedulers", "scale"}
    | {"_growth_tracker", "verbose"}
)


def check_shape(obj: Any, saved: Any, *, key: str) -> None:
    """Refuse a saved state that `obj` cannot have given: other kinds, or lists of other lengths.

    Entries that only one side has are let pass, since versions of torch differ in them, unless no
    entry is common.
    """
    live = obj.state_dict()
    if isinstance(live, Mapping) != isinstance(saved, Mapping):
        raise MismatchError(
            f"{key}: the checkpoint holds a {type(saved).__name__}, {type(obj).__name__} has a "
            f"{type(live).__name__}; make the object that was saved"
        )
    if not isinstance(live, Mapping):
        return
    wrong = [
        f"{name} (checkpoint {_described(saved[name])}, now {_described(live[name])})"
        for name in saved
        if name in live and not _alike(saved[name], live[name])
    ]
    if saved and live and not set(saved) & set(live):
        wrong.append(f"no common entry: saved {sorted(map(str, saved))[:5]}")
    if wrong:
        raise MismatchError(
            f"{key}: the saved state does not fit {type(obj).__name__}: {', '.join(wrong)}; make "
            "the object that was saved, with as many parameter groups"
        )


def _alike(saved: Any, live: Any) -> bool:
    if isinstance(saved, list | tuple) or isinstance(live, list | tuple):
        both = isinstance(saved, list | tuple) and isinstance(live, list | tuple)
        return both and len(saved) == len(live)
    return isinstance(saved, Mapping) == isinstance(live, Mapping) or None in (saved, live)


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def restore_all(items: list[tuple[str, Any, Any]]) -> None:
    """Give each (key, object, state) its state; when one refuses, all are as they were before.

    `MismatchError` says which and why.
    """
    before: list[tuple[Any, Any]] = []
    for key, obj, state in items:
        before.append((obj, copy.deepcopy(obj.state_dict())))
        try:
            obj.load_state_dict(copy.deepcopy(state))
        except Exception as error:
            for earlier, own in reversed(before):
                if own:  # a disabled scaler has none, and takes none back
                    earlier.load_state_dict(own)
            raise MismatchError(
                f"{key}: {type(obj).__name__} does not take the saved state: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; nothing was changed"
            ) from error


def schedule_notes(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What of a scheduler's settings the load changed: the saved ones are in force."""
    return [
        f"{key}: {name} is {after[name]!r:.60} as saved, not {value!r:.60} as it was made; set it "
        "after the load if the schedule is to change"
        for name, value in before.items()
        if name in after
        and name.rpartition(".")[2] not in _COUNTERS
        and _differ(value, after[name])
    ]


def _differ(a: Any, b: Any) -> bool:
    plain = (bool, int, float, str, list, tuple)
    return isinstance(a, plain) and isinstance(b, plain) and a != b


def settings_of(obj: Any) -> dict[str, Any]:
    """The state of a scheduler of torch, to compare, with those it is made of; empty for others."""
    if not isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return {}
    return _flat(copy.deepcopy(obj.state_dict()))


def _flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {f"{prefix}{name}": value for name, value in state.items() if name != "_schedulers"}
    for number, inner in enumerate(state.get("_schedulers", ())):
        found |= _flat(inner, f"{prefix}_schedulers[{number}].")
    return found
