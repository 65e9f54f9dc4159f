"""What a model ends in, and what its parameters are there for."""

from __future__ import annotations

import copy
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)


class Head(StrEnum):
    """What a model gives for each column of its input."""

    LANGUAGE_MODEL = "language-model"
    """Logits, (rows, length, vocabulary)."""
    SCORE = "score"
    """One number, (rows, length): a sequence classifier of one label before it picks a column."""
    NONE = "none"
    """Hidden states, (rows, length, hidden)."""


class Role(StrEnum):
    """Whether a model learns."""

    TRAINED = "trained"
    FROZEN = "frozen"


_CLASSES = {
    Head.LANGUAGE_MODEL: AutoModelForCausalLM,
    Head.SCORE: AutoModelForSequenceClassification,
    Head.NONE: AutoModel,
}


def whole_model(
    source: Any,
    head: Head,
    seed: int,
    dtype: torch.dtype,
    attention: str | None,
    quantization: dict[str, Any] | None = None,
) -> Any:
    """The model of a directory or a configuration; what has no saved value is drawn from `seed`.

    `quantization` has further keywords of `from_pretrained`, for weights kept in a few bits. Raises
    `ValueError` for a classifier of another make than a linear `score` on hidden states.
    """
    kind = _CLASSES[head]
    options = {"dtype": dtype, "attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(source, PreTrainedConfig):
            config = copy.deepcopy(source)
            if head is Head.SCORE:
                config.num_labels = 1
            model = kind.from_config(config, **options)
        else:
            labels = {"num_labels": 1} if head is Head.SCORE else {}
            model = kind.from_pretrained(source, **options, **labels, **(quantization or {}))
    if head is Head.SCORE:
        _give_scores(model)
    if head is Head.NONE and isinstance(getattr(model, "pooler", None), nn.Module):
        model.pooler.requires_grad_(False)  # nothing here reads it, so it gets no gradient
    return model


def _give_scores(model: Any) -> None:
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(getattr(model, "score", None), nn.Linear) or body is None:
        raise ValueError(
            f"{type(model).__name__} has no linear head `score`: use a family whose sequence "
            "classifier has one, such as llama, qwen2 or qwen3"
        )
    model.forward = _Scores(model, body)


class _Scores:
    """Replaces `forward` of a classifier: the score of every column, (rows, length)."""

    def __init__(self, model: Any, body: nn.Module) -> None:
        self.model, self.body = model, body

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
        return (self.model.score(self.body(**inputs)[0]).squeeze(-1),)


def layers_of(model: Any) -> Any:
    """The list of the model's blocks. `ValueError` when there is none where families keep it."""
    body = getattr(model, model.base_model_prefix, model)
    for owner, name in ((body, "layers"), (getattr(body, "encoder", None), "layer")):
        found = getattr(owner, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ValueError(f"{type(model).__name__}: found no list of layers to shard one by one")
