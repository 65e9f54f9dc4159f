"""Attention in parts of a sequence, with windows and sinks, is what transformers computes whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from milepost_trainer.parallel.ulysses import ulysses_attention, use_ulysses
from tests.worlds import run_world

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 8, 6
WINDOWS = [None, 1, 3, 20]


def whole_inputs(key_heads: int) -> list[torch.Tensor]:
    """Query, key and value of the whole sequence, sinks, and weights of the output."""
    generator = torch.Generator().manual_seed(key_heads)
    of_heads = [(ROWS, n, LENGTH, WIDTH) for n in (HEADS, key_heads, key_heads)]
    shapes: list[tuple[int, ...]] = [*of_heads, (HEADS,), (ROWS, LENGTH, HEADS, WIDTH)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def visible(window: int | None) -> torch.Tensor:
    """What is added to logits, by the definition: a column sees itself and those before it."""
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    seen = (key <= query) & (query - key < (LENGTH if window is None else window))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def stock(key_heads: int, window: int | None) -> list[torch.Tensor]:
    """The output of transformers' attention of GPT-OSS, and gradients of all inputs."""
    *inputs, weights = whole_inputs(key_heads)
    query, key, value, sinks = (tensor.requires_grad_() for tensor in inputs)
    module: Any = SimpleNamespace(
        num_key_value_groups=HEADS // key_heads, sinks=sinks, training=True
    )
    output, _ = eager_attention_forward(module, query, key, value, visible(window), WIDTH**-0.5)
    gradients = torch.autograd.grad((output * weights).sum(), [query, key, value, sinks])
    return [output.detach(), *gradients]


def parts(rank: int, world_size: int, key_heads: int, window: int | None) -> list[torch.Tensor]:
    *inputs, weights = whole_inputs(key_heads)
    mine = [tensor.chunk(world_size, dim=2)[rank].requires_grad_() for tensor in inputs[:3]]
    sinks = inputs[3].requires_grad_()
    module: Any = nn.Module()
    module.context_group = dist.group.WORLD
    query, key, value = mine
    output, _ = ulysses_attention(
        module, query, key, value, None, scaling=WIDTH**-0.5, sliding_window=window, s_aux=sinks
    )
    asked = (output * weights.chunk(world_size, dim=1)[rank]).sum()
    return [output.detach(), *torch.autograd.grad(asked, [query, key, value, sinks])]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_windows_and_sinks_act_as_on_the_whole_sequence(key_heads: int) -> None:
    for window, ranks in zip(WINDOWS, run_all(key_heads), strict=True):
        output, *gradients, of_sinks = stock(key_heads, window)
        found = [torch.cat([rank[0] for rank in ranks], dim=1)]
        found += [torch.cat([rank[place] for rank in ranks], dim=2) for place in (1, 2, 3)]
        found.append(sum(rank[4] for rank in ranks))  # type: ignore[arg-type]
        for ours, theirs in zip(found, [output, *gradients, of_sinks], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), window
        assert all(rank[4].count_nonzero() == HEADS // 2 for rank in ranks)


def run_all(key_heads: int) -> list[list[list[torch.Tensor]]]:
    """By window what each of two ranks has."""
    by_rank = run_world(2, each_window, key_heads)
    return [list(of_window) for of_window in zip(*by_rank, strict=True)]


def each_window(rank: int, world_size: int, key_heads: int) -> list[list[torch.Tensor]]:
    return [parts(rank, world_size, key_heads, window) for window in WINDOWS]


def without_sinks(rank: int, world_size: int) -> list[torch.Tensor]:
    query, key, value = (t.chunk(world_size, dim=2)[rank] for t in whole_inputs(2)[:3])
    module: Any = nn.Module()
    module.context_group = dist.group.WORLD
    return [
        ulysses_attention(module, query, key, value, None, sliding_window=window)[0]
        for window in WINDOWS
    ]


def test_a_window_acts_without_sinks_too() -> None:
    query, key, value, *_ = whole_inputs(2)
    ranks = run_world(2, without_sinks)
    for place, window in enumerate(WINDOWS):
        whole = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible(window), enable_gqa=True
        )
        found = torch.cat([rank[place] for rank in ranks], dim=1)
        assert torch.allclose(found, whole.transpose(1, 2), rtol=1e-4, atol=1e-5)


def capped(rank: int, world_size: int) -> str:
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError) as caught:
        use_ulysses(Gemma2ForCausalLM(config), group, tp=1)
    return str(caught.value)


def test_attention_whose_logits_are_capped_is_refused() -> None:
    for message in run_world(2, capped):
        assert "self_attn of Gemma2ForCausalLM caps its logits" in message
