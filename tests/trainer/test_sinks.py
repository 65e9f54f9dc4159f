"""What a run does with the attention sinks of GPT-OSS is done, recorded and held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost_trainer.config import ConfigError
from milepost_trainer.sinks import KEY, SIDECAR
from milepost_trainer.training import Run, train
from tests.trainer.yaml_runs import WITHOUT_DROPOUT, config_of, run

GPT_OSS: dict[str, Any] = {
    **WITHOUT_DROPOUT,
    "model_type": "gpt_oss",
    "head_dim": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "attn_implementation": "eager",
}
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}


def changed_by_a_step(output: Path, text: Path, **changes: Any) -> tuple[Any, Any]:
    """The sinks before and after a step of training."""
    config = config_of(output, text, model_config=GPT_OSS, max_steps=1, **changes)
    training = Run(config)
    params = dict(training.model.named_parameters())
    sinks = [param for name, param in params.items() if name.endswith("sinks")]
    before = [param.detach().clone() for param in sinks]
    with mp.CheckpointManager(output, resume=mp.Resume.NEVER) as manager:
        training.step(1, manager)
    return before, [param.detach().clone() for param in sinks]


@pytest.mark.parametrize(
    ("asked", "learn"),
    [
        ({}, True),
        ({"sinks": "trainable"}, True),
        ({"sinks": "live"}, False),
        ({"lora": LORA}, False),
        ({"sinks": "trainable", "lora": LORA}, True),
    ],
    ids=str,
)
def test_sinks_that_act_learn_or_stay(
    asked: dict[str, Any], learn: bool, text: Path, tmp_path: Path
) -> None:
    before, after = changed_by_a_step(tmp_path, text, **asked)
    assert len(before) == 2 and all(value.abs().max() < 1 for value in before)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == learn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [{"reset_sinks": True}, {"sinks": "neutralized"}], ids=str)
def test_sinks_that_are_put_out_take_no_attention_in_any_dtype(
    asked: dict[str, Any], dtype: str, text: Path, tmp_path: Path
) -> None:
    before, after = changed_by_a_step(tmp_path, text, dtype=dtype, **asked)
    neutral = torch.tensor(-1e4, dtype=getattr(torch, dtype))
    assert all((value == neutral).all() for value in [*before, *after])


def test_attention_without_sinks_is_what_is_left(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, text, model_config=GPT_OSS, max_steps=1, reset_sinks=True))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-1", attn_implementation="eager"
    ).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        output = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert torch.equal(model(ids).logits, output)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(0.0)
        assert not torch.allclose(model(ids).logits, output, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [({}, "trainable"), ({"sinks": "live"}, "live"), ({"reset_sinks": True}, "neutralized")],
    ids=str,
)
def test_every_save_records_the_policy_and_its_weights_need_the_record(
    asked: dict[str, Any], recorded: str, text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, model_config=GPT_OSS, max_steps=2, save_steps=1, **asked))
    for step in (1, 2):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert json.loads((checkpoint / SIDECAR).read_text()) == {KEY: recorded}
        manifest = json.loads((checkpoint / "milepost.json").read_text())
        assert SIDECAR in manifest["needs"]


def test_a_resume_with_another_policy_is_refused(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, text, model_config=GPT_OSS, max_steps=1, sinks="live"))
    with pytest.raises(ConfigError, match=r"this run has them neutralized, .* they were live"):
        train(config_of(tmp_path, text, model_config=GPT_OSS, reset_sinks=True))
    train(config_of(tmp_path, text, model_config=GPT_OSS, max_steps=2, sinks="live"))


def test_a_damaged_record_is_named(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path / "run", text, model_config=GPT_OSS, max_steps=1))
    training = Run(config_of(tmp_path, text, model_config=GPT_OSS))
    (tmp_path / SIDECAR).write_text("[]")
    with pytest.raises(ConfigError, match=f"{SIDECAR}: expected an object with '{KEY}'"):
        training.sinks.check(tmp_path)


def test_a_model_without_sinks_has_no_record_and_takes_no_policy(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, max_steps=1))
    assert not (tmp_path / "checkpoint-1" / SIDECAR).exists()
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not have"):
        train(config_of(tmp_path / "other", text, sinks="live"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard2", "dp_shard2 ep2", "pp2"])
@pytest.mark.parametrize("asked", [{"reset_sinks": True}, {"sinks": "live"}], ids=str)
def test_the_policy_holds_on_every_mesh(
    asked: dict[str, Any], mesh: str, text: Path, tmp_path: Path
) -> None:
    alone = run(tmp_path / "one", text, "", model_config=GPT_OSS, max_steps=2, **asked)
    many = run(tmp_path / "many", text, mesh, model_config=GPT_OSS, max_steps=2, **asked)
    weights = [mp.Checkpoint.open(path).read_weights() for path in (alone, many)]
    found = [name for name in weights[0] if name.endswith("sinks")]
    assert found and all(torch.equal(weights[0][name], weights[1][name]) for name in found)
    assert json.loads((many / SIDECAR).read_text()) == json.loads((alone / SIDECAR).read_text())
