"""The files beside the weights of a vision-language model that a text model was put back into."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from milepost.errors import InvalidInputError, MissingExtraError, NotFoundError
from milepost.hf.aux_files import CONFIG, GENERATION_CONFIG
from milepost.hf.card import is_hub_id
from milepost.hf.foreign_calls import attempt
from milepost.hf.model_config import encode, set_dtype
from milepost.hf.side_file_notes import OLD_TEMPLATE, TEMPLATE, TOKENIZER_CONFIG
from milepost.tools.carried import Carried, carried_files
from milepost.tools.rewrite.source import Source

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    TOKENIZER_CONFIG,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_TEMPLATE_FILES = (TEMPLATE, OLD_TEMPLATE)
_TIED = "tie_word_embeddings"
_OF_A_FILE = ("architectures", "auto_map", "transformers_version", "_name_or_path")
_DOWNLOADED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model",
               "*.txt", "*.py")  # fmt: skip


def base_directory(base: str, revision: str | None) -> Path:
    """The directory of a base: itself, or its files from the Hub (or the Hub's cache).

    `NotFoundError` when there is neither, `MissingExtraError` without huggingface_hub.
    """
    place = Path(base)
    if place.exists():
        if revision is not None:
            raise InvalidInputError(
                f"{place}: lies on disk, and --revision is for Hub ids; leave it out", path=place
            )
        return place
    if not is_hub_id(base):
        raise NotFoundError(f"{base}: no such directory, and no Hub id either", path=base)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"{base}: a base from the Hub needs huggingface_hub; pip install 'milepost[hf]'"
        ) from error
    try:
        found = snapshot_download(base, revision=revision, allow_patterns=list(_DOWNLOADED))
    except (OSError, ValueError) as error:
        where = base if revision is None else f"{base} at {revision}"
        raise NotFoundError(f"{where}: cannot be had from the Hub: {error}") from error
    return Path(found)


def composite_config(trained: Source, whole: Source, *, is_tied: bool) -> dict[str, Any]:
    """The base's configuration around the one of the trained language model.

    Both say of the head what `is_tied` does; the dtype is that of the trained one.
    """
    document: dict[str, Any] = deepcopy(whole.config)
    before = document.get("text_config") or {}
    text = {key: value for key, value in trained.config.items() if key not in _OF_A_FILE}
    text |= {key: before[key] for key in _OF_A_FILE if key in before}
    document["text_config"] = deepcopy(text)
    document[_TIED] = document["text_config"][_TIED] = is_tied
    if "vocab_size" in document and "vocab_size" in text:
        document["vocab_size"] = text["vocab_size"]
    dtype = text.get("dtype", text.get("torch_dtype"))
    if isinstance(dtype, str):
        set_dtype(document, [dtype])
    return document


def reattached_files(trained: Source, whole: Source, document: Mapping[str, Any]) -> Carried:
    """What the export has, with `document` as its configuration and the processor of the base.

    Tokenizer and chat template come from the base only where the export has none, and modules of
    Python where the base's configuration names some.
    """
    carried, base = carried_files(trained.checkpoint), carried_files(whole.checkpoint)
    for name in _from_base(carried, base, document):
        carried.documents.pop(name, None)
        carried.paths[name] = base.paths[name]
    carried.paths.pop(CONFIG, None)
    carried.documents[CONFIG] = encode(document)
    carried.notes = [note for note in carried.notes if not note.startswith("no config.json")]
    processors = [name for name in PROCESSOR_FILES if name in carried.names]
    if not processors:
        carried.notes.append("the base has no processor files, so images cannot be prepared")
    return carried


def _from_base(carried: Carried, base: Carried, document: Mapping[str, Any]) -> Iterator[str]:
    wanted = list(PROCESSOR_FILES)
    if not any(name in carried.names for name in _VOCABULARY_FILES):
        carried.notes.append("the export has no tokenizer; it is that of the base")
        wanted += [*_TOKENIZER_FILES, *_TEMPLATE_FILES]
    elif not _has_template(carried):
        wanted += _TEMPLATE_FILES
    if GENERATION_CONFIG not in carried.names:
        wanted.append(GENERATION_CONFIG)
    for name in base.paths:
        if name in wanted or (name.endswith(".py") and "auto_map" in document):
            yield name


def _has_template(carried: Carried) -> bool:
    if any(name in carried.names for name in _TEMPLATE_FILES):
        return True
    place = carried.paths.get(TOKENIZER_CONFIG)
    if place is None:
        return False
    tokenizer, _ = attempt(lambda: json.loads(place.read_bytes()))
    return isinstance(tokenizer, dict) and bool(tokenizer.get("chat_template"))
