"""Extra state from several objects, each under a key of its own.

`extra_state` then holds `{"contributors": {key: state}}`. A flat dict, in which contributors of an
older program merged their entries, is still handed over whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from milepost._warn import warn_user
from milepost.errors import CheckpointWarning, FormatError, InvalidInputError

CONTRIBUTORS_KEY = "contributors"


@runtime_checkable
class CheckpointContributor(Protocol):
    """An object with state of its own. Its key is `checkpoint_key` if it has one, else its class's
    name; it must stay the same over the life of a run."""

    def get_checkpoint_state(self) -> Mapping[str, Any] | None:
        """Plain containers and tensors; None when there is nothing to keep."""
        ...

    def load_checkpoint_state(self, state: Mapping[str, Any] | None) -> None:
        """Take back what `get_checkpoint_state` gave; None when the checkpoint has none."""
        ...


def collect_extra_state(*contributors: Any) -> dict[str, Any] | None:
    """The states of all contributors for `save_checkpoint(extra_state=...)`; None when all are
    empty.

    Objects that contribute nothing (no `get_checkpoint_state`) are skipped. Two contributors of one
    key are refused: the second would take the place of the first. Call it on every rank.
    """
    found: dict[str, Any] = {}
    for key, contributor in _keyed(contributors).items():
        state = contributor.get_checkpoint_state()
        if state is not None:
            found[key] = dict(state)
    return {CONTRIBUTORS_KEY: found} if found else None


def load_extra_state(state: Mapping[str, Any] | None, *contributors: Any) -> list[str]:
    """Hand each contributor its state, or None when there is none for it.

    Returns the keys that nobody took, with a warning that names them.
    """
    keyed = _keyed(contributors)
    if state is not None and not isinstance(state, Mapping):
        raise FormatError(f"extra state: expected a dict, found a {type(state).__name__}")
    if state is None or CONTRIBUTORS_KEY not in state:
        for contributor in keyed.values():
            contributor.load_checkpoint_state(state)
        return []
    saved = state[CONTRIBUTORS_KEY]
    if not isinstance(saved, Mapping):
        raise FormatError(
            f"extra state: {CONTRIBUTORS_KEY}: expected a dict, found a {type(saved).__name__}"
        )
    for key, contributor in keyed.items():
        contributor.load_checkpoint_state(saved.get(key))
    unclaimed = [str(key) for key in saved if key not in keyed]
    if unclaimed:
        warn_user(
            f"extra state of {', '.join(unclaimed)} is in the checkpoint, and no contributor of "
            "that key was given; it is not restored",
            CheckpointWarning,
        )
    return unclaimed


def contributor_key(contributor: object) -> str:
    """The key under which the state of `contributor` is kept."""
    return str(getattr(contributor, "checkpoint_key", None) or type(contributor).__name__)


def _keyed(objects: tuple[Any, ...]) -> dict[str, CheckpointContributor]:
    keyed: dict[str, CheckpointContributor] = {}
    for contributor in objects:
        if not isinstance(contributor, CheckpointContributor):
            continue
        key = contributor_key(contributor)
        if keyed.get(key, contributor) is not contributor:
            raise InvalidInputError(
                f"two contributors have the key {key!r} ({type(keyed[key]).__qualname__} and "
                f"{type(contributor).__qualname__}), and one state would take the place of the "
                "other; give one of them a checkpoint_key attribute"
            )
        keyed[key] = contributor
    return keyed
