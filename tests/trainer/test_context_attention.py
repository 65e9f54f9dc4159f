"""Attention in parts of a sequence, with windows and sinks, is what transformers computes whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    DogeConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXJapaneseConfig,
    Lfm2Config,
    Llama4TextConfig,
    MistralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    StableLmConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from milepost_trainer.parallel import MeshSizes, build
from milepost_trainer.parallel.ulysses import ulysses_attention, use_ulysses
from tests.worlds import run_world

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 8, 6
WINDOWS = [None, 1, 3, 20]
WITHOUT_EFFECT: dict[str, Any] = {
    "position_ids": torch.arange(4)[None],
    "use_cache": False,
    "output_router_logits": False,
    "output_attentions": False,
    "is_causal": True,
    "cu_seq_lens_q": None,
    "softcap": None,
}


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
        ulysses_attention(module, query, key, value, None, sliding_window=window, **WITHOUT_EFFECT)[
            0
        ]
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


def small(kind: type[PreTrainedConfig], **settings: Any) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return kind(**{**common, **settings})


QWEN2_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
COMPUTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "a layer's own window": lambda: small(Qwen2MoeConfig, **QWEN2_MOE, sliding_window=2),
    "no layer with a window": lambda: small(
        Qwen2MoeConfig, **QWEN2_MOE, sliding_window=2, layer_types=["full_attention"] * 2
    ),
    "a window that is passed on": lambda: small(MistralConfig, sliding_window=2),
    "positions that are passed on": lambda: small(StableLmConfig),
    "no window": lambda: small(PhimoeConfig, num_local_experts=4, sliding_window=None),
}
REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "PhimoeAttention has a window of 2 in its mask": lambda: small(
        PhimoeConfig, num_local_experts=4, sliding_window=2
    ),
    "DogeForCausalLM has no attention that says whether": lambda: small(DogeConfig),
    "GPTNeoXJapaneseForCausalLM has no attention that says whether": lambda: small(
        GPTNeoXJapaneseConfig
    ),
    "layers of the kind conv": lambda: small(Lfm2Config, layer_types=["conv", "full_attention"]),
    "layers of the kind chunked_attention": lambda: small(
        Llama4TextConfig, num_local_experts=2, intermediate_size_mlp=16, attention_chunk_size=2
    ),
}


def loss_of(config: PreTrainedConfig, sizes: MeshSizes) -> float:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 32, (ROWS, LENGTH), generator=generator)
    return build(config, sizes).evaluate({"input_ids": rows, "labels": rows})


def each_model(rank: int, world_size: int) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, config in {**COMPUTED, **REFUSED}.items():
        try:
            found[name] = loss_of(config(), MeshSizes(cp=world_size))
        except ValueError as error:
            found[name] = str(error)
    return found


def test_a_model_is_computed_as_in_one_process_or_refused() -> None:
    alone = {name: loss_of(config(), MeshSizes()) for name, config in COMPUTED.items()}
    assert abs(alone["a layer's own window"] - alone["no layer with a window"]) > 1e-4
    for found in run_world(2, each_model):
        for name, loss in alone.items():
            assert found[name] == pytest.approx(loss, rel=1e-5), name
        for message in REFUSED:
            assert message in str(found[message]) and "use cp=1" in str(found[message])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "is called with position_bias"),
        ({"sinks": torch.zeros(HEADS)}, "is called with sinks"),
        ({"softcap": 50.0}, "is called with softcap"),
        ({"indices": torch.zeros(1)}, "is called with indices"),
        ({"cu_seq_lens_q": torch.zeros(1)}, "is called with cu_seq_lens_q"),
        ({"is_causal": False}, "is called with is_causal"),
        ({"output_attentions": True}, "is called with output_attentions"),
        ({"attention_mask": torch.zeros(1)}, "makes a mask of its own"),
    ],
)
def test_what_a_module_asks_of_its_attention_is_done_or_refused(
    given: dict[str, Any], message: str
) -> None:
    query, key, value, *_ = whole_inputs(2)
    with pytest.raises(ValueError, match=f"Module {message}, which context parallelism"):
        ulysses_attention(nn.Module(), query, key, value, **{"attention_mask": None, **given})


def test_sinks_that_a_module_keeps_to_itself_are_refused() -> None:
    query, key, value, *_ = whole_inputs(2)
    module = nn.Module()
    module.sinks = nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(ValueError, match="has sinks that it does not pass on"):
        ulysses_attention(module, query, key, value, None)
