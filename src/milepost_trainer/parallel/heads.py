"""What a model ends in, and what its parameters are there for."""

from __future__ import annotations

import copy
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

import milepost as mp

VALUE_HEAD = "v_head"
"""What the head of `Head.VALUE` is called in its model."""


class Head(StrEnum):
    """What a model gives for each column of its input."""

    LANGUAGE_MODEL = "language-model"
    """Logits, (rows, length, vocabulary)."""
    SCORE = "score"
    """One number a label, (rows, length, labels): a sequence classifier that picks no column."""
    VALUE = "value"
    """Logits and one number more, (rows, length, vocabulary + 1)."""
    NONE = "none"
    """Hidden states, (rows, length, hidden)."""


class Role(StrEnum):
    """Whether a model learns."""

    TRAINED = "trained"
    FROZEN = "frozen"


_CLASSES = {
    Head.LANGUAGE_MODEL: AutoModelForCausalLM,
    Head.SCORE: AutoModelForSequenceClassification,
    Head.VALUE: AutoModelForCausalLM,
    Head.NONE: AutoModel,
}


_NEW = {Head.SCORE: ("score.",), Head.NONE: ("pooler.",)}
"""What a directory need not have: a new head is drawn, and nothing reads a pooler."""


def whole_model(
    source: Any,
    head: Head,
    seed: int,
    dtype: torch.dtype,
    attention: str | None,
    quantization: dict[str, Any] | None = None,
    labels: int = 1,
) -> Any:
    """The model of a directory or a configuration; what has no saved value is drawn from `seed`.

    `quantization` has further keywords of `from_pretrained`, for weights kept in a few bits;
    `labels` are those of a classifier. Raises `ValueError` for a classifier of another make than a
    linear `score` on hidden states, for one that was saved with other labels, and for a directory
    that lacks more than the head.
    """
    kind = _CLASSES[head]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(source, PreTrainedConfig):
            config = copy.deepcopy(source)
            if head is Head.SCORE:
                config.num_labels = labels
            model = kind.from_config(config, **options)
        else:
            if head is Head.SCORE:
                _require_labels(source, labels)
                options["num_labels"] = labels
            model = load_whole(kind, source, head, **options, **(quantization or {}))
        if head is Head.VALUE:
            _give_values(model, source)
    if head is Head.SCORE:
        _give_scores(model)
    if head is Head.NONE and isinstance(getattr(model, "pooler", None), nn.Module):
        model.pooler.requires_grad_(False)  # nothing here reads it, so it gets no gradient
    return model


def load_whole(kind: Any, source: Any, head: Head, **options: Any) -> Any:
    """`kind.from_pretrained(source, **options)`; `ValueError` when it finds no value for a tensor,
    which it would draw without a word, unless that is one of a new head."""
    model, told = kind.from_pretrained(source, output_loading_info=True, **options)
    missing = sorted(n for n in told["missing_keys"] if not n.startswith(_NEW.get(head, ())))
    if missing:
        raise ValueError(
            f"{source}: has no values for {len(missing)} tensors of the model, which "
            f"would be random: {', '.join(missing[:5])}; copy the directory again, or choose "
            "another model_name_or_path"
        )
    return model


def _require_labels(source: Any, labels: int) -> None:
    config = AutoConfig.from_pretrained(source)
    kinds = config.architectures or []
    if any("SequenceClassification" in kind for kind in kinds) and config.num_labels != labels:
        raise ValueError(
            f"{source} is a classifier of {config.num_labels} labels, and this run has {labels}"
        )


def _give_scores(model: Any) -> None:
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(getattr(model, "score", None), nn.Linear) or body is None:
        raise ValueError(
            f"{type(model).__name__} has no linear head `score`: use a family whose sequence "
            "classifier has one, such as llama, qwen2 or qwen3"
        )
    model.forward = _Scores(model, body)


class _Scores:
    """Replaces `forward` of a classifier: the scores of every column, (rows, length, labels)."""

    def __init__(self, model: Any, body: nn.Module) -> None:
        self.model, self.body = model, body

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
        return (self.model.score(self.body(**inputs)[0]),)


def _give_values(model: Any, source: Any) -> None:
    """Puts a value head beside the output layer: that of the directory, if it has one."""
    body = getattr(model, model.base_model_prefix, None)
    if body is None:
        raise ValueError(f"{type(model).__name__} has no body to put a value head on")
    hidden = model.config.get_text_config().hidden_size
    made = nn.Linear(hidden, 1, bias=False, device=model.device, dtype=model.dtype)
    nn.init.normal_(made.weight, std=hidden**-0.5)
    saved = None if isinstance(source, PreTrainedConfig) else mp.Checkpoint.open(source)
    name = f"{VALUE_HEAD}.weight"
    if saved is not None and name in saved.tensors():
        made.weight.data.copy_(saved.read(name))
    model.add_module(VALUE_HEAD, made)
    model.forward = _Values(model, body)


class _Values:
    """Replaces `forward` of a language model: its logits, and the value as one column more."""

    def __init__(self, model: Any, body: nn.Module) -> None:
        self.model, self.language_model = model, model.forward
        self.hidden: list[torch.Tensor] = []
        body.register_forward_hook(lambda _, __, output: self.hidden.append(output[0]))

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
        logits = self.language_model(**inputs)[0]
        value = self.model.get_submodule(VALUE_HEAD)(self.hidden.pop())
        return (torch.cat((logits, value.to(logits.dtype)), dim=-1),)


def layers_of(model: Any) -> Any:
    """The list of the model's blocks. `ValueError` when there is none where families keep it."""
    body = getattr(model, model.base_model_prefix, model)
    for owner, name in ((body, "layers"), (getattr(body, "encoder", None), "layer")):
        found = getattr(owner, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ValueError(f"{type(model).__name__}: found no list of layers to shard one by one")
