"""Places inside a document, and values found there, as error messages show them."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_SHOWN_CHARACTERS = 160
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def shown(value: object) -> str:
    """`repr(value)`, cut in the middle when a hostile file made it long.

    >>> shown("lm_head.weight")
    "'lm_head.weight'"
    """
    if isinstance(value, str | bytes):
        value = value[: 2 * MAX_SHOWN_CHARACTERS]
    elif isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return printable(repr(value))
    except ValueError:  # an integer inside of it has more digits than Python prints
        return f"a {type(value).__name__}"


def printable(text: str) -> str:
    """`text` for a message: control characters escaped, cut in the middle when it is long."""
    text = _cut(text)
    if text.isprintable():
        return text
    return _cut(
        "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in text
        )
    )


def _cut(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    half = MAX_SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


def place(path: Iterable[str | int]) -> str:
    """The dotted place of a value, whole; a message shows it `printable`.

    >>> place(["tensors", "lm_head.weight", "extents", 2, "end"])
    'tensors["lm_head.weight"].extents[2].end'
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN.fullmatch(step):
            text += f".{step}" if text else step
        else:
            escaped = step.replace("\\", "\\\\").replace('"', '\\"')
            text += f'["{escaped}"]'
    return text
