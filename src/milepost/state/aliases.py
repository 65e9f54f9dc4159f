"""One name for a tensor that another stage of a pipeline keeps under its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milepost.state.model import ModelState
from milepost.state.names import FQN


def under_kept_names(model: ModelState, aliases: Mapping[FQN, FQN]) -> ModelState:
    """`model` with each leaf that is an alias under the kept name, unless it has both.

    What was a leaf becomes a tie, so a save writes it once and a load finds it.
    """
    own = {a: kept for a, kept in aliases.items() if a in model.leaves and kept not in model.leaves}
    if not own:
        return model
    return replace(
        model,
        leaves={own.get(name, name): tensor for name, tensor in model.leaves.items()},
        ties={**{a: own.get(kept, kept) for a, kept in model.ties.items()}, **own},
        names=kept_names(model.names, own),
        frozen=frozenset(own.get(name, name) for name in model.frozen),
    )


def optimizer_aliases(
    aliases: Mapping[str, Mapping[FQN, FQN]], *, primary: str | None
) -> dict[FQN, FQN]:
    """Aliases of all models under the names that `parameter_names` gives."""
    return {
        f"{prefix}{alias}": f"{prefix}{kept}"
        for key, own in aliases.items()
        for prefix in ["" if key == primary else f"{key}/"]
        for alias, kept in own.items()
    }


def kept_names(names: Mapping[int, FQN], aliases: Mapping[FQN, FQN]) -> dict[int, FQN]:
    """Names of live parameters with each alias replaced, unless the kept name is among them."""
    held = set(names.values())
    return {
        identity: aliases[name] if name in aliases and aliases[name] not in held else name
        for identity, name in names.items()
    }
