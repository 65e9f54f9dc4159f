"""Reading `tokenizer.model`, a protocol buffer of SentencePiece, as far as GGUF needs it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from milepost.tools.gguf.token_table import TokenTable, TokenType


class ModelKind(IntEnum):
    """How a model finds its pieces, by SentencePiece's numbers."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    text: str
    score: float
    kind: TokenType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """`charsmap` is empty for a model that leaves text as it is."""

    pieces: tuple[Piece, ...]
    kind: ModelKind
    has_bytes: bool
    charsmap: bytes
    adds_space: bool
    removes_spaces: bool


def read_model_file(data: bytes, table: TokenTable) -> ModelFile:
    """`InvalidInputError` for bytes that are no such model, and for models by words or chars."""
    try:
        fields = list(_fields(data))
        pieces = tuple(_piece(value) for number, value in fields if number == 1)
        trainer = {key: value for n, part in fields if n == 2 for key, value in _fields(part)}
        normal = {key: value for n, part in fields if n == 3 for key, value in _fields(part)}
    except (IndexError, TypeError, ValueError, struct.error):
        raise table.refuse("is no SentencePiece model") from None
    kind = trainer.get(3, ModelKind.UNIGRAM)
    if not pieces or kind not in tuple(ModelKind):
        raise table.refuse("is no SentencePiece model of pieces (BPE or Unigram)")
    return ModelFile(
        pieces=pieces,
        kind=ModelKind(kind),
        has_bytes=bool(trainer.get(35, 0)),
        charsmap=bytes(normal.get(2, b"")),
        adds_space=bool(normal.get(3, 1)),
        removes_spaces=bool(normal.get(4, 1)),
    )


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    score = struct.unpack("<f", found[2])[0] if 2 in found else 0.0
    return Piece(text=found[1].decode(), score=score, kind=TokenType(found.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an integer, or bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        else:
            length = {1: 8, 5: 4}[wire] if wire in (1, 5) else len(data) + 1
        if position + length > len(data):
            raise ValueError("cut short")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
