"""Low-rank adapters of grouped experts: peft's on parameters, and those that a trainer declares."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import milepost as mp
from tests.adapters.lora_models import logits, optimizer_of, randomise, steps, tensors_of
from tests.worlds import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
EXPERTS = 4


def family(name: str) -> Any:
    """A tiny model with fused experts, the same weights at every call."""
    torch.manual_seed(0)
    if name == "qwen3_moe":
        config = Qwen3MoeConfig(
            **SIZES, num_experts=EXPERTS, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[]
        )
        return Qwen3MoeForCausalLM(config)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=EXPERTS, head_dim=8))


def with_parameters(name: str, seed: int = 5) -> Any:
    settings = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    model = get_peft_model(family(name), settings)
    randomise(model, seed)
    return model


FAMILIES = ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "gpt_oss"))]


@pytest.mark.case("V53")
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_on_fused_experts_load_in_peft_and_merge_to_what_they_say(
    name: str, tmp_path: Path
) -> None:
    model = with_parameters(name)
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    stock = PeftModel.from_pretrained(family(name), tmp_path / "checkpoint-1")
    assert torch.equal(logits(stock), logits(model))
    mp.save(tmp_path / "checkpoint-2", {"model": model}, step=2, adapters=mp.Adapters.MERGED)
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-2", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(plain), logits(family(name)))
    second = with_parameters(name, seed=9)
    mp.load(tmp_path / "checkpoint-2", {"model": second})
    assert torch.equal(logits(second), logits(model))


def declare(
    model: Any,
    seed: int = 5,
    *,
    use_rslora: bool = False,
    r: int = 2,
    projections: Sequence[str] = ("gate_up_proj", "down_proj"),
) -> Any:
    """Factors of a trainer's own on every experts module, the base frozen; alpha is 3 r."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module in list(model.modules()):
        if not hasattr(module, "gate_up_proj") or not hasattr(module, "num_experts"):
            continue
        factors = {}
        for projection in projections:
            experts, outer, inner = getattr(module, projection).shape
            for ending, shape in (("A", (experts, inner, r)), ("B", (experts, r, outer))):
                value = torch.randn(shape, generator=generator) * 0.1
                module.register_parameter(f"{projection}_{ending}", nn.Parameter(value))
            factors[projection] = (f"{projection}_A", f"{projection}_B")
        lora = mp.ExpertLora(r=r, alpha=3 * r, use_rslora=use_rslora, factors=factors)
        mp.declare_expert_lora(module, lora)
    return model


def merged_by_hand(model: Any, scale: float) -> Any:
    plain = family("qwen3_moe")
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if f"{name}_A" in own:
                delta = scale * own[f"{name}_A"] @ own[f"{name}_B"]
                param.add_(delta.transpose(1, 2))
    return plain


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_declared_factors_of_experts_are_an_adapter_of_their_own_kind(
    use_rslora: bool, scale: float, tmp_path: Path
) -> None:
    model = declare(family("qwen3_moe"), use_rslora=use_rslora)
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": model}, step=1)
    config = json.loads((place / "adapter_config.json").read_text())
    assert config["peft_type"] == "EXPERT_LORA"
    assert config["expert_projections"] == ["down_proj", "gate_up_proj"]
    assert config["use_rslora"] is use_rslora
    tensors = tensors_of(place)
    assert tensors["model.layers.0.mlp.experts.down_proj.lora_A"].shape == (EXPERTS, 24, 2)
    assert len(tensors) == 8
    with pytest.raises((KeyError, ValueError, TypeError)):
        PeftModel.from_pretrained(family("qwen3_moe"), place)
    second = declare(family("qwen3_moe"), seed=9, use_rslora=use_rslora)
    mp.load(place, {"model": second})
    found = dict(second.named_parameters())
    assert all(torch.equal(found[name], param) for name, param in model.named_parameters())
    merged = tmp_path / "checkpoint-2"
    mp.save(merged, {"model": model}, step=2, adapters=mp.Adapters.MERGED)
    plain = AutoModelForCausalLM.from_pretrained(merged)
    expected = merged_by_hand(model, scale)
    torch.testing.assert_close(logits(plain), logits(expected), rtol=1e-4, atol=1e-5)
    assert (merged / "resume_adapter" / "adapter_model.safetensors").is_file()


def test_declared_experts_beside_an_adapter_of_peft_are_one_mixed_file(tmp_path: Path) -> None:
    def mixed(seed: int) -> Any:
        torch.manual_seed(seed)
        settings = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(family("qwen3_moe"), settings)
        inner = model.base_model.model
        trained = [param for param in inner.parameters() if param.requires_grad]
        declare(inner, seed)
        for param in trained:
            param.requires_grad_(True)
        randomise(model, seed)
        return model

    model = mixed(5)
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": model}, step=1)
    config = json.loads((place / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA_WITH_EP_EXPERT_LORA" and config["r"] == 4
    assert config["ep_expert_lora"]["r"] == 2
    names = tensors_of(place).keys()
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in names
    assert "model.layers.1.mlp.experts.gate_up_proj.lora_B" in names
    second = mixed(9)
    mp.load(place, {"model": second})
    found = dict(second.named_parameters())
    assert all(torch.equal(found[name], param) for name, param in model.named_parameters())


OTHERWISE: dict[str, tuple[Callable[[Any], Any], type[mp.errors.CheckpointError], str]] = {
    "scaling": (
        lambda model: declare(model, use_rslora=True),
        mp.errors.MismatchError,
        r"experts: saved with 3, are 4\.24",
    ),
    "rank": (
        lambda model: declare(model, r=4),
        mp.errors.MismatchError,
        r"experts: saved with rank 2, have rank 4",
    ),
    "fewer projections": (
        lambda model: declare(model, projections=["down_proj"]),
        mp.errors.MismatchError,
        r"experts: saved for down_proj, gate_up_proj, are adapted at down_proj",
    ),
    "one layer alone": (
        lambda model: (declare(model.requires_grad_(False).model.layers[0]), model)[1],
        mp.errors.KeyMismatchError,
        r"0 missing, 4 unexpected .*: model\.layers\.1\.mlp\.experts\.gate_up_proj\.lora_A",
    ),
    "no layer": (
        lambda model: model,
        mp.errors.KeyMismatchError,
        r"holds an adapter \(EXPERT_LORA, 8 tensors\), and model has none to fill",
    ),
    "peft's on the same experts": (
        lambda _: with_parameters("qwen3_moe"),
        mp.errors.MismatchError,
        r"of the kind EXPERT_LORA, model has one of the kind LORA",
    ),
    "experts that lie elsewhere": (
        lambda model: nn.ModuleDict({"tower": declare(model)}),
        mp.errors.KeyMismatchError,
        r"none of its 8 tensors is one of the 8 .* holds model\.layers.* wants tower\.model\.",
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_factors_of_experts_that_the_model_cannot_receive_are_refused_with_both_sides(
    case: str, tmp_path: Path
) -> None:
    make, error, told = OTHERWISE[case]
    mp.save(tmp_path / "checkpoint-1", {"model": declare(family("qwen3_moe"))}, step=1)
    model = make(family("qwen3_moe"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=told):
        mp.load(tmp_path / "checkpoint-1", {"model": model})
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def cut(model: Any) -> Any:
    """Experts and their factors divided among all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            for name, param in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(param.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded, param.requires_grad))
    return model


def save_cut(rank: int, world_size: int, run: Path) -> None:
    model = cut(declare(family("qwen3_moe")))
    optimizer = optimizer_of(model)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    mp.save(run / "checkpoint-1", state, step=1)
    mp.save(run / "checkpoint-2", state, step=2, adapters=mp.Adapters.MERGED)


def load_cut(rank: int, world_size: int, run: Path) -> Any:
    model = cut(declare(family("qwen3_moe"), seed=9))
    optimizer = optimizer_of(model)
    report = mp.load(run / "checkpoint-2", {"model": model, "optimizer": optimizer})
    values = {n: p.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    return values, report.level.value


def test_experts_divided_among_ranks_are_saved_merged_and_loaded_anywhere(tmp_path: Path) -> None:
    run_world(2, save_cut, tmp_path)
    whole = declare(family("qwen3_moe"), seed=9)
    optimizer = optimizer_of(whole)
    report = mp.load(
        tmp_path / "checkpoint-1", {"model": whole, "optimizer": optimizer}, missing=mp.Missing.KEEP
    )
    assert report.level is mp.Level.RESHARDED
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    expected = merged_by_hand(whole, 3.0)
    torch.testing.assert_close(logits(plain), logits(expected), rtol=1e-4, atol=1e-5)
    own = {n: p for n, p in whole.named_parameters() if p.requires_grad}
    for values, level in run_world(2, load_cut, tmp_path):
        assert level == "exact"
        assert all(torch.equal(values[name], param) for name, param in own.items())


def test_a_run_with_adapted_experts_resumes_exactly(tmp_path: Path) -> None:
    model = with_parameters("qwen3_moe")
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    mp.save(tmp_path / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    expected = steps(model, optimizer, 2)
    second = with_parameters("qwen3_moe", seed=9)
    optimizer2 = optimizer_of(second)
    mp.load(tmp_path / "checkpoint-2", {"model": second, "optimizer": optimizer2})
    assert steps(second, optimizer2, 2) == expected
