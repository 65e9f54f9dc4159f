"""The tokenizer of a model as GGUF keys: tokens, merges or scores, special ids, chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import InvalidInputError
from milepost.tools.gguf.byte_level import byte_level_keys
from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.gguf.sentencepiece import byte_fallback_keys, model_file_keys, unigram_keys
from milepost.tools.gguf.special_tokens import special_keys
from milepost.tools.gguf.token_table import TokenTable, TokenType

TOKENIZER, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKeys:
    """`notes` say what the format has no place for."""

    keys: Keys
    notes: tuple[str, ...]


def tokenizer_keys(directory: Path, config: dict[str, Any], size: int) -> TokenizerKeys:
    """Keys of the tokenizer in `directory` for a model of `size` embedding rows.

    `config` is the content of config.json. `InvalidInputError` when there is no tokenizer, or one
    that readers of the format would take for another.
    """
    settings = read_object(directory / TOKENIZER_CONFIG) or {}
    document = read_object(directory / TOKENIZER)
    table = TokenTable(directory / TOKENIZER, size)
    if document is not None:
        keys = _document_keys(document, table)
    elif (directory / TOKENIZER_MODEL).is_file():
        table = TokenTable(directory / TOKENIZER_MODEL, size)
        for number, entry in dict(settings.get("added_tokens_decoder") or {}).items():
            table.add({**entry, "id": int(number)})
        keys = model_file_keys((directory / TOKENIZER_MODEL).read_bytes(), table)
    else:
        raise InvalidInputError(
            f"{directory}: has no {TOKENIZER} and no {TOKENIZER_MODEL}, and a GGUF file needs its "
            "tokenizer; save it there with the fast tokenizer of transformers (save_pretrained)",
            path=directory,
        )
    special = special_keys(directory, document or {}, settings, config, table)
    _mark_unknown(keys, special, table)
    listed: Keys = {
        "tokenizer.ggml.model": keys.pop("tokenizer.ggml.model"),
        "tokenizer.ggml.tokens": table.texts(),
        "tokenizer.ggml.token_type": table.types(),
    }
    return TokenizerKeys(keys={**listed, **keys, **special}, notes=tuple(table.notes()))


def _mark_unknown(keys: Keys, special: Keys, table: TokenTable) -> None:
    """SentencePiece gives the unknown token a type of its own; in byte-level BPE nothing is."""
    number = special.get("tokenizer.ggml.unknown_token_id")
    others = [special.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")]
    if keys["tokenizer.ggml.model"] != "gpt2" and isinstance(number, int) and number not in others:
        table.mark(number, TokenType.UNKNOWN)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInputError(f"{path}: is no JSON: {error}", path=path) from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path}: is no JSON object", path=path)
    return found


def _document_keys(document: dict[str, Any], table: TokenTable) -> Keys:
    for entry in document.get("added_tokens") or ():
        table.add(entry)
    model = document.get("model") or {}
    kind = model.get("type")
    if kind == "BPE" and model.get("byte_fallback"):
        return byte_fallback_keys(document, table)
    if kind == "BPE":
        return byte_level_keys(document, table)
    if kind == "Unigram":
        return unigram_keys(document, table)
    raise InvalidInputError(
        f"{table.path}: a {kind} model; to-gguf writes BPE and Unigram tokenizers", path=table.path
    )
