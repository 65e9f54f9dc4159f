"""Dotted names of places in a saved structure, for messages and listings."""

from __future__ import annotations

MAX_NAME_LENGTH = 200


def join(key: str, name: object) -> str:
    """`key.name`, short and printable whatever the name is.

    >>> join("model_state", "lm_head.weight")
    'model_state.lm_head.weight'
    """
    plain = isinstance(name, str | int | float)
    text = str(name)[:MAX_NAME_LENGTH] if plain else f"<{type(name).__name__}>"
    return f"{key}.{text}" if key else text
