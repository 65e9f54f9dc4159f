"""Tokens by id, each with its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from milepost.errors import InvalidInputError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TokenType(IntEnum):
    """The types of GGUF; those of SentencePiece have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenTable:
    """Tokens of a tokenizer for `size` rows of an embedding. Rows without a token are padding."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size
        self._texts: dict[int, str] = {}
        self._types: dict[int, TokenType] = {}
        self._stripping: list[str] = []
        self.ids: dict[str, int] = {}
        self.added: set[int] = set()

    def refuse(self, message: str) -> InvalidInputError:
        """The error for what is wrong with this tokenizer."""
        return InvalidInputError(f"{self.path}: {message}", path=self.path)

    def put(self, number: int, text: str, kind: TokenType) -> None:
        """A token of the vocabulary; one that was added keeps its type."""
        if not 0 <= number < self._size:
            raise self.refuse(
                f"token {text!r} has id {number}, and the embedding has {self._size} rows"
            )
        if self._texts.get(number, text) != text:
            raise self.refuse(f"id {number} is {self._texts[number]!r} and {text!r}")
        self._texts[number] = text
        self._types.setdefault(number, kind)
        self.ids[text] = number

    def add(self, entry: Mapping[str, Any]) -> None:
        """A token that is matched whole: an entry of `added_tokens`."""
        number, text = int(entry["id"]), str(entry["content"])
        self.put(
            number, text, TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
        )
        self.added.add(number)
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            self._stripping.append(text)

    def put_piece(self, number: int, text: str) -> None:
        """A piece of a SentencePiece vocabulary."""
        self.put(number, text, TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL)

    def mark(self, number: int, kind: TokenType) -> None:
        """Give a token another type than it was put with."""
        self._types[number] = kind

    def texts(self) -> list[str]:
        """Texts by id, [size]."""
        return [self._texts.get(number, f"[PAD{number}]") for number in range(self._size)]

    def types(self) -> list[int]:
        """Types by id, [size]."""
        unused = TokenType.UNUSED
        return [int(self._types.get(number, unused)) for number in range(self._size)]

    def spread(self, scores: Mapping[int, float], default: float) -> list[float]:
        """Scores by id, [size]."""
        return [float(scores.get(number, default)) for number in range(self._size)]

    def notes(self) -> list[str]:
        """What GGUF cannot say of these tokens."""
        if not self._stripping:
            return []
        return [
            f"{len(self._stripping)} added tokens take the space beside them along, or match whole "
            f"words only, such as {self._stripping[0]}; GGUF has no place for that"
        ]
