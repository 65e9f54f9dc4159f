"""SentencePiece tokenizers: BPE with byte fallback (Llama 2's kind), and Unigram."""

from __future__ import annotations

import base64
from typing import Any

from milepost.tools.gguf.byte_level import flattened, merges_of
from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.gguf.model_file import ModelKind, read_model_file
from milepost.tools.gguf.token_table import TokenTable, TokenType

_SPACE = "\u2581"
_BYTES_IN_UNIGRAM = (
    "is a Unigram model with byte fallback; readers of such models in GGUF write the unknown token "
    "where it writes bytes"
)


def byte_fallback_keys(document: dict[str, Any], table: TokenTable) -> Keys:
    """Fill `table` from a tokenizer.json of BPE with byte fallback.

    Readers merge the neighbours whose union has the best score, so scores say the order of merges.
    `InvalidInputError` for merges that no scores can say.
    """
    model = document["model"]
    for text, number in model["vocab"].items():
        table.put_piece(number, text)
    if model.get("unk_token") in table.ids:
        table.mark(table.ids[model["unk_token"]], TokenType.UNKNOWN)
    ranks = _ranks(merges_of(model, table), table)
    _require_all_merges(ranks, merges_of(model, table), model["vocab"], table)
    scores = {table.ids[text]: -float(rank) for text, rank in ranks.items()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": table.spread(scores, -float(len(ranks))),
        "tokenizer.ggml.add_space_prefix": _adds_space(document, table),
    }


def _ranks(merges: list[tuple[str, str]], table: TokenTable) -> dict[str, int]:
    """Pieces in the order in which merges make them. Merges into one piece must be neighbours."""
    ranks: dict[str, int] = {}
    last = None
    for left, right in merges:
        piece = left + right
        if piece not in table.ids:
            raise table.refuse(f"merges {left!r} and {right!r} into no token")
        if piece != last and piece in ranks:
            raise table.refuse(
                f"makes {piece!r} by merges of different rank, which scores in GGUF cannot say"
            )
        ranks.setdefault(piece, len(ranks))
        last = piece
    return ranks


def _require_all_merges(
    ranks: dict[str, int], merges: list[tuple[str, str]], vocab: dict[str, int], table: TokenTable
) -> None:
    """Readers also merge what no merge lists, where the union is a token: there must be none."""
    listed = set(merges)
    for piece, number in vocab.items():
        if number in table.added:
            continue
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            if pair not in listed and all(part in ranks or len(part) == 1 for part in pair):
                raise table.refuse(
                    f"does not merge {pair[0]!r} and {pair[1]!r} into the token {piece!r}, and "
                    "readers of SentencePiece vocabularies in GGUF would"
                )


def _adds_space(document: dict[str, Any], table: TokenTable) -> bool:
    """Whether a space goes before the text. What else changes text is refused."""
    adds = False
    for step in flattened(document.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == _SPACE:
            adds = True
        elif kind != "Replace" or (step.get("pattern"), step.get("content")) != (
            {"String": " "},
            _SPACE,
        ):
            raise table.refuse(f"normalises text ({kind}), which GGUF cannot say of such a model")
    return _metaspace(document, table) or adds


def _metaspace(document: dict[str, Any], table: TokenTable) -> bool:
    adds = False
    for step in flattened(document.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") != "Metaspace" or step.get("replacement") != _SPACE:
            raise table.refuse(f"cuts text ({step.get('type')}) before it looks for pieces")
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        adds = scheme != "never"
        if step.get("split", True) and document["model"]["type"] == "BPE":
            across = [text for text in table.ids if _SPACE in text.lstrip(_SPACE)]
            if across:
                raise table.refuse(
                    f"cuts text at spaces, and readers of GGUF would find {across[0]!r} across one"
                )
    return adds


def unigram_keys(document: dict[str, Any], table: TokenTable) -> Keys:
    """Fill `table` from a tokenizer.json of Unigram."""
    model = document["model"]
    if model.get("byte_fallback"):
        raise table.refuse(_BYTES_IN_UNIGRAM)
    scores = {}
    for number, (text, score) in enumerate(model["vocab"]):
        table.put_piece(number, text)
        scores[number] = score
    if model.get("unk_id") is not None:
        table.mark(model["unk_id"], TokenType.UNKNOWN)
    keys: Keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": table.spread(scores, 0.0),
        "tokenizer.ggml.add_space_prefix": _metaspace(document, table),
    }
    removes = False
    for step in flattened(document.get("normalizer"), "normalizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            keys["tokenizer.ggml.precompiled_charsmap"] = charsmap
        elif kind == "Replace" and pattern == {"Regex": " {2,}"}:
            removes = True
        elif kind != "Strip":
            raise table.refuse(f"normalises text ({kind}), which GGUF cannot say of such a model")
    keys["tokenizer.ggml.remove_extra_whitespaces"] = removes
    return keys


def model_file_keys(data: bytes, table: TokenTable) -> Keys:
    """Fill `table` from the bytes of a SentencePiece model; tokens that were added are there."""
    model = read_model_file(data, table)
    for number, piece in enumerate(model.pieces):
        table.put(number, piece.text, piece.kind)
    if model.kind is ModelKind.UNIGRAM and model.has_bytes:
        raise table.refuse(_BYTES_IN_UNIGRAM)
    scores = {number: piece.score for number, piece in enumerate(model.pieces)}
    keys: Keys = {
        "tokenizer.ggml.model": "llama" if model.kind is ModelKind.BPE else "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": table.spread(scores, -float(len(model.pieces))),
        "tokenizer.ggml.add_space_prefix": model.adds_space,
        "tokenizer.ggml.remove_extra_whitespaces": model.removes_spaces,
    }
    if model.charsmap:
        if model.kind is ModelKind.BPE:
            raise table.refuse("normalises text, which GGUF cannot say of a BPE model")
        keys["tokenizer.ggml.precompiled_charsmap"] = model.charsmap
    return keys
