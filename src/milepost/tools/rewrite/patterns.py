"""Tensors chosen by name: one way of writing patterns for all verbs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

from milepost.errors import InvalidInputError


class Patterns:
    """Names that fit any of the patterns.

    A pattern is a glob over the whole name (`model.layers.*.mlp.gate.weight`; `*` also crosses
    dots), or `re:` and a regular expression, which must fit the whole name.

    >>> kept = Patterns(["*norm.weight", r"re:.*\\.bias"])
    >>> "model.norm.weight" in kept, "a.bias" in kept, "a.weight" in kept
    (True, True, False)
    """

    def __init__(self, patterns: Sequence[str], *, option: str = "pattern") -> None:
        self._option = option
        self._compiled = {pattern: _compiled(pattern, option) for pattern in patterns}

    def __contains__(self, name: str) -> bool:
        return any(expression.fullmatch(name) for expression in self._compiled.values())

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def unused(self, names: Iterable[str]) -> list[str]:
        """A message for each pattern that fits none of `names`: it is misspelt."""
        known = list(names)
        return [
            f"{self._option} {pattern!r} fits no tensor"
            for pattern, expression in self._compiled.items()
            if not any(expression.fullmatch(name) for name in known)
        ]


def _compiled(pattern: str, option: str) -> re.Pattern[str]:
    source = pattern.removeprefix("re:") if pattern.startswith("re:") else translate(pattern)
    try:
        return re.compile(source)
    except re.error as error:
        raise InvalidInputError(
            f"{option} {pattern!r}: not a regular expression: {error}"
        ) from None
