"""Pipeline stages: transformers models that hold some of the layers, under their global names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

STAGES_PER_RANK_INTERLEAVED = 2


class PassThrough(nn.Module):
    """Stands where another stage has a layer, so that layers keep their numbers."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def cut_stage(whole: Any, stage: int, stages: int) -> nn.Module:
    """Stage `stage` of `stages` of a causal language model; its parameters are those of `whole`.

    The stage maps token ids (first stage) or hidden states to hidden states or logits (last
    stage); `position_offset` is the position of its first column. The head of a tied pair lies
    with the last stage, beside its own copy of the embedding. Raises `ValueError` when there are
    fewer layers than stages.
    """
    layers = len(whole.model.layers)
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} pipeline stages")
    first, last = stage == 0, stage == stages - 1
    mine = range(stage * layers // stages, (stage + 1) * layers // stages)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(whole.config), dtype=whole.dtype
        )
    model.train()
    keeps_head_tied = last and bool(whole.config.tie_word_embeddings)
    body, source = model.model, whole.model
    for number in range(layers):
        body.layers[number] = source.layers[number] if number in mine else PassThrough()
    body.rotary_emb = source.rotary_emb
    body.embed_tokens = source.embed_tokens if first or keeps_head_tied else PassThrough()
    body.norm = source.norm if last else PassThrough()
    model.lm_head = whole.lm_head if last else PassThrough()
    if not last:
        model.all_tied_weights_keys = {}
    model.forward = _StageForward(model, first=first, last=last)
    model.position_offset = 0
    if hasattr(whole, "peft_config"):
        model.peft_config = whole.peft_config
    return model  # type: ignore[no-any-return]


class _StageForward:
    """Replaces `forward`: one tensor in, one tensor out, as a pipeline schedule wants it."""

    def __init__(self, model: Any, *, first: bool, last: bool) -> None:
        self.model, self.first, self.last = model, first, last

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        model = self.model
        positions = model.position_offset + torch.arange(value.shape[1], device=value.device)
        given = {"input_ids": value} if self.first else {"inputs_embeds": value}
        hidden = model.model(**given, position_ids=positions[None], use_cache=False)[0]
        return model.lm_head(hidden) if self.last else hidden  # type: ignore[no-any-return]
