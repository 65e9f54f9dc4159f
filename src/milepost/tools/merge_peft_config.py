"""config.json of a merged model: its vocabulary, its ties, and a classifier's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from milepost.errors import InvalidInputError
from milepost.tools.merge_peft_adapter import OpenedAdapter


class MergeTask(StrEnum):
    """What the merged model is for."""

    CAUSAL_LM = "causal_lm"
    """What its base is for: the tensors are those of the base."""
    CLASSIFICATION = "classification"
    """The head of the base goes, and the one that the adapter trained comes in its place."""


_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
}


def default_task(adapters: Sequence[OpenedAdapter]) -> MergeTask:
    """The task that adapters were trained for, by their task type."""
    types = {adapter.config.document.get("task_type") for adapter in adapters}
    return MergeTask.CLASSIFICATION if types & _CLASSES.keys() else MergeTask.CAUSAL_LM


def set_vocabulary(document: dict[str, Any], rows: int | None) -> list[str]:
    """State the rows that the embedding has, where they are others; what is to be told."""
    place = _text(document)
    if rows is None or place.get("vocab_size") in (None, rows):
        return []
    note = f"vocab_size: {place['vocab_size']} became {rows}"
    place["vocab_size"] = rows
    return [note]


def set_untied(document: dict[str, Any], names: Sequence[str]) -> list[str]:
    """State that head and embedding are two tensors."""
    for place in (document, _text(document)):
        if "tie_word_embeddings" in place:
            place["tie_word_embeddings"] = False
    document["tie_word_embeddings"] = False
    return [f"tie_word_embeddings: false, since {', '.join(names)} is a tensor of its own"]


def set_classifier(
    document: dict[str, Any],
    adapters: Sequence[OpenedAdapter],
    rows: int | None,
    wanted: int | None,
) -> list[str]:
    """The class and the labels of a classifier whose head has `rows` rows.

    `InvalidInputError` where others are wanted.
    """
    if wanted is not None and rows is not None and wanted != rows:
        raise InvalidInputError(
            f"the head that the adapter trained has {rows} labels, and --num-labels says {wanted}"
        )
    count = rows if rows is not None else wanted
    types = [str(adapter.config.document.get("task_type")) for adapter in adapters]
    suffix = next((_CLASSES[t] for t in types if t in _CLASSES), _CLASSES["SEQ_CLS"])
    before = document.get("architectures") or []
    document["architectures"] = [_classifier(str(name), suffix) for name in before]
    if count is not None and count != len(document.get("id2label") or {}):
        document["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
        document["label2id"] = {f"LABEL_{n}": n for n in range(count)}
    return [f"architectures: {', '.join(document['architectures'])}, {count} labels"]


def _classifier(name: str, suffix: str) -> str:
    stem, found, _ = name.partition("For")
    return f"{stem}{suffix}" if found else f"{name.removesuffix('Model')}{suffix}"


def _text(document: Mapping[str, Any]) -> dict[str, Any]:
    inner = document.get("text_config")
    assert isinstance(document, dict)
    return inner if isinstance(inner, dict) else document
