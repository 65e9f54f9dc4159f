"""The boundary where code that is not ours may fail without taking a save with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def attempt(call: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result of `call` and None, or None and what it raised, as text.

    Tokenizers, processors and remote code raise whatever they like (the tokenizers library raises
    bare `Exception`), and the trained weights matter more than any side file.
    """
    try:
        return call(), None
    except Exception as e:  # noqa: BLE001 - foreign code; the caller reports the text as a note
        return None, f"{type(e).__name__}: {first_lines(str(e))}"


def first_lines(text: str, *, limit: int = 300) -> str:
    """`text` on one line, cut to `limit` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 3] + "..."
