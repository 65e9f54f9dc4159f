"""Grouped adapters of fused experts compute what experts with merged weights compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost_trainer.expert_lora import grouped, put_expert_lora
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel.experts import FACTORS, expert_modules
from milepost_trainer.parallel.heads import Head, whole_model
from tests.trainer.modes import config_of

COUNTS = [3, 0, 5, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 8])
def test_a_grouped_product_is_that_of_each_expert(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(10, 16, generator=generator).to(dtype).requires_grad_()
    matrices = torch.randn(4, 16, width, generator=generator).to(dtype).requires_grad_()
    ends = torch.tensor(COUNTS).cumsum(0).int()
    found = grouped(rows, matrices, ends)
    pieces = zip(rows.split(COUNTS), matrices, strict=True)  # type: ignore[no-untyped-call]
    expected = torch.cat([piece @ matrix for piece, matrix in pieces])
    weights = torch.randn(10, width, generator=generator).to(dtype)
    of_found = torch.autograd.grad((found * weights).sum(), [rows, matrices])
    of_expected = torch.autograd.grad((expected * weights).sum(), [rows, matrices])
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    pairs = zip((found, *of_found), (expected, *of_expected), strict=True)
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    assert not of_found[1][1].any()  # the expert without rows


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_adapted_experts_are_those_with_merged_weights(family: str, use_rslora: bool) -> None:
    adapted, merged = (experts_of(family) for _ in range(2))
    settings = LoraSettings(
        r=3, lora_alpha=5, use_rslora=use_rslora, expert_projections=["gate_up_proj", "down_proj"]
    )
    factors = adapt(adapted, settings)
    scaling = 5 / 3**0.5 if use_rslora else 5 / 3
    whole: dict[str, torch.Tensor] = {}
    for name in settings.expert_projections:
        delta = scaling * factors[f"{name}.lora_A"] @ factors[f"{name}.lora_B"]
        base = merged.get_parameter(name).detach()
        whole[name] = base + (delta if merged.is_transposed else delta.mT)
    inputs = inputs_of(merged)
    output = adapted(*inputs)
    expected = torch.func.functional_call(merged, whole, inputs)
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(output, merged(*inputs), rtol=1e-2)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    learning = [inputs[0], inputs[2], *factors.values()]
    ours = torch.autograd.grad((output * weights).sum(), learning)
    theirs = torch.autograd.grad((expected * weights).sum(), learning)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def test_fresh_adapters_change_nothing_and_the_base_stays_frozen() -> None:
    adapted, plain = experts_of("qwen3-moe"), experts_of("qwen3-moe")
    put = LoraSettings(r=2, expert_projections=["gate_up_proj"], lora_dropout=0.5)
    adapt(adapted, put, values=False)
    inputs = inputs_of(plain)
    assert torch.allclose(adapted(*inputs), plain(*inputs), atol=1e-7)
    adapted(*inputs).sum().backward()
    gradients = {name for name, param in adapted.named_parameters() if param.grad is not None}
    assert gradients == {f"{FACTORS}.gate_up_proj.lora_{side}" for side in "AB"}


def test_dropout_acts_in_training_only() -> None:
    adapted = experts_of("qwen3-moe")
    adapt(adapted, LoraSettings(r=2, expert_projections=["down_proj"], lora_dropout=0.5))
    inputs = inputs_of(adapted)
    torch.manual_seed(0)
    assert not torch.equal(adapted(*inputs), adapted(*inputs))
    adapted.eval()
    assert torch.equal(adapted(*inputs), adapted(*inputs))


def experts_of(family: str) -> Any:
    model = whole_model(config_of(family), Head.LANGUAGE_MODEL, 0, torch.float32, None)
    return next(module for _, module in expert_modules(model))


def adapt(
    experts: Any, settings: LoraSettings, *, values: bool = True
) -> dict[str, torch.nn.Parameter]:
    """The factors by name; the second ones get values, so that the adapter does something."""
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    experts.requires_grad_(False)
    torch.manual_seed(1)
    put_expert_lora(model, settings)
    factors = dict(experts.get_submodule(FACTORS).named_parameters())
    for name, param in factors.items():
        if values and name.endswith("lora_B"):
            torch.nn.init.normal_(param, std=0.3)
    return factors


def inputs_of(experts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, two experts for each token (one expert gets none), and their weights."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 32, generator=generator).requires_grad_()
    chosen = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator).requires_grad_()
    return hidden, chosen, weights
