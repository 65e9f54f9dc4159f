"""The stages of a small Llama, as pipelines hold it: under the names of the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM


class Stage(nn.Module):
    """The layers of one of `count` stages; the last has a head of its own, with its values."""

    def __init__(self, whole: LlamaForCausalLM, number: int, count: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == count - 1
        self.config = whole.config
        self.model = nn.Module()
        layers = len(whole.model.layers)
        mine = range(number * layers // count, (number + 1) * layers // count)
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in mine})
        self.rotary = [whole.model.rotary_emb]
        if self.first:
            self.model.embed_tokens = whole.model.embed_tokens
        if self.last:
            self.model.norm = whole.model.norm
            vocabulary, width = whole.lm_head.weight.shape
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
            with torch.no_grad():
                self.lm_head.weight.copy_(whole.lm_head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.model.embed_tokens(x) if self.first else x  # type: ignore[operator]
        places = torch.arange(x.shape[1])[None]
        angles = self.rotary[0](hidden, places)
        layers: Any = self.model.layers
        for layer in layers.values():
            out = layer(hidden, position_embeddings=angles, position_ids=places)
            hidden = out[0] if isinstance(out, tuple) else out
        if not self.last:
            return hidden  # type: ignore[no-any-return]
        return self.lm_head(self.model.norm(hidden))  # type: ignore[operator, no-any-return]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
