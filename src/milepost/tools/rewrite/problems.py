"""Everything that is wrong with what was asked, found before a byte is written and told at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from milepost.errors import CheckpointError, InvalidInputError

Result = TypeVar("Result")


class Problems:
    """Collects errors in place of raising the first.

    >>> problems = Problems()
    >>> problems.refuse("w: shape (2, 3) here, (2, 4) there")
    >>> problems.messages
    ['w: shape (2, 3) here, (2, 4) there']
    """

    def __init__(self) -> None:
        self.found: list[CheckpointError] = []

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[CheckpointError]:
        return iter(self.found)

    def add(self, error: CheckpointError) -> None:
        """Keep an error; the same message is kept once."""
        if str(error) not in self.messages:
            self.found.append(error)

    def refuse(self, message: str) -> None:
        """Keep an `InvalidInputError` with this message."""
        self.add(InvalidInputError(message))

    def attempt(self, call: Callable[[], Result]) -> Result | None:
        """What `call` returns; None when it raised an error of Milepost, which is kept."""
        try:
            return call()
        except CheckpointError as error:
            self.add(error)
            return None

    @property
    def messages(self) -> list[str]:
        return [str(error) for error in self.found]

    def raise_if_any(self) -> None:
        """Raise the one error as it is, or `SeveralProblems`."""
        if not self.found:
            return
        if len(self.found) == 1:
            raise self.found[0]
        raise SeveralProblems(self.messages)


def refuse_parent(output: Path, problems: Problems) -> None:
    """Refuse an output below something that is no directory."""
    above = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        problems.refuse(f"{output}: {above} is no directory; choose a place in one")


class SeveralProblems(InvalidInputError):
    """More than one thing is wrong; `problems` has the messages."""

    def __init__(self, problems: list[str]) -> None:
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        super().__init__(f"{len(problems)} problems, nothing was written: {listed}")
        self.problems = tuple(problems)
