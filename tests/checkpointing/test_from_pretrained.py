"""A checkpoint directory is a Hugging Face model: transformers itself is the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import milepost as mp
from tests.directories import opened
from tests.states import bits


def llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def qwen2() -> Any:
    config = Qwen2Config(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=29, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: llama(tied=True),
    "llama-untied": lambda: llama(tied=False),
    "llama-bf16": lambda: llama(tied=True, dtype=torch.bfloat16),
    "qwen2": qwen2,
    "gpt2": gpt2,
}
IDS = torch.tensor([[1, 5, 9, 2]])


def assert_loads_as(path: Path, model: Any) -> None:
    """transformers loads every weight, misses none, and computes the same logits."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    expected = {name: bits(t) for name, t in model.state_dict().items()}
    assert {name: bits(t) for name, t in loaded.state_dict().items()} == expected
    assert loaded.dtype == model.dtype
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.case("V07")
@pytest.mark.parametrize("limit", ["5GB", 2000])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_what_was_saved(name: str, limit: int | str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    path = tmp_path / "checkpoint-1"
    report = mp.save(path, {"model": model}, step=1, max_shard_size=limit)
    assert opened(path).manifest.models["model"].huggingface
    assert report.notes == ()
    assert_loads_as(path, model)
    tied = opened(path).tied
    assert bool(tied) == bool(model.config.tie_word_embeddings)


def test_a_training_checkpoint_loads_too_whatever_else_lies_in_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, critic = llama(tied=True).train(), gpt2()
    optimizer = torch.optim.AdamW([*model.parameters(), *critic.parameters()])
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    path = tmp_path / "checkpoint-1"
    state = {"model": model, "critic": critic, "optimizer": optimizer, "at": {"step": 1}}
    mp.save(path, state, step=1)
    assert_loads_as(path, model)
    assert_loads_as(path / "critic", critic)
    moved = shutil.move(path, tmp_path / "elsewhere")
    assert_loads_as(Path(moved), model)
    assert mp.Checkpoint.open(moved).verify().problems == ()


@pytest.mark.case("V61")
def test_a_compiled_model_loads_as_the_plain_one(tmp_path: Path) -> None:
    model = llama(tied=True)
    compiled: Any = torch.compile(model, backend="eager")
    mp.save(tmp_path / "checkpoint-1", {"model": compiled}, step=1)
    assert_loads_as(tmp_path / "checkpoint-1", model)


@pytest.mark.case("V01")
def test_a_head_that_was_untied_by_hand_is_saved_and_loaded_apart(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert bits(loaded.lm_head.weight) == bits(model.lm_head.weight)
    assert bits(loaded.model.embed_tokens.weight) == bits(model.model.embed_tokens.weight)


def test_what_transformers_wrote_fills_a_model_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, build in MODELS.items():
        model, live = build(), build()
        model.save_pretrained(tmp_path / name, max_shard_size="4KB")
        report = mp.load(tmp_path / name, {"model": live})
        assert report.level is mp.Level.WEIGHTS_ONLY
        expected = {key: bits(t) for key, t in model.state_dict().items()}
        assert {key: bits(t) for key, t in live.state_dict().items()} == expected


@pytest.mark.case("V12")
def test_a_generation_config_that_transformers_would_refuse_costs_no_weights(
    tmp_path: Path,
) -> None:
    model = llama(tied=True)
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.7
    report = mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    assert any("generation" in note for note in report.notes)
    document = json.loads((tmp_path / "checkpoint-1" / "generation_config.json").read_bytes())
    assert document["temperature"] == 0.7
    assert mp.Checkpoint.open(tmp_path / "checkpoint-1").verify().ok
    live = llama(tied=True)
    mp.load(tmp_path / "checkpoint-1", {"model": live})
    assert bits(live.lm_head.weight) == bits(model.lm_head.weight)


@pytest.mark.case("V12")
@pytest.mark.case("V13")
def test_trouble_with_a_side_file_is_a_note_and_the_weights_are_kept(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            raise RuntimeError("no vocabulary")

    model = llama(tied=True)
    path = tmp_path / "checkpoint-1"
    report = mp.save(path, {"model": model}, step=1, processing_class=Tokenizer())
    assert any("no vocabulary" in note for note in report.notes)
    assert opened(path).manifest.notes == list(report.notes)
    assert_loads_as(path, model)


def test_the_card_and_the_configs_say_what_they_should(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": llama(tied=True)}, step=1)
    config = json.loads((tmp_path / "checkpoint-1" / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "milepost" in (tmp_path / "checkpoint-1" / "README.md").read_text()
    roles = {file.name: file.role for file in opened(tmp_path / "checkpoint-1").files()}
    assert roles["config.json"] == roles["README.md"] == "info"
