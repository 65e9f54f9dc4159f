"""Folding factors into weights, against values by hand and against what peft merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from milepost.adapters import arithmetic
from milepost.adapters.arithmetic import Layout, fold, linear, squared_norms
from milepost.adapters.config import parse_adapter_config
from milepost.adapters.fold import changes_of, low_rank_of
from milepost.adapters.live import find_adapter
from milepost.adapters.merged_tensor import Folded, merged
from milepost.errors import InvalidInputError
from milepost.geometry.placement import whole
from milepost.state.leaves import collect_leaves
from tests.adapters.lora_models import adapted


def merged_by_us(model: Any) -> dict[str, torch.Tensor]:
    """Every changed weight of a live model, folded as one part."""
    leaves = collect_leaves(model)
    live = find_adapter(model, leaves)
    assert live is not None
    found = {}
    for name, changes in changes_of(live).items():
        weight = leaves.tensors[name].detach()
        matrices = [change for change in changes if change.form is not None]
        for change in matrices:
            low_rank = low_rank_of(
                change, whole(tuple(weight.shape)), lambda f, _: f.tensor.detach()
            )
            found[name.replace("base_layer.", "")] = fold(weight, low_rank)
    return found


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    prefix = "base_model.model."
    return {prefix + n: t for n, t in model.merge_and_unload().state_dict().items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora-rslora": {"use_dora": True, "use_rslora": True},
    "patterns": {"rank_pattern": {"layers.1.*q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding-dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head", "k_proj"]},
}


@pytest.mark.case("V46")
@pytest.mark.case("V47")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folded_weight_is_the_one_that_peft_merges(variant: str) -> None:
    model = adapted(**VARIANTS[variant])
    ours = merged_by_us(model)
    theirs = merged_by_peft(model)
    assert ours
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.case("V47")
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_transposed_layer_is_folded_along_its_own_axes(use_dora: bool) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    settings = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
        use_dora=use_dora,
    )
    model = get_peft_model(GPT2LMHeadModel(config), settings)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    ours, theirs = merged_by_us(model), merged_by_peft(model)
    assert {tuple(w.shape) for w in ours.values()} == {(16, 48), (16, 16), (64, 16)}
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.case("V46")
@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_ones_of_rank_four_add_four_times_the_scale(use_rslora: bool, scale: float) -> None:
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": use_rslora}
    lora = parse_adapter_config(document, where="here").lora
    assert lora is not None and lora.scaling("model.q_proj") == scale
    low_rank = linear(torch.ones(4, 4), torch.ones(4, 4), lora.scaling("model.q_proj"))
    assert torch.equal(fold(torch.ones(4, 4), low_rank), torch.full((4, 4), 1 + 4 * scale))


@pytest.mark.case("V49")
def test_a_small_change_of_a_bf16_weight_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 64, generator=generator).bfloat16()
    b = (torch.randn(64, 4, generator=generator) * 2e-3).bfloat16()
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    exact = weight.double() + 1.5 * b.double() @ a.double()
    folded = fold(weight, linear(a, b, 1.5))
    assert torch.equal(folded, exact.float().bfloat16())
    twice = weight + (1.5 * b @ a)
    assert not torch.equal(folded, twice)


@pytest.mark.parametrize("layout", Layout)
def test_parts_folded_one_by_one_are_the_whole(layout: Layout) -> None:
    a, b, magnitude = torch.randn(3, 10), torch.randn(8, 3), torch.rand(8) + 0.5
    weight = torch.randn((8, 10) if layout is Layout.OUT_IN else (10, 8))
    low_rank = linear(a, b, 0.7, layout=layout, magnitude=magnitude)
    expected = fold(weight, low_rank)
    rows, columns = weight.shape
    boxes = [
        (slice(r, r + 5), slice(c, c + 4)) for r in range(0, rows, 5) for c in range(0, columns, 4)
    ]
    squares = torch.zeros(8)
    for box in boxes:
        along = box[low_rank.magnitude_dim]
        squares[along] += squared_norms(weight[box], low_rank.box(box))
    for box in boxes:
        part = fold(weight[box], low_rank.box(box), squares[box[low_rank.magnitude_dim]])
        torch.testing.assert_close(part, expected[box])


@pytest.mark.parametrize("layout", Layout)
def test_factors_of_all_experts_count_them_slowest_in_a_and_fastest_in_b(layout: Layout) -> None:
    experts, r, inner, outer = 3, 2, 4, 5
    a, b = torch.randn(experts * r, inner), torch.randn(outer, experts * r)
    shape = (experts, outer, inner) if layout is Layout.OUT_IN else (experts, inner, outer)
    low_rank = arithmetic.joined_experts(a, b, experts, 2.0, layout)
    folded = fold(torch.zeros(shape), low_rank)
    for e in range(experts):
        delta = 2.0 * b.reshape(outer, r, experts)[:, :, e] @ a.reshape(experts, r, inner)[e]
        torch.testing.assert_close(folded[e], delta if layout is Layout.OUT_IN else delta.T)


def test_a_square_expert_weight_is_not_guessed() -> None:
    with pytest.raises(InvalidInputError, match=r"square.*is_transposed"):
        arithmetic.layout_of_experts(4, 4, (2, 4, 4), name="experts.gate_up_proj")
    assert arithmetic.layout_of_experts(4, 6, (2, 6, 4), name="w") is Layout.OUT_IN
    assert arithmetic.layout_of_experts(4, 6, (2, 4, 6), name="w") is Layout.IN_OUT
    with pytest.raises(InvalidInputError, match="does not belong"):
        arithmetic.layout_of_experts(4, 6, (2, 4, 5), name="w")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_tensor_reads_the_same_in_every_view(dtype: torch.dtype) -> None:
    weight = torch.randn(700, 2048).to(dtype)  # several blocks
    a, b = torch.randn(4, 2048).to(dtype), torch.randn(700, 4).to(dtype)
    folded = Folded(weight=weight, low_rank=linear(a, b, 0.5), rows={513: torch.ones(2048)})
    lazy = merged(folded)
    expected = fold(weight, linear(a, b, 0.5))
    expected[513] = 1.0
    before = weight.clone()
    torch.testing.assert_close(lazy.clone(), expected)
    whole_values = lazy.clone()
    assert torch.equal(lazy[500:520, 7:9].clone(), whole_values[500:520, 7:9])
    assert torch.equal(lazy.T[5:8].clone(), whole_values.T[5:8])
    target = torch.empty(20, 30, dtype=dtype)
    target.copy_(lazy.as_strided((20, 30), (2048, 2), 11))
    assert torch.equal(target, whole_values.as_strided((20, 30), (2048, 2), 11))
    assert torch.equal(weight, before)
    with pytest.raises(NotImplementedError, match="viewed and copied"):
        lazy.sum()
