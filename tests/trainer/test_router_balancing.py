"""Router balancing: what the bias does, and that it survives with the weights that need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import milepost as mp
from milepost.tools.export import export_checkpoint
from milepost_trainer.balancing import SIDECAR, SLOT, RouterBalancing
from milepost_trainer.config import ConfigError
from milepost_trainer.sinks import KEY
from milepost_trainer.sinks import SIDECAR as PROVENANCE
from milepost_trainer.training import train
from tests.states import same
from tests.trainer.test_sinks import GPT_OSS
from tests.trainer.yaml_runs import (
    END,
    MOE,
    SAVED,
    WITHOUT_DROPOUT,
    config_of,
    contents,
    look,
    run,
    run_and_kill,
)

TRANSIENT: dict[str, Any] = {"model_config": MOE, "moe_balancing": "bias_update_transient"}
DEEPSEEK: dict[str, Any] = {
    **WITHOUT_DROPOUT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
NATIVE: dict[str, Any] = {"model_config": DEEPSEEK, "moe_balancing": "bias_update"}
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


def sidecar_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """As anybody reads it."""
    found: dict[str, torch.Tensor] = torch.load(checkpoint / SIDECAR, weights_only=True)
    return found


def model_of(fields: dict[str, Any]) -> Any:
    fields = {**fields, "vocab_size": 32}
    model_type = fields.pop("model_type")
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).train()


def first_router(model: Any, balancing: RouterBalancing) -> Any:
    return model.get_submodule(next(iter(balancing.biases)))


# ---- what the bias does


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_bias_the_choice_and_the_weights_are_those_of_the_family(family: str) -> None:
    fields = {**MOE, "model_type": family}
    if family in ("mixtral", "gpt_oss"):
        fields["num_local_experts"] = fields.pop("num_experts")
    model = model_of(fields)
    ids = torch.arange(32)[None]
    before = model(input_ids=ids).logits
    RouterBalancing("bias_update_transient", 0.001, [model])
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-6)


def test_a_bias_decides_who_is_chosen_and_not_how_much_it_counts() -> None:
    model = model_of(MOE)
    balancing = RouterBalancing("bias_update_transient", 0.001, [model])
    router = first_router(model, balancing)
    hidden = torch.randn(50, MOE["hidden_size"])
    probabilities = torch.softmax(router(hidden)[0].float(), dim=-1)
    next(iter(balancing.biases.values()))[3] = 5.0
    _, weights, experts = router(hidden)
    assert (experts[:, 0] == 3).all()
    chosen = probabilities.gather(1, experts)
    expected = chosen / chosen.sum(1, keepdim=True) if router.norm_topk_prob else chosen
    assert torch.allclose(weights, expected, atol=1e-6)


def test_busy_experts_lose_and_idle_ones_gain() -> None:
    model = model_of(MOE)
    balancing = RouterBalancing("bias_update_transient", 0.25, [model])
    router = first_router(model, balancing)
    router(torch.randn(64, MOE["hidden_size"]))
    with torch.no_grad():
        router(torch.randn(64, MOE["hidden_size"]))  # an evaluation is not counted
    name, bias = next(iter(balancing.biases.items()))
    load = balancing.loads[name].clone()
    assert load.sum() == 128
    balancing.update()
    assert torch.equal(bias, 0.25 * torch.sign(32.0 - load))
    balancing.update()  # nothing was chosen since
    assert torch.equal(bias, 0.25 * torch.sign(32.0 - load))


@pytest.mark.parametrize(
    ("mode", "fields", "message"),
    [
        ("bias_update", MOE, r"e_score_correction_bias, which model\.layers\.0\.mlp\.gate .*_tran"),
        ("bias_update_transient", DEEPSEEK, r"routers without .*; use bias_update$"),
        ("bias_update", WITHOUT_DROPOUT, r"the model has no routers to balance"),
    ],
)
def test_a_mode_that_the_family_does_not_have_is_refused(
    mode: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterBalancing(mode, 0.001, [model_of(fields)])


# ---- in runs


@pytest.mark.parametrize("mesh", ["", "dp_shard2 ep2", "pp2"])
def test_biases_survive_a_kill_and_go_to_another_mesh(
    mesh: str, text: Path, tmp_path: Path
) -> None:
    end = run(tmp_path / "whole", text, mesh, **TRANSIENT)
    run_and_kill(tmp_path / "killed", text, mesh, **TRANSIENT)
    saved = sidecar_of(tmp_path / "killed" / f"checkpoint-{SAVED}")
    assert sorted(saved) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert all(bias.shape == (4,) and bias.abs().max() > 0 for bias in saved.values())
    for other in ("", "dp_shard2"):
        for found in look(tmp_path / "killed", text, other, **TRANSIENT):
            assert same(found["biases"], saved)
    resumed = run(tmp_path / "killed", text, mesh, **TRANSIENT)
    assert same(sidecar_of(resumed), sidecar_of(end)) and not same(sidecar_of(end), saved)
    assert same(contents(resumed), contents(end))


def test_the_slot_of_the_family_and_the_sidecar_hold_the_same(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path / "run", text, **NATIVE))
    end = tmp_path / "run" / f"checkpoint-{END}"
    weights = mp.Checkpoint.open(end).read_weights()
    saved = sidecar_of(end)
    assert list(saved) == ["model.layers.1.mlp.gate"]
    for name, bias in saved.items():
        assert torch.equal(weights[f"{name}.{SLOT}"], bias) and bias.abs().max() > 0
    # a model that brings biases starts with them
    model = AutoModelForCausalLM.from_pretrained(end)
    assert same(RouterBalancing("bias_update", 0.001, [model]).biases, saved)


def test_an_export_carries_the_biases_and_one_without_them_is_refused(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path / "run", text, **TRANSIENT))
    checkpoint = tmp_path / "run" / f"checkpoint-{END}"
    export_checkpoint(checkpoint, tmp_path / "exported")
    assert same(sidecar_of(tmp_path / "exported"), sidecar_of(checkpoint))
    (checkpoint / SIDECAR).unlink()
    with pytest.raises(mp.errors.CheckpointError, match=SIDECAR):
        export_checkpoint(checkpoint, tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        (TRANSIENT, {}),
        (NATIVE, {}),
        ({**TRANSIENT, "model_config": GPT_OSS, "sinks": "live"}, {KEY: "live"}),
    ],
    ids=["transient", "native", "beside-sinks"],
)
def test_a_balanced_run_states_its_mode_in_its_provenance(
    changes: dict[str, Any], also: dict[str, str], text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, max_steps=1, **changes))
    checkpoint = tmp_path / "checkpoint-1"
    provenance = json.loads((checkpoint / PROVENANCE).read_text())
    assert provenance == {**also, "router_balancing": changes["moe_balancing"]}
    manifest = json.loads((checkpoint / "milepost.json").read_text())
    assert {PROVENANCE, SIDECAR} <= {*manifest["needs"]}


def test_a_run_that_is_not_balanced_states_nothing(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, text, max_steps=1, model_config=MOE))
    assert not (tmp_path / "checkpoint-1" / PROVENANCE).exists()


def test_biases_of_another_shape_are_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    torch.save({"model.layers.0.mlp.gate": torch.zeros(3)}, tmp_path / "foreign" / SIDECAR)
    balancing = RouterBalancing("bias_update_transient", 0.001, [model_of(MOE)])
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.gate: a bias of \(3,\)"):
        balancing.restore(tmp_path / "foreign")


def test_biases_that_are_missing_or_belong_to_nobody_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"model.layers.7.mlp.gate": torch.ones(4)}, tmp_path / SIDECAR)
    balancing = RouterBalancing("bias_update_transient", 0.001, [model_of(MOE)])
    balancing.restore(tmp_path)
    balancing.restore(tmp_path / "nowhere")
    assert all(bias.abs().max() == 0 for bias in balancing.biases.values())
    assert "no bias for model.layers.0.mlp.gate" in caplog.text
    assert "no router of the model is called model.layers.7.mlp.gate" in caplog.text
    assert f"nowhere/{SIDECAR} is not there" in caplog.text
