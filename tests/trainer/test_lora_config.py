"""The `lora:` mapping of a YAML: what it means, and every way in which it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from milepost_trainer.config import ConfigError, parse_config
from milepost_trainer.lora import adapter, quantization
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel import MeshSizes
from milepost_trainer.parallel.heads import Head, whole_model
from tests.trainer.modes import config_of

LEAST = """
model_name_or_path: base
train_files: [text.txt]
max_steps: 1
output_dir: run
"""


def parse(lines: str) -> Any:
    return parse_config(LEAST + lines, "run.yaml")


def model_of(family: str) -> nn.Module:
    model: nn.Module = whole_model(
        config_of(family), Head.LANGUAGE_MODEL, 0, torch.float32, attention=None
    )
    return model


def test_every_key_arrives_at_peft() -> None:
    settings = parse(
        """
lora:
  r: 16
  lora_alpha: 32
  lora_dropout: 0.05
  use_rslora: true
  use_dora: true
  bias: lora_only
  target_modules: [q_proj, v_proj]
  exclude_modules: [layers.0.self_attn.q_proj]
  modules_to_save: [lm_head]
  rank_pattern: {v_proj: 4}
  alpha_pattern: {v_proj: 0.5}
"""
    ).lora
    model = model_of("llama")
    adapter(settings, MeshSizes(), seed=0)(model)
    config: Any = vars(model)["peft_config"]["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.05)
    assert config.use_rslora and config.use_dora and config.bias == "lora_only"
    assert type(config.lora_alpha) is int and config.alpha_pattern == {"v_proj": 0.5}
    learning = {name for name, param in model.named_parameters() if param.requires_grad}
    assert not any("layers.0.self_attn.q_proj" in name for name in learning)
    assert model.get_parameter("model.layers.1.self_attn.v_proj.lora_A.default.weight").shape == (
        *(4, 32),
    )
    assert "lm_head.modules_to_save.default.weight" in learning
    assert not any(name.endswith("base_layer.weight") for name in learning)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("lora: {alpha: 8}", r"run.yaml: lora: unknown key 'alpha'; did you mean lora_alpha\?"),
        ("lora: {target_module: [q]}", r"unknown key 'target_module'; did you mean target_modules"),
        ("lora: {r: 0}", r"lora.r: expected `int` >= 1"),
        ("lora: {lora_dropout: 1}", r"lora_dropout: expected `float` < 1"),
        ("lora: {bias: some}", r"lora.bias: invalid enum value 'some'"),
        ("lora: {expert_projections: [gate_proj]}", "gate_proj is no projection of fused experts"),
        ("lora: {load_in_4bit: true, load_in_8bit: true}", "either load_in_4bit or load_in_8bit"),
        ("lora: {bnb_4bit_quant_type: fp4}", "set load_in_4bit: true too"),
        ("lora: {target_parameters: [a], lora_dropout: 0.1}", "peft has no dropout"),
        ("lora: {expert_projections: [down_proj], use_dora: true}", "experts have neither"),
        ("merge_expert_lora_on_save: true", "is about adapters; set lora too"),
        (
            "lora: {load_in_4bit: true}\nmerge_expert_lora_on_save: true",
            "a base in 4 or 8 bit has no weights to merge into",
        ),
        (
            "lora: {expert_projections: [down_proj]}\nuse_grouped_gemm: false",
            "computed in groups: no use_grouped_gemm",
        ),
        (
            "lora: {target_parameters: [experts.down_proj]}\nuse_grouped_gemm: false\ntp_size: 2",
            "computed in groups with tp_size: no use_grouped_gemm",
        ),
        ("reset_sinks: true\nsinks: live", "puts the sinks out, and sinks: live does not"),
        ("sinks: off", "sinks: "),
    ],
)
def test_what_makes_no_sense_is_refused(lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(lines)


def test_a_base_in_few_bits_needs_weights_that_exist() -> None:
    with pytest.raises(ConfigError, match="are about a model_name_or_path"):
        parse_config(
            LEAST.replace("model_name_or_path: base", "model_config: {model_type: llama}")
            + "lora: {load_in_8bit: true}",
            "run.yaml",
        )


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_a_base_in_few_bits_needs_bitsandbytes(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked: dict[str, Any] = {key: True}
    settings = LoraSettings(**asked)
    with pytest.raises(ValueError, match=f"{key} needs bitsandbytes: pip install bitsandbytes"):
        quantization(settings, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "mesh", "message"),
    [
        ({"target_parameters": ["x"]}, {"dp_shard": 2, "etp": 2}, "leave out expert_tp_size"),
        ({"expert_projections": ["down_proj"]}, {"dp_shard": 2, "etp": 2}, "no rule for expert"),
    ],
)
def test_adapters_that_a_mesh_would_cut_wrongly_are_refused(
    settings: dict[str, Any], mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        adapter(LoraSettings(**settings), MeshSizes(**mesh), seed=0)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"target_modules": ["q_proj", "query"]}, "no module of .* is called 'query'"),
        ("llama", {"target_modules": ["q_proj"], "rank_pattern": {"k": 4}}, r"rank_pattern .*'k'"),
        ("llama", {"target_modules": ["q_proj"], "exclude_modules": ["z"]}, "exclude_modules"),
        ("llama", {"expert_projections": ["down_proj"]}, "LlamaForCausalLM has no fused experts"),
        ("qwen3-moe", {"expert_projections": ["up_proj"]}, "its projections are gate_up_proj"),
    ],
)
def test_adapters_that_nothing_of_the_model_can_take_are_refused(
    family: str, settings: dict[str, Any], message: str
) -> None:
    put = adapter(LoraSettings(**settings), MeshSizes(), seed=0)
    with pytest.raises(ValueError, match=message):
        put(model_of(family))


def test_factors_are_drawn_from_the_seed_and_leave_the_random_state_alone() -> None:
    settings = LoraSettings(r=2, target_modules=["q_proj"])
    drawn = []
    for seed in (3, 3, 4):
        model = model_of("llama")
        before = torch.get_rng_state()
        adapter(settings, MeshSizes(), seed=seed)(model)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(model.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight"))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
