"""`extract-lora`: adapters that peft loads, and that bring the base back to the fine-tune."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen2MoeConfig
from typer.testing import CliRunner

from milepost.cli.app import make_app
from milepost.errors import InvalidInputError
from milepost.tools.extract_lora import extract_lora, factorised
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rewrite.options import RewriteOptions
from tests.tools.adapters.peft_oracle import (
    gpt2,
    llama,
    load,
    outputs,
    state,
    write_adapter,
    write_base,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

QUICK = RewriteOptions(is_durable=False, threads=2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_difference_of_low_rank_comes_back_whole(family: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", llama() if family == "llama" else gpt2())
    modules = ["q_proj", "down_proj"] if family == "llama" else ["c_attn", "c_fc"]
    settings = {"r": 3, "lora_alpha": 6, "fan_in_fan_out": family == "gpt2"}
    adapter = write_adapter(tmp_path / "a", base, target_modules=modules, **settings)
    merge_peft_adapters([adapter], tmp_path / "tuned", options=QUICK)
    report = extract_lora(tmp_path / "tuned", base, tmp_path / "out", rank=3, options=QUICK)
    assert report.counts["factorised"] == 4 and not report.left_out
    assert min(report.energy.values()) > 1 - 1e-6
    adapted = PeftModel.from_pretrained(load(base), str(tmp_path / "out"))
    tuned = load(tmp_path / "tuned")
    assert torch.allclose(outputs(adapted), outputs(tuned), atol=1e-4)
    merge_peft_adapters([tmp_path / "out"], tmp_path / "again", options=QUICK)
    found, wanted = state(load(tmp_path / "again")), state(tuned)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


def test_what_is_no_linear_layer_is_listed_or_stored_whole(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", llama())
    model = load(base)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "tuned")
    report = extract_lora(
        tmp_path / "tuned",
        base,
        tmp_path / "part",
        rank=2,
        target_modules=["q_proj"],
        options=QUICK,
    )
    assert report.counts["factorised"] == 2 and len(report.left_out) == 19
    assert any("left out" in note and "norm" in note for note in report.notes)
    for name, kept in report.energy.items():
        delta = model.state_dict()[name] - state(load(base))[name]
        values = torch.linalg.svdvals(delta).square()
        assert kept == pytest.approx(float(values[:2].sum() / values.sum()), rel=1e-4)
    whole = ["embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm"]
    report = extract_lora(
        tmp_path / "tuned", base, tmp_path / "all", rank=64, save_modules=whole, options=QUICK
    )
    assert not report.left_out and report.counts == {"factorised": 14, "saved whole": 7}
    document = json.loads((tmp_path / "all/adapter_config.json").read_bytes())
    assert document["r"] == document["lora_alpha"] == 64
    adapted = PeftModel.from_pretrained(load(base), str(tmp_path / "all"))
    assert torch.allclose(outputs(adapted), outputs(model), atol=1e-3)


def tuned_on(base: Path, out: Path, change: Callable[[str], bool]) -> Path:
    """The base with noise on the stored tensors that `change` names."""
    shutil.copytree(base, out)
    torch.manual_seed(3)
    held = load_file(base / "model.safetensors")
    for name in filter(change, held):
        held[name] = held[name] + torch.randn_like(held[name]) * 0.1
    save_file(held, out / "model.safetensors", {"format": "pt"})
    return out


def adapted(base: Path, adapter: Path) -> torch.Tensor:
    return outputs(PeftModel.from_pretrained(load(base), str(adapter)))


@pytest.mark.filterwarnings("ignore:The following .*_pattern:RuntimeWarning")  # peft's own
@pytest.mark.parametrize("part", ["experts.", "mlp.gate."])
def test_small_matrices_of_experts_and_routers_get_factors_that_peft_puts_together(
    part: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["qwen3_moe"]
    tuned = tuned_on(base, tmp_path / "tuned", lambda name: part in name)
    extract_lora(tuned, base, tmp_path / "a", rank=14, options=QUICK)
    assert torch.allclose(adapted(base, tmp_path / "a"), outputs(load(tuned)), atol=1e-5)
    merge_peft_adapters([tmp_path / "a"], tmp_path / "out", base=base, options=QUICK)
    assert torch.allclose(outputs(load(tmp_path / "out")), outputs(load(tuned)), atol=1e-5)


def test_factors_that_peft_loses_are_told_and_merged_all_the_same(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    base = write_base(tmp_path / "base", config)
    tuned = tuned_on(base, tmp_path / "tuned", lambda name: "_proj.weight" in name)
    report = extract_lora(tuned, base, tmp_path / "a", rank=16, options=QUICK)
    assert any(note.startswith("peft loses the factors of 30 modules") for note in report.notes)
    merge_peft_adapters([tmp_path / "a"], tmp_path / "out", base=base, options=QUICK)
    assert torch.allclose(outputs(load(tmp_path / "out")), outputs(load(tuned)), atol=1e-5)
    tuned = tuned_on(base, tmp_path / "other", lambda name: "self_attn.q_proj.weight" in name)
    report = extract_lora(tuned, base, tmp_path / "b", rank=16, options=QUICK)
    assert not any("peft loses" in note for note in report.notes)
    assert torch.allclose(adapted(base, tmp_path / "b"), outputs(load(tuned)), atol=1e-5)


def test_an_embedding_that_is_stored_whole_is_the_head_too_where_both_are_one(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["tied"]
    change = re.compile(r".*(embed_tokens|q_proj).*").fullmatch
    tuned = tuned_on(base, tmp_path / "tuned", lambda name: change(name) is not None)
    extract_lora(tuned, base, tmp_path / "a", rank=16, save_modules=["embed_tokens"], options=QUICK)
    assert torch.allclose(adapted(base, tmp_path / "a"), outputs(load(tuned)), atol=1e-5)
    merge_peft_adapters([tmp_path / "a"], tmp_path / "out", base=base, options=QUICK)
    assert torch.allclose(outputs(load(tmp_path / "out")), outputs(load(tuned)), atol=1e-5)


@pytest.mark.parametrize("stores_head", ["tuned", "base", "both"])
def test_a_head_that_one_side_stores_is_compared_with_the_embedding_that_it_is_on_the_other(
    stores_head: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    sides = {"base": tmp_path / "base", "tuned": tmp_path / "tuned"}
    shutil.copytree(bases["tied"], sides["base"])
    tuned_on(bases["tied"], sides["tuned"], lambda name: "q_proj" in name)
    for name, place in sides.items():
        held = load_file(place / "model.safetensors")
        if stores_head in (name, "both"):
            held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
            save_file(held, place / "model.safetensors", {"format": "pt"})
    report = extract_lora(sides["tuned"], sides["base"], tmp_path / "a", rank=16, options=QUICK)
    assert report.counts == {"factorised": 2, "saved whole": 0} and not report.left_out
    wanted = outputs(load(sides["tuned"]))
    assert torch.allclose(adapted(sides["base"], tmp_path / "a"), wanted, atol=1e-5)


def test_a_head_of_gpt2_is_no_conv1d(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["gpt2"]
    held = load_file(base / "model.safetensors")
    shutil.copytree(base, tmp_path / "tuned")
    held["lm_head.weight"] = held["transformer.wte.weight"] + 0.1 * torch.randn(40, 16)
    save_file(held, tmp_path / "tuned/model.safetensors", {"format": "pt"})
    extract_lora(tmp_path / "tuned", base, tmp_path / "a", rank=16, options=QUICK)
    assert torch.allclose(
        adapted(base, tmp_path / "a"), outputs(load(tmp_path / "tuned")), atol=1e-4
    )


def test_a_large_difference_is_factorised_the_same_way_twice_and_nearly_as_well() -> None:
    torch.manual_seed(0)
    delta = torch.randn(2100, 5) @ torch.randn(5, 2048) + 0.01 * torch.randn(2100, 2048)
    left, right, kept = factorised(delta, 5)
    again = factorised(delta, 5)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])
    rest = float((delta - left @ right).square().sum() / delta.square().sum())
    assert kept == pytest.approx(1 - rest, abs=1e-4) and rest < 1e-4


def test_other_shapes_and_equal_models_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", llama())
    larger = write_base(tmp_path / "larger", llama(intermediate_size=32))
    with pytest.raises(InvalidInputError, match="equal shapes"):
        extract_lora(larger, base, tmp_path / "out", rank=2, options=QUICK)
    with pytest.raises(InvalidInputError, match=r"differs from .* in nothing"):
        extract_lora(base, base, tmp_path / "out", rank=2, options=QUICK)
    words = ["extract-lora", "--input-dir", str(base), "--base-model", str(larger), "--rank", "2"]
    result = CliRunner().invoke(make_app(), [*words, "--output-dir", str(tmp_path / "out")])
    assert result.exit_code != 0 and not (tmp_path / "out").exists()
    assert load_file(base / "model.safetensors")
