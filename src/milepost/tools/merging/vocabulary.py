"""Vocabularies of several models, and the rows of their embeddings by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.errors import FormatError, InvalidInputError

TOKENIZER = "tokenizer.json"
_ENDS = (
    *("embed_tokens.weight", "lm_head.weight", "wte.weight", "tok_embeddings.weight"),
    *("word_embeddings.weight", "embed_in.weight", "embed_out.weight"),
)


def is_by_token(name: str) -> bool:
    """Whether the rows of a tensor belong to tokens, by its name."""
    return name.endswith(_ENDS)


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token, added ones too; None without a `tokenizer.json`.

    Errors: `FormatError` for one that has no vocabulary.
    """
    place = directory / TOKENIZER
    if not place.is_file():
        return None
    try:
        return vocabulary_of(json.loads(place.read_bytes()))
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{place}: no tokenizer of the tokenizers library: {error}") from error


def vocabulary_of(document: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token of a parsed `tokenizer.json`."""
    vocab = document["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of token and score, in order of ids
        found = {str(token): number for number, (token, *_) in enumerate(vocab)}
    else:
        found = {str(token): int(number) for token, number in vocab.items()}
    for added in document.get("added_tokens") or ():
        found[str(added["content"])] = int(added["id"])
    return found


def united(document: dict[str, Any], others: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """The tokenizer `document` with the tokens of others that it lacks, as added tokens at the end.

    They come in the order of the others and of their ids.
    """
    known = vocabulary_of(document)
    added = list(document.get("added_tokens") or ())
    following = max(known.values(), default=-1) + 1
    for other in others:
        for token in sorted(other, key=other.__getitem__):
            if token in known:
                continue
            known[token] = following
            added.append(
                {
                    "id": following,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": False,
                }
            )
            following += 1
    return {**document, "added_tokens": added}


class Owned(NamedTuple):
    """Which rows a model has of the output: `own[row]` is its row, -1 for none."""

    own: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How rows of embeddings are brought together: `rows` of them in the output.

    `owned` has an entry for every model in the order of the inputs; `base` is the position of the
    model whose rows fill gaps, if there is one.
    """

    rows: int
    owned: Sequence[Owned]
    base: int | None

    def aligned(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """The tables with the rows of the output, gaps filled.

        A row that a model lacks is that of the only model that has it; else that of the base, if
        it has it; else the mean of those that have it; else the mean of all rows of the model.
        """
        there = torch.stack([each.own >= 0 for each in self.owned])
        found = [
            table[each.own.clamp(min=0)] for table, each in zip(tables, self.owned, strict=True)
        ]
        counts = there.sum(0)
        for row in (counts < len(tables)).nonzero().flatten().tolist():
            filler = self._filler([t[row] for t in found], there[:, row].tolist())
            for number, table in enumerate(tables):
                if not there[number, row]:
                    mean = table.float().mean(0) if filler is None else filler
                    found[number][row] = mean.to(table.dtype)
        return found

    def _filler(self, rows: Sequence[Tensor], there: Sequence[bool]) -> Tensor | None:
        having = [row for row, has in zip(rows, there, strict=True) if has]
        if not having:
            return None
        if len(having) > 1 and self.base is not None and there[self.base]:
            return rows[self.base]
        return torch.stack([row.float() for row in having]).mean(0)


def align(
    target: Mapping[str, int],
    vocabularies: Sequence[Mapping[str, int]],
    lengths: Sequence[int],
    *,
    rows: int,
    base: int | None,
) -> Alignment:
    """The alignment of tables of `lengths` rows with `vocabularies` to the ids of `target`.

    Rows of the output that no token has are padding: each model's own at that place, if that is
    padding there too.
    """
    owned = []
    for vocabulary, length in zip(vocabularies, lengths, strict=True):
        index = torch.full((rows,), -1, dtype=torch.int64)
        for token, number in target.items():
            place = vocabulary.get(token, -1)
            if place < length and number < rows:
                index[number] = place
        used, own = set(target.values()), set(vocabulary.values())
        for row in range(rows):
            if row not in used and row < length and row not in own:
                index[row] = row
        owned.append(Owned(index))
    return Alignment(rows=rows, owned=owned, base=base)


def padded(rows: int, multiple: int | None) -> int:
    """`rows`, rounded up to a multiple."""
    if multiple is None:
        return rows
    if multiple < 1:
        raise InvalidInputError(f"pad_to_multiple_of={multiple}: expected at least 1")
    return -(-rows // multiple) * multiple
